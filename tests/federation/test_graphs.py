"""When a step is captured and what is replayed; on a GPU, that a replayed step is the step."""

import warnings

import pytest
import torch

from fedvl.errors import FedVLError
from fedvl.federation import graphs
from fedvl.federation.graphs import Graph, Replayed


class Recorded(Replayed):
    """A graph on a processor: replaying runs the step on the inputs that were copied."""

    def __init__(self, step):
        super().__init__(step)
        self.captured, self.replayed = 0, 0

    def capture(self, tensors, structure):
        self.captured += 1
        inputs = [tensor.clone() for tensor in tensors]
        outputs = torch.empty_like(inputs[0])
        recorded = self

        class Replay:
            def replay(self):
                recorded.replayed += 1
                outputs.copy_(step({"x": inputs[0]}, {"y": inputs[1]}))

        return Graph(Replay(), inputs, outputs)  # type: ignore[arg-type]


def step(moving, still):
    return moving["x"] * still["y"]


def test_the_first_call_of_a_shape_is_plain_and_the_second_is_captured():
    replayed = Recorded(step)
    for call in range(4):
        given = {"x": torch.full((3,), float(call))}, {"y": torch.tensor([1.0, 2.0, 3.0])}
        assert torch.equal(replayed(*given), step(*given))
        assert (replayed.captured, replayed.replayed) == (min(call, 1), call)


def test_each_shape_has_its_own_graph_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    replayed = Recorded(step)
    for size in (1, 2, 3, 1, 2, 3, 3):
        given = {"x": torch.ones(size)}, {"y": torch.arange(float(size))}
        assert torch.equal(replayed(*given), step(*given))
    assert replayed.captured == 2


def called(replayed, sizes):
    for size in sizes:
        given = {"x": torch.ones(size)}, {"y": torch.arange(float(size))}
        assert torch.equal(replayed(*given), step(*given))


def test_shapes_that_no_longer_come_make_room(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    monkeypatch.setattr(graphs, "STALE", 5)
    replayed = Recorded(step)
    called(replayed, [1, 1, 2, 2, *[3] * 4])
    assert replayed.captured == 2  # 1 came too lately
    called(replayed, [3] * 3)
    assert replayed.captured == 3
    assert len(replayed.graphs) == len(replayed.used) <= 2


def test_where_memory_is_scarce_graphs_make_room(monkeypatch):
    free = [1.0]
    monkeypatch.setattr(graphs, "free_share", lambda tensors: free[0])
    replayed = Recorded(step)
    called(replayed, [1, 1, 2, 2])
    assert [graph is not None for graph in replayed.graphs.values()] == [True, True]
    free[0] = 0.1
    called(replayed, [3, 3])
    assert [graph is not None for graph in replayed.graphs.values()] == [True]
    free[0] = 1.0
    called(replayed, [1, 1])
    assert (replayed.captured, len(replayed.graphs)) == (4, 2)


def test_a_step_for_which_graphs_leave_no_memory_runs_without_them():
    hungry: list[int] = []

    def large(moving, still):
        if len(moving["x"]) > 2 and any(replayed.graphs.values()):
            hungry.append(len(moving["x"]))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(moving, still)

    replayed = Recorded(large)
    called(replayed, [1, 1, 3])
    assert hungry == [3]
    assert not any(replayed.graphs.values())


def test_a_step_that_is_too_large_by_itself_says_so():
    def large(moving, still):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        Recorded(large)({"x": torch.ones(1)}, {"y": torch.ones(1)})


class Uncaptured(Replayed):
    """A GPU that refuses to capture, as it does a step that reads a number."""

    tried = 0

    def capture(self, tensors, structure):
        self.tried += 1
        raise RuntimeError("operation not permitted when stream is capturing\nSearch for it.")


def test_a_step_that_cannot_be_captured_runs_as_it_is_written_and_says_so_once(recwarn):
    replayed = Uncaptured(step)
    for call in range(4):
        for size in (3, 4):
            given = {"x": torch.full((size,), float(call))}, {"y": torch.arange(float(size))}
            assert torch.equal(replayed(*given), step(*given))
    assert replayed.tried == 1
    (said,) = [str(warning.message) for warning in recwarn]
    assert said == (
        "A step of this method cannot be captured as a CUDA graph (operation not permitted when stream is capturing), so "
        "that it runs slower; take .item(), .cpu() and branches on tensors out of its loss."
    )


def test_a_gpu_that_a_failed_capture_leaves_in_disorder_is_one_sentence():
    calls = []

    def once(moving, still):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("an illegal memory access")
        return step(moving, still)

    replayed = Uncaptured(once)
    given = {"x": torch.ones(2)}, {"y": torch.ones(2)}
    replayed(*given)
    with pytest.raises(
        FedVLError, match=r"^A step of this method cannot be captured as a CUDA graph, .*--device cpu\.$"
    ):
        replayed(*given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_that_reads_a_number_of_the_gpu_still_runs():
    def reading(moving, still):
        return moving["x"] * float(still["y"].sum())

    replayed = Replayed(reading)
    for _ in range(3):
        given = {"x": torch.ones(3, device="cuda")}, {"y": torch.ones(3, device="cuda")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert replayed(*given).tolist() == [3.0, 3.0, 3.0]
    assert replayed.plain


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replayed_step_has_the_bits_of_the_step():
    def gradient(moving, still):
        x = moving["x"].detach().requires_grad_()
        return torch.autograd.grad((x @ still["y"]).square().sum(), [x])[0]

    replayed, generator = Replayed(gradient), torch.Generator("cuda").manual_seed(0)
    for _ in range(4):
        given = [{name: torch.randn(5, 5, device="cuda", generator=generator)} for name in ("x", "y")]
        assert torch.equal(replayed(*given), gradient(*given))


def test_a_shape_that_comes_again_keeps_its_graph_however_late_it_comes(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    monkeypatch.setattr(graphs, "STALE", 3)
    replayed = Recorded(step)
    called(replayed, [1, 1, *[2] * 6, 1, 1])
    assert (replayed.captured, len(replayed.graphs)) == (2, 2)
