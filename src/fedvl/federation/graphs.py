"""Replay a gradient step on a GPU as one CUDA graph.

A step is thousands of small kernels: started one by one they take longer than they run. A step that
cannot be captured, as one that reads a number of the GPU, runs as it is written.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedvl.errors import FedVLError

MAX_GRAPHS = 64  # shapes that are captured; each keeps a copy of its inputs
STALE = 4 * MAX_GRAPHS  # calls after which a shape that did not come again makes room for others
LEAST_FREE = 0.25  # of a GPU's memory; with less, all graphs make room, which others may need for their captures


class Graph(NamedTuple):
    """A captured step: it reads ``inputs`` and writes ``outputs``, in place."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: Any


class Replayed:
    """A step whose second call with the same shapes is captured; later ones are replayed.

    A result is overwritten by the next call, so it must have been used by then.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step = step
        self.graphs: dict[object, Graph | None] = {}
        self.calls, self.used = 0, dict[object, int]()  # when a shape came last
        self.pool: Any = None  # of memory, which graphs that run one after another can share
        self.plain = False  # since a capture failed

    def __call__(self, *arguments: Any) -> Any:
        if self.plain:
            return self.step(*arguments)
        tensors, structure = tree_flatten(arguments)
        shapes = repr(structure), tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        self.calls += 1
        if not self.known(shapes):
            return self.run(arguments)
        graph = self.graphs[shapes]
        if graph is None:
            if free_share(tensors) < LEAST_FREE:
                self.forget()
            try:
                graph = self.graphs[shapes] = self.capture(tensors, structure)
            except torch.OutOfMemoryError:
                return self.run(arguments)
            except RuntimeError as error:
                return self.give_up(error, arguments)
        for mine, given in zip(graph.inputs, tensors, strict=True):
            mine.copy_(given)
        graph.graph.replay()
        return graph.outputs

    def known(self, shapes: object) -> bool:
        """Note that these shapes came, if there is room; return whether they had come before."""
        came = shapes in self.graphs
        if not came and len(self.graphs) >= MAX_GRAPHS:
            for old in [each for each, call in self.used.items() if self.calls - call > STALE]:
                del self.graphs[old], self.used[old]
        if came or len(self.graphs) < MAX_GRAPHS:
            self.graphs.setdefault(shapes, None)
            self.used[shapes] = self.calls
        return came

    def run(self, arguments: tuple[Any, ...]) -> Any:
        """Run the step as it is written, without graphs if they hold the memory that it needs."""
        try:
            return self.step(*arguments)
        except torch.OutOfMemoryError:
            if not any(self.graphs.values()):
                raise
        self.forget()
        return self.step(*arguments)

    def forget(self) -> None:
        """Give back the memory of all graphs; what comes again is captured again."""
        self.graphs.clear()
        self.used.clear()
        self.pool = None
        torch.cuda.empty_cache()

    def give_up(self, error: RuntimeError, arguments: tuple[Any, ...]) -> Any:
        """Run the step as it is written, now and from now on, and say why it is slower."""
        self.plain = True
        self.graphs.clear()
        reason = (str(error) or type(error).__name__).splitlines()[0][:120].rstrip(".")
        try:
            found = self.step(*arguments)
        except RuntimeError as second:
            raise FedVLError(
                f"A step of this method cannot be captured as a CUDA graph, which left the GPU in disorder ({reason}); "
                "take .item(), .cpu() and branches on tensors out of its loss, or use --device cpu."
            ) from second
        warnings.warn(
            f"A step of this method cannot be captured as a CUDA graph ({reason}), so that it runs slower; take .item(), "
            ".cpu() and branches on tensors out of its loss.",
            stacklevel=2,
        )
        return found

    def capture(self, tensors: list[Tensor], structure: Any) -> Graph:
        inputs = [tensor.clone() for tensor in tensors]
        arguments = tree_unflatten(inputs, structure)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step(*arguments)  # libraries make what they need on this stream, which may not be captured
        torch.cuda.current_stream().wait_stream(stream)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=stream):
            outputs = self.step(*arguments)
        return Graph(graph, inputs, outputs)


def free_share(tensors: list[Tensor]) -> float:
    """Return which share of the memory of these tensors' GPU is free, whoever holds the rest."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return 1.0
    free, total = torch.cuda.mem_get_info(device)
    return free / total
