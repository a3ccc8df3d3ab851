"""When a step is captured and what is replayed; on a GPU, that a replayed step is the step."""

import pytest
import torch

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

        return Graph(Replay(), inputs, outputs)


def step(moving, still):
    return moving["x"] * still["y"]


def test_the_first_call_of_a_shape_is_plain_and_the_second_is_captured():
    replayed = Recorded(step)
    for call in range(4):
        given = {"x": torch.full((3,), float(call))}, {"y": torch.tensor([1.0, 2.0, 3.0])}
        assert torch.equal(replayed(*given), step(*given))
        assert (replayed.captured, replayed.replayed) == (min(call, 1), call)


def test_each_shape_has_its_own_graph_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    replayed = Recorded(step)
    for size in (1, 2, 3, 1, 2, 3, 3):
        given = {"x": torch.ones(size)}, {"y": torch.arange(float(size))}
        assert torch.equal(replayed(*given), step(*given))
    assert replayed.captured == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replayed_step_has_the_bits_of_the_step():
    def gradient(moving, still):
        x = moving["x"].detach().requires_grad_()
        return torch.autograd.grad((x @ still["y"]).square().sum(), [x])[0]

    replayed, generator = Replayed(gradient), torch.Generator("cuda").manual_seed(0)
    for _ in range(4):
        given = [{name: torch.randn(5, 5, device="cuda", generator=generator)} for name in ("x", "y")]
        assert torch.equal(replayed(*given), gradient(*given))
