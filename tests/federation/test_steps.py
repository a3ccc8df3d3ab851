"""What ``auto`` chooses, and where a precision has an effect."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers.small import run_quietly, small_federation, small_method, small_samples
from torch.utils.flop_counter import FlopCounterMode

from fedvl.federation import steps
from fedvl.federation.steps import choose_precision, in_precision, mixed_products, used_precision
from fedvl.methods import load_method, method_names
from fedvl.methods.base import Method
from fedvl.methods.linear import Linear
from fedvl.methods.parts import prompts
from fedvl.models import transformer
from fedvl.runs import settings
from fedvl.seeding import torch_generator

AMPERE, TURING = (8, 0), (7, 5)


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """A machine with a GPU of this capability, or with none."""
    monkeypatch.setattr(steps, "pick_device", lambda name: "cuda" if capability and name != "cpu" else "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(
    ("towers", "device", "capability", "expected"),
    [
        (True, "auto", AMPERE, "bfloat16"),
        (True, "cuda", (9, 0), "bfloat16"),
        (True, "auto", TURING, "float32"),  # has no bfloat16
        (True, "cpu", AMPERE, "float32"),
        (True, "auto", None, "float32"),
        (False, "auto", AMPERE, "float32"),  # small products, which gain nothing
    ],
)
def test_auto_is_bfloat16_through_a_tower_on_a_gpu_that_has_it(monkeypatch, towers, device, capability, expected):
    gpu(monkeypatch, capability)
    assert choose_precision(towers, device) == expected


@pytest.mark.parametrize("method", ["promptfl", "linear"])
def test_settings_hold_the_choice_and_what_was_asked_for_otherwise(monkeypatch, method):
    gpu(monkeypatch, AMPERE)

    def resolved(asked: str) -> str:
        found = settings.resolve_experiment({"method": {"name": method}, "training": {"precision": asked}})
        return found.training.precision

    assert resolved("auto") == ("bfloat16" if method == "promptfl" else "float32")
    for asked in ("float32", "tf32", "bfloat16"):
        assert resolved(asked) == asked
    assert settings.resolve_experiment({"method": {"name": method}}).training.precision == "float32"


@pytest.mark.parametrize("name", method_names())
def test_a_method_says_whether_its_steps_run_through_the_encoder(monkeypatch, name):
    method = small_method(name)
    if not (method.start(torch.Generator()) or method.role.trained_private):
        assert not method.through_encoder
        return
    federation, used = small_federation(method, rounds=1), []
    original = transformer.cast

    def noticed(*arguments: Any) -> Any:
        used.append(name)
        return original(*arguments)

    gradient_step = federation.engine._gradient_steps[True]

    def watched(*arguments: Any) -> Any:
        with monkeypatch.context() as patched:
            for module in (transformer, prompts):
                patched.setattr(module, "cast", noticed)
            return gradient_step(*arguments)

    federation.engine._gradient_steps = dict.fromkeys((True, False), watched)
    run_quietly(federation)
    assert bool(used) is method.through_encoder


def test_a_processor_computes_in_float32_whatever_is_asked():
    for asked in ("float32", "tf32", "bfloat16"):
        assert used_precision(asked, "cpu") == "float32"
        assert used_precision(asked, "cuda") == asked


def test_tf32_is_on_in_a_step_and_as_before_after_it():
    before = torch.get_float32_matmul_precision()
    seen = []

    def step(fails: bool) -> None:
        seen.append(torch.get_float32_matmul_precision())
        if fails:
            raise ValueError

    rounded = in_precision(step, "tf32", "cuda")
    rounded(False)
    with pytest.raises(ValueError):
        rounded(True)
    in_precision(step, "bfloat16", "cuda")(False)
    in_precision(step, "tf32", "cpu")(False)
    assert seen == ["high", "high", before, before]
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("name", [name for name in method_names() if load_method(name).through_encoder])
def test_bfloat16_leaves_scores_losses_and_what_is_trained_in_float32(monkeypatch, name):
    monkeypatch.setattr(steps, "FASTER", {"cpu"})
    method = small_method(name)
    federation, losses = small_federation(method, {"precision": "bfloat16"}, rounds=1), []
    rows = federation.engine.rows[3]
    inputs = small_samples(method).take(rows).inputs
    tensors = {**federation.engine.private_of(3), **method.start(torch_generator(0, "start"))}
    with torch.no_grad(), mixed_products("bfloat16", "cpu"):
        assert method.predict(tensors, inputs).dtype == torch.float32
    objective = method.objective

    def watched(*arguments: Any) -> Any:
        losses.append(objective(*arguments)[0].dtype)
        return objective(*arguments)

    method.objective = watched
    trained = run_quietly(federation)
    assert set(losses) == {torch.float32}
    for name, tensor in trained.shared.items():
        assert tensor.dtype == torch.float32 or not tensor.is_floating_point(), name
        assert bool(tensor.isfinite().all())


def test_bfloat16_moves_about_as_float32_does(monkeypatch):
    monkeypatch.setattr(steps, "FASTER", {"cpu"})
    start = small_method("promptfl").start(torch_generator(0, "start"))["context"]
    exact, rounded = (
        run_quietly(small_federation(small_method("promptfl"), {"precision": kind})).shared["context"] - start
        for kind in ("float32", "bfloat16")
    )
    assert 0 < float((exact - rounded).norm()) < 0.2 * float(exact.norm())


def test_every_method_can_be_asked_whether_it_uses_the_towers():
    assert {name for name in method_names() if load_method(name).through_encoder} >= {
        "promptfl",
        "fedotp",
        "fedpp",
        "fed-prime",
    }
    assert not any(
        load_method(name).through_encoder for name in ("linear", "fst-cbdg", "cachefl", "fed-mp", "fedavg-nn")
    )


def test_a_product_takes_two_operations_for_each_of_its_terms():
    with steps.Operations() as counted:
        torch.ones(3, 4) @ torch.ones(4, 5)
        torch.nn.functional.linear(torch.ones(2, 4), torch.ones(5, 4), torch.ones(5))
    assert counted.total == 2 * 3 * 4 * 5 + 2 * 2 * 4 * 5


class Pytorchs(FlopCounterMode):
    def __init__(self):
        super().__init__(display=False)

    @property
    def total(self):
        return self.get_total_flops()


@pytest.mark.parametrize("name", sorted({*method_names()} - {"zero-shot"}))
def test_every_method_counts_as_with_pytorchs_counter(name, monkeypatch):
    federation = small_federation(small_method(name))
    handed = federation.method.hand_out(federation.shared, {}, 3)
    ours = federation.engine.local_flops(handed)
    monkeypatch.setattr(steps, "Operations", Pytorchs)
    assert ours == federation.engine.local_flops(handed)
    assert ours > 0 or name == "fedpp"  # whose clients have no labels before they are consulted


def test_counting_does_not_load_the_compiler():
    script = (
        "import sys, torch; from fedvl.federation.steps import Operations\n"
        "with Operations(): torch.ones(2, 2) @ torch.ones(2, 2)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"


class Halved(Linear, same_loss_as=Linear):
    """Half of the gradient, and a pull towards what was received, which holds of the parameters of one client."""

    def correct(self, gradients, tensors, received):
        return {name: tensor / 2 + (tensors[name] - received[name]) for name, tensor in gradients.items()}


class HalvedLoss(Linear):
    """The same as a loss."""

    def loss(self, tensors, batch):
        pull = sum(((tensors[name] - batch.received[name]) ** 2).sum() / 2 for name in tensors)
        return super().loss(tensors, batch) / 2 + pull


@pytest.mark.parametrize("apart", [False, True])  # whether clients begin from tensors of their own
@pytest.mark.parametrize("one_by_one", [False, True])
def test_gradients_are_corrected_before_the_optimiser_takes_them(one_by_one, apart):
    def trained(kind: type[Linear]) -> Any:
        method: Method = kind(kind.options_type(), small_method("linear").task)
        federation = small_federation(method, {"optimiser": "adam"}, one_by_one=one_by_one)
        shared = federation.shared
        own = {c: {n: t + c * 0.01 for n, t in shared.items()} for c in range(5)} if apart else None
        return federation.engine.train(0, range(5), shared, own)

    for result, other in zip(trained(Halved), trained(HalvedLoss), strict=True):
        torch.testing.assert_close(result.update.tensors, other.update.tensors, rtol=1e-5, atol=1e-6)
