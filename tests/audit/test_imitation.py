"""Imitated clients move as real ones do, and gradients are those of the loss."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.audited import evidence_of
from helpers.small import batch_of, small_method, small_samples

from fedvl.audit.candidates import candidates_of, signatures_of
from fedvl.audit.imitation import MAX_NUMBERS, Coordinates, imitate, joined
from fedvl.audit.messages import seen_in, subtract


def test_an_imitation_with_the_clients_own_images_is_its_update():
    evidence = evidence_of(rounds=1)  # one batch holds all images, so that their order does not matter
    message = evidence.messages[2]
    ((seen,),) = imitate(evidence, evidence.training.samples, [evidence.rows(2)], [(0, message.before)])
    assert torch.allclose(seen.change["weight"], subtract(message.update.tensors, message.before)["weight"], atol=1e-6)
    real = seen_in(message).beside
    assert seen.beside.keys() == real.keys()
    for name in ("weight in the mean", "training loss", "number of examples"):
        assert float(seen.beside[name]) == float(real[name]) or name == "training loss"
    assert float(seen.beside["training loss"]) == pytest.approx(message.loss, rel=1e-5)


def test_an_imitated_client_keeps_its_private_tensors_from_round_to_round():
    evidence = evidence_of(rounds=2)
    evidence.prepared = replace(evidence.prepared, method=small_method("fedpha"))
    method = evidence.method
    before = method.start(torch.Generator().manual_seed(0))
    samples = small_samples(method, 6)
    ((_, second),) = imitate(evidence, samples, [torch.arange(6)], [(0, before), (1, before)])
    ((fresh,),) = imitate(evidence, samples, [torch.arange(6)], [(1, before)])
    assert float(second.items["training loss"]) != float(fresh.items["training loss"])


def test_gradients_are_those_of_the_loss_of_each_image():
    evidence = evidence_of(rounds=1)
    before = evidence.rounds[0].before
    candidates = candidates_of(evidence)
    few = candidates.samples
    signatures = signatures_of(evidence, None, 0)
    for row in range(3):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in before.items()}
        loss = evidence.method.loss(leaves, batch_of(few.take(torch.tensor([row]))))
        for name, gradient in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            found = signatures[name, "alone"].raw[row]
            assert torch.allclose(found, -gradient.reshape(found.shape), atol=1e-5)


def test_many_numbers_are_thinned_out_alike_in_every_change():
    like = {"large": torch.arange(4.0 * MAX_NUMBERS), "small": torch.arange(8.0)}
    coordinates = Coordinates(["large", "small"], like)
    assert len(coordinates.of(like)) <= MAX_NUMBERS + 1
    assert torch.equal(coordinates.of(like), coordinates.of({name: t.clone() for name, t in like.items()}))


def test_texts_of_two_splits_are_padded_to_one_length_and_mean_the_same():
    evidence = evidence_of(rounds=1)
    method = small_method("fed-prime")
    evidence.prepared = replace(evidence.prepared, method=method)
    long = small_samples(method, 4)
    short = small_samples(method, 2, seed=3)
    short.inputs["tokens"] = method.task.fused.tokenise(["", "a drawing"])
    both = joined(evidence, long, short)
    assert len(both) == 6
    mask = method.task.fused.text_mask
    assert torch.equal(mask(both.inputs["tokens"])[4:].sum(1), mask(short.inputs["tokens"]).sum(1))


def test_an_imitated_client_is_handed_what_a_method_gives_in_its_first_round():
    """pFedMoAP's experts, which are none then: its context moves as PromptFL's does."""
    evidence = evidence_of(rounds=1)
    changes: list[Any] = []
    for name in ("pfedmoap", "promptfl"):
        method = small_method(name)
        evidence.prepared = replace(evidence.prepared, method=method)
        before = method.start(torch.Generator().manual_seed(0))
        changes += [
            seen.change for (seen,) in imitate(evidence, small_samples(method, 6), [torch.arange(6)], [(0, before)])
        ]
    assert changes[0].keys() == {"context"}
    torch.testing.assert_close(changes[0]["context"], changes[1]["context"])
    assert changes[0]["context"].abs().max() > 0
