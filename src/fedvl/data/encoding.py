"""Encode images in batches of one size, so that the bits of a row depend on its image alone.

The last bits of a matrix product may depend on its number of rows, and on the threads that share
them. So every batch has the same number of images, padded with black ones, and a processor computes
each batch on one thread, several batches side by side.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image

from fedvl.data.decoders import Decoders
from fedvl.data.images import BadImage
from fedvl.data.staging import ReadableImages, stage_batches, start_decoders, uneven
from fedvl.models.preprocessing import Preprocessing
from fedvl.tensors import on_threads, usable_cores

NOT_FINITE = "the model gives numbers for it that are not finite."
BATCHES = {("cuda", "float32"): 64, ("cuda", "bfloat16"): 256}  # images of a forward pass
BATCH = 8  # on a processor
READ_AT_ONCE = 64  # images
# Pillow releases the GIL while it decodes; more threads than this wait for each other.
READERS = min(16, max(2, usable_cores()))
_AHEAD = 2  # batches that are read while one is encoded: readers have work while the last image of a batch is awaited
_LAUNCHED_AHEAD = 1  # batches

Progress = Callable[[int, int], None]
PreparedImage = torch.Tensor  # a preprocessed image


class ImageEncoder(Protocol):
    name: str
    encoding: str

    @property
    def fingerprint(self) -> str: ...

    @property
    def preprocessing(self) -> Preprocessing: ...

    def preprocess(self, image: Image.Image) -> torch.Tensor: ...

    def normalise(self, pixels: torch.Tensor) -> torch.Tensor: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


@runtime_checkable
class EncodesImages(Protocol):
    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor: ...

    def encode_patches(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class EncodedImages(NamedTuple):
    """Some images, encoded: rows of the usable ones, and the others with the reason."""

    images: list[int]
    rows: torch.Tensor
    failed: list[tuple[int, str]]


class _Rows(NamedTuple):
    """Rows in the processor's memory, or on their way to it from a GPU."""

    tensor: torch.Tensor
    copied: torch.cuda.Event | None = None

    def arrived(self) -> torch.Tensor:
        if self.copied is not None:
            self.copied.synchronize()
        return self.tensor


class _Launched(NamedTuple):
    """A batch that a GPU may still be at work on."""

    images: list[int]
    rows: list[_Rows]
    failed: list[tuple[int, str]]

    def finished(self) -> EncodedImages:
        """Wait for the rows, and leave out those that are not finite.

        NumPy does the work: PyTorch's team of threads would then spin for a while, on cores that
        decode.
        """
        rows = _joined(self.rows, len(self.images))
        finite = np.isfinite(rows.flatten(1).numpy()).all(1)
        if finite.all():
            return EncodedImages(self.images, rows, self.failed)
        kept = [image for image, fine in zip(self.images, finite, strict=True) if fine]
        lost = [(image, NOT_FINITE) for image, fine in zip(self.images, finite, strict=True) if not fine]
        return EncodedImages(kept, rows[torch.from_numpy(finite)], self.failed + lost)


def decoders_for(
    images: ReadableImages, count: int, encoder: ImageEncoder, kind: str
) -> AbstractContextManager[Decoders | None]:
    """Start processes that decode images, if an encoder takes them faster than threads do."""
    size = _staged(encoder, kind)
    return nullcontext() if size is None else start_decoders(images, count, size)


def encode_rows(
    images: ReadableImages, wanted: Sequence[int], encoder: ImageEncoder, kind: str, decoders: Decoders | None = None
) -> Iterator[EncodedImages]:
    """Read and encode images, by their numbers; processes decode them where there are some.

    A batch is waited for when the next ones are launched, so that a GPU always has work.
    """
    launched = deque[_Launched]()
    for batch in _launched(images, wanted, encoder, kind, decoders):
        launched.append(batch)
        if len(launched) > _LAUNCHED_AHEAD:
            yield launched.popleft().finished()
    for batch in launched:
        yield batch.finished()


def _staged(encoder: ImageEncoder, kind: str) -> int | None:
    """Return the size of the batches that are prepared on the encoder's device, if they are."""
    if not isinstance(encoder, EncodesImages) or kind == "pixels":
        return None
    return BATCHES.get((next(encoder.parameters()).device.type, encoder.encoding))


def _launched(
    images: ReadableImages, wanted: Sequence[int], encoder: ImageEncoder, kind: str, decoders: Decoders | None
) -> Iterator[_Launched]:
    if isinstance(encoder, EncodesImages) and (size := _staged(encoder, kind)) is not None:
        device = next(encoder.parameters()).device
        for staged in stage_batches(images, wanted, encoder, device, size, decoders):
            pixels = staged.arrived()
            rows = [] if pixels is None else [_encode(encoder, kind, pixels)]
            yield _Launched(staged.images, rows, staged.failed)
        return
    for batch in _read_batches(images, wanted, encoder):
        usable = {index: pixels for index, pixels in batch if isinstance(pixels, torch.Tensor)}
        failed = [(index, reason) for index, reason in batch if isinstance(reason, str)]
        yield _Launched(list(usable), _launch(encoder, kind, list(usable.values())), failed)


def encode_images(encoder: ImageEncoder, kind: str, images: Sequence[PreparedImage]) -> torch.Tensor:
    """Encode preprocessed images as rows of the given kind, with the bits of the cache."""
    return _joined(_launch(encoder, kind, images), len(images))


def _joined(rows: Sequence[_Rows], count: int) -> torch.Tensor:
    parts = [part.arrived() for part in rows]
    if not parts:
        return torch.empty(0, 1)
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:count]


def _launch(encoder: ImageEncoder, kind: str, images: Sequence[PreparedImage]) -> list[_Rows]:
    """Begin to encode images; neither a GPU nor this thread waits for the other."""
    if any(image.shape != images[0].shape for image in images):
        raise uneven()
    if not images or not isinstance(encoder, EncodesImages) or kind == "pixels":
        return [_Rows(_stack(images, False))] if images else []
    device = next(encoder.parameters()).device
    size = BATCHES.get((device.type, encoder.encoding), BATCH)
    on_gpu = device.type == "cuda"
    parts = [
        _stack(_padded(images[first : first + size], size), on_gpu).to(device, non_blocking=on_gpu)
        for first in range(0, len(images), size)
    ]
    if on_gpu:
        return [_encode(encoder, kind, part) for part in parts]
    threads = min(len(parts), torch.get_num_threads())
    with on_threads(1):
        if threads == 1:
            return [_encode(encoder, kind, part) for part in parts]
        with ThreadPoolExecutor(threads) as pool:  # torch's threads begin with what is set here
            return list(pool.map(lambda part: _encode(encoder, kind, part), parts))


def _padded(images: Sequence[PreparedImage], size: int) -> list[PreparedImage]:
    return [*images, *[torch.zeros_like(images[0])] * (size - len(images))]


def _encode(encoder: EncodesImages, kind: str, pixels: torch.Tensor) -> _Rows:
    device = pixels.device
    lower = torch.autocast(device.type, torch.bfloat16, enabled=encoder.encoding == "bfloat16")  # type: ignore[attr-defined]
    with torch.inference_mode(), lower:
        normalised = encoder.normalise(pixels)  # type: ignore[attr-defined]
        rows = encoder.encode_image(normalised) if kind == "features" else encoder.encode_patches(normalised)[1]
        if device.type != "cuda":
            return _Rows(rows.half().cpu())
        # The copy back is in the queue before the next batch is, which it would otherwise wait for.
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copy = rows.half().to("cpu", non_blocking=True)
        copied.record(torch.cuda.current_stream(device))
        return _Rows(copy, copied)


def _stack(images: Sequence[PreparedImage], pinned: bool = False) -> torch.Tensor:
    """Stack by one thread: a team of PyTorch's would wait for cores that readers have."""
    stacked = torch.empty(len(images), *images[0].shape, dtype=images[0].dtype, pin_memory=pinned)
    np.stack([image.numpy() for image in images], out=stacked.numpy())
    return stacked


def _read_batches(
    images: ReadableImages, wanted: Sequence[int], encoder: ImageEncoder
) -> Iterator[list[tuple[int, PreparedImage | str]]]:
    """Yield batches of (index, pixels or error) in order, reading ahead while one is encoded."""

    def preprocessed(index: int) -> PreparedImage | str:
        try:
            return encoder.preprocess(images.read(index))
        except BadImage as error:
            return error.reason

    def submit(start: int) -> list[tuple[int, Future[PreparedImage | str]]]:
        return [(index, pool.submit(preprocessed, index)) for index in wanted[start : start + READ_AT_ONCE]]

    with ThreadPoolExecutor(READERS) as pool:
        try:
            starts = range(0, len(wanted), READ_AT_ONCE)
            ahead = deque(map(submit, starts[:_AHEAD]))
            for number in range(len(starts)):
                batch = [(index, future.result()) for index, future in ahead.popleft()]
                ahead.extend(map(submit, starts[number + _AHEAD : number + _AHEAD + 1]))
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)
