"""Two threads of the model: one encodes images of all sessions in shared batches, one answers."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from fedvl.data.images import BadImage
from fedvl.serve.model import TrainedModel
from fedvl.tensors import Tensors

BATCH = 64
READERS = 2  # threads that decode the next batch while one is encoded

Encoded = Tensors | BadImage
log = logging.getLogger("fedvl.serve")


class BusyError(Exception):
    """Raised when too many images are waiting."""


class Image(NamedTuple):
    data: bytes
    encoded: "Future[Encoded]"


class Worker:
    def __init__(self, run: TrainedModel, pending_limit: int) -> None:
        self.pending = 0  # images accepted but not yet encoded
        self.batches = 0
        self.encoded = 0
        self.seconds = 0.0  # spent in encoding
        self._run, self._limit = run, pending_limit
        self._images: deque[Image] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="fedvl-read")
        # a thread of its own, so that what is encoded is answered while the next batch is encoded
        self._answers = ThreadPoolExecutor(1, thread_name_prefix="fedvl-answer")
        self._thread = threading.Thread(target=self._work, name="fedvl-model", daemon=True)
        self._thread.start()

    def encode(self, images: Sequence[bytes]) -> "list[Future[Encoded]]":
        """Accept all of these images or none; each future gives the encoded image or a BadImage."""
        with self._changed:
            if self.pending + len(images) > self._limit:
                raise BusyError
            self.pending += len(images)
            taken = [Image(data, Future()) for data in images]
            self._images.extend(taken)
            self._changed.notify()
        return [image.encoded for image in taken]

    def call(self, function: Callable[[], Any]) -> "Future[Any]":
        """Run a function of the model; one at a time, in order."""
        return self._answers.submit(function)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        self._readers.shutdown(cancel_futures=True)
        self._answers.shutdown(cancel_futures=True)

    def _work(self) -> None:
        reading: list[tuple[Image, Future[Any]]] = []  # decoded while the previous batch is encoded
        while True:
            with self._changed:
                while not (self._stopped or self._images or reading):
                    self._changed.wait()
                if self._stopped:
                    return
                taken = [self._images.popleft() for _ in range(min(BATCH, len(self._images)))]
            ahead = [(image, self._readers.submit(self._run.read, image.data)) for image in taken]
            if reading:
                self._encode(reading)
            reading = ahead

    def _encode(self, reading: "list[tuple[Image, Future[Any]]]") -> None:
        pixels, good = [], []
        for image, read in reading:
            try:
                pixels.append(read.result())
                good.append(image)
            except BadImage as refusal:
                self._finish(image, refusal)
            except Exception:
                log.exception("An image could not be read.")
                self._finish(image, BadImage("the service failed to read it; see its log."))
        if not good:
            return
        began = time.perf_counter()
        try:
            rows = self._run.encode(pixels)
        except Exception:  # such as out of memory: these images fail, the service continues
            log.exception("A batch could not be encoded.")
            rows = [BadImage("the service failed to encode it; see its log.")] * len(good)
        self.seconds += time.perf_counter() - began
        self.batches += 1
        self.encoded += len(good)
        for image, row in zip(good, rows, strict=True):
            self._finish(image, row)

    def _finish(self, image: Image, encoded: Encoded) -> None:
        with self._changed:
            self.pending -= 1
        settle(image.encoded, lambda: encoded)


def settle(future: "Future[Any]", function: Callable[[], Any]) -> None:
    """Set a future's result or exception, unless it was cancelled."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:  # raised where the result is awaited
            future.set_exception(error)
