"""Class weights of a run: read off scores, and taken over as the start of methods that train on."""

from dataclasses import replace

import pytest
import torch
from helpers.small import run_quietly, small_federation, small_task
from torch.nn.functional import normalize

from fedvl.methods import load_method
from fedvl.methods.parts.heads import HEAD, Head, head_of
from fedvl.seeding import torch_generator

UNITS = normalize(torch.randn(9, 6, generator=torch.Generator().manual_seed(3)), dim=-1)
FOUND = Head(torch.randn(4, 6, generator=torch.Generator().manual_seed(4)), torch.tensor([0.5, -1.0, 0.0, 2.0]))
LINEAR = ("linear", "fedprox", "fedntd", "centralised", "fedavgm", "scaffold", "feddyn", "fst-cbdg")
BESIDE = ("cachefl", "adapterfl")


def made(name, task=None, **options):
    method = load_method(name)
    return method(method.options_type.model_validate(options), task or small_task())


def scores_at_the_start(name, **options):
    method = made(name, replace(small_task(), head=lambda: FOUND), **options)
    return method.predict(method.start(torch_generator(0, "start")), {"features": UNITS})


def test_a_head_by_hand():
    """Scores 2 (w x + b) of w = e_0 and e_1, with a bias of 1/4 for the second class."""
    method = made("ridge", small_task(classes=2, width=2))
    tensors = {
        "weight": torch.eye(2).double(),
        "bias": torch.tensor([0.0, 0.25]).double(),
        "scale": torch.tensor(2.0).double(),
    }
    found = head_of(method, tensors)
    assert found is not None
    torch.testing.assert_close(found.weight, 2 * torch.eye(2).double())
    torch.testing.assert_close(found.bias, torch.tensor([0.0, 0.5]).double())


@pytest.mark.parametrize("name", ["linear", "gda", "fst-cbdg", "fed-em"])
def test_scores_of_linear_methods_are_those_of_their_head(name):
    method = made(name)
    tensors = {
        key: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5), dtype=tensor.dtype)
        for key, tensor in method.start(torch_generator(0, "start")).items()
    }
    found = head_of(method, tensors)
    assert found is not None
    expected = method.predict(tensors, {"features": UNITS})
    torch.testing.assert_close(UNITS.to(found.weight) @ found.weight.T + found.bias, expected, atol=1e-4, rtol=1e-4)


def test_random_features_and_adapters_have_no_head():
    for method in (made("ridge", dimensions=16), made("adapterfl", ratio=0.9)):
        tensors = method.start(torch_generator(0, "start"))
        tensors = {
            key: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(6), dtype=tensor.dtype)
            for key, tensor in tensors.items()
        }
        assert head_of(method, tensors) is None


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_head_starts_with_the_scores_of_the_run(name):
    options = {"scale": 3.0} if name != "fst-cbdg" else {}
    expected = UNITS @ FOUND.weight.T + FOUND.bias
    torch.testing.assert_close(scores_at_the_start(name, **options), expected, atol=1e-5, rtol=1e-5)


def test_a_cache_of_no_weight_has_the_scores_of_the_run_in_place_of_zero_shot():
    expected = UNITS @ FOUND.weight.T + FOUND.bias
    torch.testing.assert_close(scores_at_the_start("cachefl", alpha=0.0), expected)
    torch.testing.assert_close(scores_at_the_start("adapterfl", ratio=0.0), expected)


@pytest.mark.parametrize("name", BESIDE)
def test_the_head_is_a_tensor_of_the_model_that_no_client_trains(name):
    method = made(name, replace(small_task(), head=lambda: FOUND))
    tensors = method.start(torch_generator(0, "start"))
    assert HEAD in tensors
    assert HEAD not in method.role.trained(tensors)
    assert HEAD not in made(name).start(torch_generator(0, "start"))


def test_batched_training_from_a_run_is_training_one_by_one():
    method = made("linear", replace(small_task(), head=lambda: FOUND))
    batched, single = (run_quietly(small_federation(method, one_by_one=each)) for each in (False, True))
    torch.testing.assert_close(batched.shared["weight"], single.shared["weight"], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(batched.shared["weight"], FOUND.weight / method.scale)
