"""Threads of the model: three read images in turn, one encodes them together, one predicts."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from fedvl.data.images import BadImage
from fedvl.serve.askers import Asker, Shares, TurnPool, settle
from fedvl.serve.model import TrainedModel
from fedvl.tensors import Tensors

MAX_IMAGES_AT_ONCE = 64
READERS = 3  # threads that decode images, two for one address; each holds one decoded image in full size
MAX_WAIT = 0.2  # seconds that a decoded image waits for others, in case one is slow to decode

EncodedImage = Tensors | BadImage
log = logging.getLogger("fedvl.serve")


class Image(NamedTuple):
    address: str
    data: bytes
    encoded: "Future[EncodedImage]"


class Worker:
    def __init__(self, run: TrainedModel, pending_limit: int) -> None:
        self.pending = Shares(pending_limit)  # images accepted but not yet encoded
        self.batches = 0
        self.encoded = 0
        self.seconds = 0.0  # spent in encoding
        self._run = run
        self._ready: list[tuple[int, Image, Tensor]] = []  # decoded, with the position in which a reader took it
        self._positions = itertools.count()
        self._reading: set[int] = set()  # positions
        self._unread = 0  # images that wait for a reader, or have one
        self._changed = threading.Condition()
        self._stopped = False
        self._readers = TurnPool(READERS, "fedvl-read")
        # a thread of its own, so that what is encoded is answered while the next batch is encoded
        self._answers = TurnPool(1, "fedvl-answer")
        self._thread = threading.Thread(target=self._work, name="fedvl-model", daemon=True)
        self._thread.start()

    def encode(self, images: Sequence[bytes], asker: Asker) -> "list[Future[EncodedImage]]":
        """Accept all of these images or none; each future gives the encoded image or a BadImage."""
        self.pending.take(asker.address, len(images))
        taken = [Image(asker.address, data, Future()) for data in images]
        with self._changed:
            self._unread += len(taken)
        for image in taken:
            self._readers.submit(asker, partial(self._read, image))
        return [image.encoded for image in taken]

    def call(self, asker: Asker, function: Callable[[], Any]) -> "Future[Any]":
        """Run a function of the model; one at a time, in round-robin order by address."""
        return self._answers.submit(asker, function)

    def read(self, asker: Asker, function: Callable[[], Any]) -> "Future[Any]":
        """Run a function that decodes an image, in turn with the images to encode."""
        self.pending.take(asker.address, 1)
        found = self._readers.submit(asker, function)
        found.add_done_callback(lambda _: self.pending.give_back(asker.address, 1))
        return found

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for each in (self._thread.join, self._readers.stop, self._answers.stop):
            each()

    def _read(self, image: Image) -> None:
        pixels, refusal = None, BadImage("the one who sent it has left.")
        with self._changed:
            position = next(self._positions)
            self._reading.add(position)
        if not image.encoded.cancelled():
            try:
                pixels = self._run.read(image.data)
            except BadImage as error:
                refusal = error
            except Exception:
                log.exception("An image could not be read.")
                refusal = BadImage("the service failed to read it; see its log.")
        with self._changed:
            self._reading.remove(position)
            while len(self._ready) >= 2 * MAX_IMAGES_AT_ONCE and not self._stopped:  # decoded images take memory
                self._changed.wait()
            self._unread -= 1
            if pixels is not None:
                self._ready.append((position, image, pixels))
            self._changed.notify_all()
        if pixels is None:
            self._finish(image, refusal)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._ready)
                self._changed.wait_for(lambda: self._stopped or self._has_batch() or not self._unread, MAX_WAIT)
                if self._stopped:
                    return
                self._ready.sort(key=lambda each: each[0])
                batch, self._ready = self._ready[:MAX_IMAGES_AT_ONCE], self._ready[MAX_IMAGES_AT_ONCE:]
                self._changed.notify_all()
            self._encode([(image, pixels) for _, image, pixels in batch])

    def _has_batch(self) -> bool:
        """Return whether the next batch is decoded; results are returned in order."""
        positions = sorted(position for position, _, _ in self._ready)
        return len(positions) >= MAX_IMAGES_AT_ONCE and all(
            position > positions[MAX_IMAGES_AT_ONCE - 1] for position in self._reading
        )

    def _encode(self, batch: Sequence[tuple[Image, Tensor]]) -> None:
        began = time.perf_counter()
        try:
            rows = self._run.encode([pixels for _, pixels in batch])
        except Exception:  # such as out of memory: these images fail, the service continues
            log.exception("A batch could not be encoded.")
            rows = [BadImage("the service failed to encode it; see its log.")] * len(batch)
        self.seconds += time.perf_counter() - began
        self.batches += 1
        self.encoded += len(batch)
        for (image, _), row in zip(batch, rows, strict=True):
            self._finish(image, row)

    def _finish(self, image: Image, encoded: EncodedImage) -> None:
        self.pending.give_back(image.address, 1)
        settle(image.encoded, lambda: encoded)
