"""Batches of images on a GPU: decoded by processes, copied by one thread, resized on the GPU.

Every thread that runs Python delays the one that launches the work of an encoder. So there is one
other thread, and it does little for each image.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image

from fedvl.data.decoders import SHAREABLE, DecodedPixels, Decoders
from fedvl.data.images import BadImage
from fedvl.errors import FedVLError
from fedvl.models.preprocessing import Preprocessing
from fedvl.models.resampling import resample
from fedvl.tensors import usable_cores

# A core is left for what launches work on the GPU; more processes would decode more than any tower takes.
DECODING_PROCESSES = min(24, max(2, usable_cores() - 1))
WORTH_PROCESSES = 1024  # images: processes take half a second to begin
CHUNK = 16  # images of a request to a process
DECODED_AHEAD = 3  # batches
STAGED_AHEAD = 2
RESIZED_AT_ONCE = 2**25  # bytes; in float64 they are eight times as many
MAX_RESIZED = 3 * 2**20  # bytes of an image that a thread decoded
# Making the matrices of a size takes as long as Pillow takes for six images, so only common sizes have some.
OFTEN = 8  # images of a size that Pillow resizes before
MAX_COMMON = 16  # sizes, of two matrices each

PreparedPixels = DecodedPixels | torch.Tensor | str  # decoded, preprocessed, or why an image is unusable


class ReadableImages(Protocol):
    def read(self, index: int) -> Image.Image: ...

    def source(self, index: int) -> Path | bytes | None: ...


class PreprocessingEncoder(Protocol):
    @property
    def preprocessing(self) -> Preprocessing: ...

    def preprocess(self, image: Image.Image) -> torch.Tensor: ...


class StagedBatch(NamedTuple):
    """Preprocessed images on a device, padded with black ones to the size of a batch."""

    images: list[int]
    pixels: torch.Tensor | None  # None where no image is usable
    failed: list[tuple[int, str]]
    ready: torch.cuda.Event | None = None

    def arrived(self) -> torch.Tensor | None:
        """Return the pixels, for work that is launched from now on."""
        if self.ready is not None and self.pixels is not None:
            stream = torch.cuda.current_stream(self.pixels.device)
            stream.wait_event(self.ready)
            self.pixels.record_stream(stream)
        return self.pixels


class _Stager:
    """Has chunks of images decoded ahead, and puts batches of them on a device."""

    def __init__(
        self,
        images: ReadableImages,
        encoder: PreprocessingEncoder,
        device: torch.device,
        size: int,
        decoders: Decoders | None,
    ) -> None:
        self.images, self.encoder, self.device, self.size, self.decoders = images, encoder, device, size, decoders
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.readers = ThreadPoolExecutor(DECODING_PROCESSES)
        self.begun = deque[Callable[[], Sequence[tuple[int, DecodedPixels | Future[PreparedPixels]]]]]()
        self.met = Counter[tuple[int, int]]()
        self.common = set[tuple[int, int]]()
        self.counting = Lock()

    def begin(self, numbers: Sequence[int]) -> None:
        """Have a chunk decoded."""
        if self.decoders is None:
            read = [self.readers.submit(self._read, index) for index in numbers]
            self.begun.append(lambda: list(zip(numbers, read, strict=True)))
            return
        decoded = self.decoders.begin([_source(self.images, index) for index in numbers])
        self.begun.append(
            lambda: [(index, self._prepared(index, pixels)) for index, pixels in zip(numbers, decoded(), strict=True)]
        )

    def _prepared(self, index: int, pixels: DecodedPixels | None) -> DecodedPixels | Future[PreparedPixels]:
        """Return an image as it was decoded if the device resizes it, or else what prepares it."""
        if pixels is None:
            return self.readers.submit(self._read, index)
        if not self._resizes(pixels.shape[1], pixels.shape[0]):
            return self.readers.submit(lambda: self.encoder.preprocess(Image.fromarray(pixels)))
        return pixels

    def _read(self, index: int) -> PreparedPixels:
        try:
            image = self.images.read(index)
        except BadImage as error:
            return error.reason
        if 3 * image.width * image.height <= MAX_RESIZED and self._resizes(image.width, image.height):
            return np.asarray(image)
        return self.encoder.preprocess(image)

    def _resizes(self, width: int, height: int) -> bool:
        """Count an image; return whether the device resizes it."""
        if self.encoder.preprocessing.resampled(width, height) is None:
            return False
        with self.counting:
            if self.met[width, height] >= OFTEN and len(self.common) < MAX_COMMON:
                self.common.add((width, height))
            self.met[width, height] += 1
            return (width, height) in self.common

    def stage(self, chunks: int) -> StagedBatch:
        """Put the next chunks on the device as a batch."""
        decoded = [entry for _ in range(chunks) for entry in self.begun.popleft()()]
        entries = [(index, pixels.result() if isinstance(pixels, Future) else pixels) for index, pixels in decoded]
        failed = [(index, reason) for index, reason in entries if isinstance(reason, str)]
        good = [(index, pixels) for index, pixels in entries if not isinstance(pixels, str)]
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            pixels = self._joined([pixels for _, pixels in good]) if good else None
            ready = self.stream.record_event() if self.stream is not None else None
        return StagedBatch([index for index, _ in good], pixels, failed, ready)

    def _joined(self, images: Sequence[DecodedPixels | torch.Tensor]) -> torch.Tensor:
        """Return images in their order, each shape resized in few products."""
        shapes: dict[tuple[int, ...], list[int]] = {}
        for place, image in enumerate(images):
            shapes.setdefault((image.ndim, *image.shape), []).append(place)
        order: list[int] = []
        parts: list[torch.Tensor] = []
        for places in shapes.values():
            most = max(1, RESIZED_AT_ONCE // np.asarray(images[places[0]]).nbytes)
            for first in range(0, len(places), most):
                some = places[first : first + most]
                order += some
                parts.append(self._resized([images[place] for place in some]))
        if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
            raise uneven()
        joined = torch.cat([*parts, parts[0].new_zeros(self.size - len(order), *parts[0].shape[1:])])
        if order != sorted(order):
            places = np.argsort(order).tolist() + list(range(len(order), self.size))
            joined = joined[torch.tensor(places, device=self.device)]
        return joined

    def _resized(self, images: Sequence[DecodedPixels | torch.Tensor]) -> torch.Tensor:
        shape, on_gpu = images[0].shape, self.stream is not None
        staged = torch.empty(len(images), *shape, dtype=torch.uint8, pin_memory=on_gpu)
        np.stack([np.asarray(image) for image in images], out=staged.numpy())
        pixels = staged.to(self.device, non_blocking=on_gpu)
        if isinstance(images[0], torch.Tensor):
            return pixels
        window = self.encoder.preprocessing.resampled(shape[1], shape[0])
        assert window is not None, "others are preprocessed"
        return resample(pixels, window)


def start_decoders(images: ReadableImages, count: int, size: int) -> AbstractContextManager[Decoders | None]:
    """Start processes that decode images for batches of a size, if there are many, in files."""
    if count < WORTH_PROCESSES or not SHAREABLE or _source(images, 0) is None:
        return nullcontext()
    return Decoders(DECODING_PROCESSES, -(-DECODED_AHEAD * _chunks(size) // DECODING_PROCESSES))


def stage_batches(
    images: ReadableImages,
    wanted: Sequence[int],
    encoder: PreprocessingEncoder,
    device: torch.device,
    size: int,
    decoders: Decoders | None = None,
) -> Iterator[StagedBatch]:
    """Yield batches of preprocessed images on a device, in order; several are prepared ahead."""
    stager = _Stager(images, encoder, device, size, decoders)
    batches = [wanted[start : start + size] for start in range(0, len(wanted), size)]
    waiting = (batch[first : first + CHUNK] for batch in batches for first in range(0, len(batch), CHUNK))
    ahead = DECODED_AHEAD * _chunks(size) if decoders is None else len(decoders.areas)
    with ExitStack() as stack:
        stack.enter_context(stager.readers)
        thread = stack.enter_context(ThreadPoolExecutor(1))

        def stage(count: int) -> StagedBatch:
            for chunk in islice(waiting, ahead - len(stager.begun)):
                stager.begin(chunk)
            return stager.stage(_chunks(count))

        staged = deque[Future[StagedBatch]]()
        try:
            for batch in batches:
                staged.append(thread.submit(stage, len(batch)))
                if len(staged) > STAGED_AHEAD:
                    yield staged.popleft().result()
            while staged:
                yield staged.popleft().result()
        finally:
            thread.shutdown(wait=False, cancel_futures=True)
            stager.readers.shutdown(wait=False, cancel_futures=True)


def _source(images: ReadableImages, index: int) -> Path | bytes | None:
    try:
        return images.source(index)
    except BadImage:
        return None


def _chunks(images: int) -> int:
    return -(-images // CHUNK)


def uneven() -> FedVLError:
    return FedVLError(
        "This model keeps the aspect ratio of images, and images of several shapes cannot be cached as one array; "
        "crop them to one shape first."
    )
