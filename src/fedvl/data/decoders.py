"""Processes that decode images into memory that they share with the run.

Threads wait for each other where Pillow holds Python's lock. A process gets lines of JSON: [number
of an area of the memory, bytes of it that may be filled, images], where an image is a path, or
[first, end] of a file that is behind those bytes. It answers with a list of [height, width] of the
pixels that are then in the area, one image after the other. null stands for a damaged image, or
for one that does not fit; the run reads it itself, and finds the reason. One process loads what
decodes, and splits into the others, which end when their input does, and so with the run.
"""

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedvl.data.images import BadImage, decode

AREA = 24 * 2**20  # bytes for the images of a request; no memory is used for those that stay empty
SHAREABLE = hasattr(os, "memfd_create")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # for a process that only decodes

DecodedPixels = NDArray[np.uint8]  # height x width x 3


class Decoders:
    """Some processes that decode in turn, each with its own areas of memory."""

    def __init__(self, processes: int, areas: int) -> None:
        self.file = os.memfd_create("images")
        os.ftruncate(self.file, processes * areas * AREA)
        memory = mmap.mmap(self.file, processes * areas * AREA)
        self.areas = np.frombuffer(memory, np.uint8).reshape(processes * areas, AREA)
        self.begun = 0
        requests, answers = ([os.pipe() for _ in range(processes)] for _ in range(2))
        theirs = [end for (read, _), (_, write) in zip(requests, answers, strict=True) for end in (read, write)]
        # In a session of its own: Ctrl-C reaches the run alone, which then ends these processes.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fedvl.data.decoders", str(self.file), *map(str, theirs)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[self.file, *theirs],
            env=os.environ | ONE_THREAD,
            start_new_session=True,
        )
        for end in theirs:
            os.close(end)
        self.requests = [os.fdopen(write, "wb", buffering=0) for _, write in requests]
        self.answers = [os.fdopen(read, "rb") for read, _ in answers]

    def begin(self, sources: Sequence[Path | bytes | None]) -> Callable[[], list[DecodedPixels | None]]:
        """Ask for images; return what waits for their pixels, called in the order of requests.

        The pixels are there until as many requests are begun as there are areas; None stands for
        an image without pixels.
        """
        number = self.begun % len(self.areas)
        process, area, limit = number % len(self.requests), self.areas[number], AREA
        self.begun += 1
        request: list[str | tuple[int, int] | None] = []
        for source in sources:
            if isinstance(source, bytes) and len(source) <= limit:
                area[limit - len(source) : limit] = np.frombuffer(source, np.uint8)
                request.append((limit - len(source), limit))
                limit -= len(source)
            else:
                request.append(str(source.absolute()) if isinstance(source, Path) else None)
        with suppress(OSError):  # of a process that has ended: it does not answer either
            self.requests[process].write(json.dumps([number, limit, request]).encode() + b"\n")

        def pixels() -> list[DecodedPixels | None]:
            try:
                shapes: list[list[int] | None] = json.loads(self.answers[process].readline())
            except ValueError:  # The process has ended: its images are read without it.
                return [None] * len(sources)
            end, found = 0, list[DecodedPixels | None]()
            for shape in shapes:
                size = 0 if shape is None else 3 * shape[0] * shape[1]
                found.append(None if shape is None else area[end : end + size].reshape(*shape, 3))
                end += size
            return found

        return pixels

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for requests in self.requests:
            requests.close()
        for answers in self.answers:
            with answers:
                answers.read()
        self.process.wait()
        os.close(self.file)


def _fill(area: DecodedPixels, sources: Sequence[Any]) -> list[tuple[int, int] | None]:
    """Decode images one behind the other; return their heights and widths."""
    shapes, end = list[tuple[int, int] | None](), 0
    for source in sources:
        shape = None
        try:
            if source is not None:
                image = decode(Path(source) if isinstance(source, str) else source, most_pixels=(len(area) - end) // 3)
                size, shape = 3 * image.width * image.height, (image.height, image.width)
                area[end : end + size] = np.asarray(image).reshape(-1)
                end += size
        except BadImage:
            pass
        shapes.append(shape)
    return shapes


def _serve(areas: DecodedPixels, requests: int, answers: int) -> None:
    with suppress(BrokenPipeError), os.fdopen(requests) as lines, os.fdopen(answers, "w") as answer:
        for line in lines:
            number, limit, images = json.loads(line)
            area = areas[number]
            sources = [area[slice(*image)].tobytes() if isinstance(image, list) else image for image in images]
            print(json.dumps(_fill(area[:limit], sources)), file=answer, flush=True)


def main() -> None:
    file, *pipes = map(int, sys.argv[1:])
    areas = np.frombuffer(mmap.mmap(file, 0), np.uint8).reshape(-1, AREA)
    for first in range(0, len(pipes), 2):
        if os.fork() == 0:
            for pipe in pipes[:first] + pipes[first + 2 :]:
                os.close(pipe)
            _serve(areas, *pipes[first : first + 2])
            os._exit(0)  # at once: the run waits for it
    for pipe in pipes:
        os.close(pipe)
    for _ in range(0, len(pipes), 2):
        os.wait()
    os._exit(0)


if __name__ == "__main__":
    main()
