"""fedka: its two parts, which way each moves, and the images that it is told of."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.small import batch_of, drawn, small_method, small_samples, small_task

from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.methods.fedka import FedKA, FedKAOptions, discriminate
from fedvl.methods.parts.alignment import domain_loss, kernel_discrepancy
from fedvl.models.resnet import forward
from fedvl.runs.preparation import prepare
from fedvl.runs.settings import resolve_experiment


def test_gradients_leave_running_statistics_alone():
    method = small_method("fedka")
    assert [name for name in ("conv1.weight", "bn1.bias", "fc.bias") if method.role.shared(name).trained] == [
        "conv1.weight",
        "bn1.bias",
        "fc.bias",
    ]
    assert not any(
        method.role.shared(name).trained for name in ("bn1.running_mean", "layer1.0.bn2.running_var", "steps")
    )


def test_fedka_is_the_cross_entropy_plus_its_two_parts():
    method = small_method("fedka", alignment=2.0, adversarial=3.0, ramp=10)
    shared = method.start(torch.Generator().manual_seed(0))
    received = method.start(torch.Generator().manual_seed(1))
    private = method.join(small_samples(method, 5), torch.Generator().manual_seed(2))
    tensors = {**shared, **private, "steps": torch.tensor(4.0).double()}
    noise = {"target": torch.tensor([0, 3, 3, 7])}
    batch = batch_of(small_samples(method, 5), received, noise)
    loss, changed = method.objective(tensors, batch)
    plain, own, _ = method.learn(tensors, batch)
    target, _ = forward(received, method.task.encoder.normalise(method.target[noise["target"]]), training=True)
    parts = 2.0 * kernel_discrepancy(own, target, batch.mask) + 3.0 * domain_loss(
        discriminate(tensors, own), discriminate(tensors, target), batch.mask
    )
    torch.testing.assert_close(loss, plain + parts)
    assert changed["steps"] == 5
    assert "bn1.running_mean" in changed


def test_both_distances_by_hand():
    """Own features 0 and 3 and one target feature 1, in one dimension; the mask leaves out the 3 in the second case.

    Squared distances are 9, 1 and 4, of mean 14/3, and the kernel of a distance is summed over five widths.
    """
    own, target = torch.tensor([[0.0], [3.0]]), torch.tensor([[1.0]])

    def kernel(squared, mean):
        return sum(math.exp(-squared / (mean * width)) for width in (0.25, 0.5, 1, 2, 4))

    apart = (5 + kernel(9, 14 / 3)) / 2 + 5 - (kernel(1, 14 / 3) + kernel(4, 14 / 3))
    torch.testing.assert_close(kernel_discrepancy(own, target, torch.ones(2)), torch.tensor(apart))
    alone = 10 - 2 * kernel(1, 1)
    torch.testing.assert_close(kernel_discrepancy(own, target, torch.tensor([1.0, 0.0])), torch.tensor(alone))
    scores = torch.tensor([0.0, 2.0]), torch.tensor([1.0])  # own ones should be below 0, the target's above
    costs = math.log(2), math.log(1 + math.exp(2)), math.log(1 + math.exp(-1))
    together = ((costs[0] + costs[1]) / 2 + costs[2]) / 2
    torch.testing.assert_close(domain_loss(*scores, torch.ones(2)), torch.tensor(together))
    masked = (costs[0] + costs[2]) / 2
    torch.testing.assert_close(domain_loss(*scores, torch.tensor([1.0, 0.0])), torch.tensor(masked))


def test_the_discriminator_learns_while_the_network_unlearns():
    """With nothing but the adversarial part, the head's gradient goes down the loss and the network's goes up."""
    method = small_method("fedka", alignment=0.0, adversarial=1.0, ramp=1)
    start = method.start(torch.Generator().manual_seed(0))
    private = method.join(small_samples(method, 5), torch.Generator().manual_seed(2))
    batch = batch_of(small_samples(method, 5), start, {"target": torch.arange(8)})

    def gradients(steps):
        tensors = {**start, **private, "steps": torch.tensor(steps).double()}
        return torch.func.grad(lambda moved: method.objective({**tensors, **moved}, batch)[0])(
            {name: tensors[name] for name in ("conv1.weight", "domain.0.weight")}
        )

    untold, full = gradients(0.0), gradients(1e9)  # reversal of strength 0 and of strength 1

    def honest(moved):
        tensors = {**start, **private, **moved}
        own, _ = forward(tensors, method.task.encoder.normalise(batch.inputs["pixels"]), training=True)
        target, _ = forward(start, method.task.encoder.normalise(method.target), training=True)
        return domain_loss(discriminate(tensors, own), discriminate(tensors, target), batch.mask)

    true = torch.func.grad(honest)(
        {"conv1.weight": start["conv1.weight"], "domain.0.weight": private["domain.0.weight"]}
    )
    (plain,) = torch.func.grad(lambda stem: method.learn({**start, **private, "conv1.weight": stem[0]}, batch)[0])(
        (start["conv1.weight"],)
    )
    torch.testing.assert_close(untold["conv1.weight"], plain)  # nothing is reversed before the first step
    torch.testing.assert_close(full["domain.0.weight"], true["domain.0.weight"])
    torch.testing.assert_close(full["conv1.weight"] - untold["conv1.weight"], -true["conv1.weight"])
    assert true["conv1.weight"].abs().max() > 1e-6


def test_the_alignment_moves_the_network():
    method = small_method("fedka", alignment=1.0, adversarial=0.0)
    start = method.start(torch.Generator().manual_seed(0))
    private = method.join(small_samples(method, 5), torch.Generator().manual_seed(2))
    batch = batch_of(small_samples(method, 5), start, {"target": torch.arange(8)})
    target, _ = forward(start, method.task.encoder.normalise(method.target), training=True)

    def whole(stem):
        return method.objective({**start, **private, "conv1.weight": stem}, batch)[0]

    def by_parts(stem):
        loss, own, _ = method.learn({**start, "conv1.weight": stem}, batch)
        return loss + kernel_discrepancy(own, target, batch.mask)

    def without(stem):
        return method.learn({**start, "conv1.weight": stem}, batch)[0]

    gradients = [torch.func.grad(loss)(start["conv1.weight"]) for loss in (whole, by_parts, without)]
    torch.testing.assert_close(gradients[0], gradients[1])
    assert (gradients[0] - gradients[2]).abs().max() > 1e-6


def test_target_images_are_drawn_anew_for_each_step_and_client():
    method = small_method("fedka", target_batch=5)
    draws = [drawn(method, client)["target"] for client in range(3)]
    assert all(draw.shape == (5,) and draw.max() < 8 for draw in draws)
    assert len({tuple(draw.tolist()) for draw in draws}) == 3


def test_target_images_are_the_users_validation_images_without_labels(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path))
    data = {"shots": 4, "clients": 2, "partition": "iid"}
    settings = {"method": {"name": "fedka", "width": 4}, "data": data, "evaluation": {"protocol": "open"}}
    prepared = prepare(resolve_experiment(settings), Silent())
    assert prepared.method.task.target is not None
    target = prepared.method.task.target["pixels"]
    tested = {bytes(image.numpy()) for image in prepared.test.samples.inputs["pixels"]}
    assert len(target) == (len(target) + len(prepared.test.samples)) // 5
    assert not tested & {bytes(image.numpy()) for image in target}


def test_fedka_without_target_images_is_refused():
    with pytest.raises(FedVLError, match="--protocol open"):
        FedKA(FedKAOptions(), replace(small_task(), target=None))


def test_it_declares_what_the_table_says():
    assert_declared("fedka")
