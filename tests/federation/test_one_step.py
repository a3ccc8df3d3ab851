"""One local step of many clients as one backward pass: the mean of what each would send."""

import pytest
import torch
from helpers.small import run_quietly, small_federation, small_method
from torch.utils.flop_counter import FlopCounterMode

from fedvl.errors import FedVLError
from fedvl.federation import one_step

ONE_STEP = {"batch_size": 12, "local_epochs": 1, "learning_rate": 0.05}


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["linear", "fedprox", "promptfl"])
def test_the_mean_of_the_clients_steps_is_a_step_of_their_mean(name, momentum, decay):
    training = {**ONE_STEP, "momentum": momentum, "weight_decay": decay, "schedule": "cosine"}
    each = run_quietly(small_federation(small_method(name), training, per_round=3))
    together = run_quietly(small_federation(small_method(name), training, per_round=3, one_step=True))
    for key, tensor in each.shared.items():
        torch.testing.assert_close(together.shared[key], tensor, rtol=0, atol=2e-6)
        assert (tensor - each.method.start(torch.Generator().manual_seed(0))[key]).abs().max() > 1e-4
    for one, other in zip(together.records, each.records, strict=True):
        assert (one.cohort, one.dropped) == (other.cohort, other.dropped)
        assert (one.bytes_up, one.bytes_down) == (other.bytes_up, other.bytes_down)
        assert one.loss == pytest.approx(other.loss, abs=1e-5)


def test_how_many_clients_one_pass_has_changes_nothing(monkeypatch):
    whole = run_quietly(small_federation(small_method("promptfl"), ONE_STEP, one_step=True)).shared
    monkeypatch.setattr(one_step, "clients_at_once", lambda engine, samples: 2)
    parts = run_quietly(small_federation(small_method("promptfl"), ONE_STEP, one_step=True)).shared
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)


def test_what_does_not_depend_on_a_client_is_computed_once():
    """The text tower is most of the work: four clients cost little more than one."""
    federation = small_federation(small_method("promptfl"), ONE_STEP, one_step=True)
    counted = []
    for cohort in ([0], [0, 2, 3, 4]):
        with FlopCounterMode(display=False) as counter:
            one_step.mean_step(federation.engine, 0, cohort, federation.shared)
        counted.append(counter.get_total_flops())
    assert counted[0] < counted[1] < 1.2 * counted[0]


@pytest.mark.parametrize(
    ("name", "training", "federation", "said"),
    [
        ("linear", {"optimiser": "adamw"}, {}, "trains with SGD"),
        ("linear", {"batch_size": 4}, {}, "takes one step"),
        ("linear", {"local_epochs": 2}, {}, "takes one step"),
        ("fst-cbdg", {}, {}, "averages what all clients train alike"),
        ("fedpp", {}, {}, "averages what all clients train alike"),
        ("linear", {}, {"robust": "median"}, "looks at no single update"),
    ],
)
def test_other_runs_are_refused_in_one_sentence(name, training, federation, said):
    with pytest.raises(FedVLError, match=f"one_step is for a run that {said}"):
        run_quietly(small_federation(small_method(name), {**ONE_STEP, **training}, one_step=True, **federation))


def test_a_round_without_anybody_and_one_that_diverges_end_in_one_sentence():
    federation = small_federation(small_method("linear"), ONE_STEP, one_step=True)
    with pytest.raises(FedVLError, match="No client with images answered in round 4"):
        one_step.mean_step(federation.engine, 3, [1], federation.shared)  # client 1 has none
    wild = small_federation(small_method("linear"), {**ONE_STEP, "learning_rate": 3e38}, one_step=True)
    with pytest.raises(FedVLError, match="Training diverged in round 2"):
        run_quietly(wild)
