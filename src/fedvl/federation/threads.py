"""Processor threads by the size of the work: chunks side by side, a tiny step on one thread.

Threads meet after every operation. Where an operation takes microseconds, and another process has
one of the cores, the others wait for that one's turn: milliseconds. So several chunks of a round
are shared out to threads whole, which meet when a chunk is done. The choice follows from sizes
alone, not from the machine or its load, so that it is the same wherever a chunk is trained.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from fedvl.tensors import count_elements, on_threads

if TYPE_CHECKING:
    from fedvl.federation.chunks import Chunk
    from fedvl.federation.training import ChunkTraining

SMALL_STEP = 20_000_000  # floating-point operations; about half a millisecond of one core

Train = TypeVar("Train", bound=Callable[..., Any])
Job = TypeVar("Job")
Found = TypeVar("Found")


def fitting_threads(through_encoder: bool, elements: int, rows: int, most: int) -> int:
    """Return the threads for a step on so many rows, each with ``elements`` that are trained.

    A linear map takes two operations for each element and row, and its gradient twice as many. A
    step through an encoder is large, however little is trained.
    """
    return most if through_encoder or 6 * elements * rows > SMALL_STEP else 1


def with_fitting_threads(train: Train) -> Train:
    """Train a chunk on as many threads as its steps are worth."""

    @wraps(train)
    def fitted(engine: "ChunkTraining", round_index: int, chunk: "Chunk", *rest: Any, **named: Any) -> Any:
        per_sample = engine.method.role.per_sample
        private = {name: tensor[:1] for name, tensor in chunk.private.items() if name not in per_sample}
        elements = count_elements(chunk.begins[0]) + count_elements(private)
        rows = len(chunk.clients) * min(engine.training.batch_size, chunk.used[0])
        number = fitting_threads(engine.method.through_encoder, elements, rows, torch.get_num_threads())
        with on_threads(number):
            return train(engine, round_index, chunk, *rest, **named)

    return cast("Train", fitted)


def side_by_side(work: Callable[[Job], Found], items: Iterable[Job], threads: int) -> Iterator[Found]:
    """Do work on items on several threads, each with one of torch's; yield results in turn."""
    waiting = deque[Future[Found]]()
    with on_threads(1), ThreadPoolExecutor(threads) as pool:  # torch's threads begin with what is set here
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads:  # no more results are held than are being made
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
