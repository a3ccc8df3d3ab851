"""FAA-CLIP's discriminator against PyTorch's layers, and where its reversed gradients go."""

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.small import batch_of, run_quietly, small_federation, small_method, small_samples

from fedvl.tensors import Tensors


def discriminator(tensors: Tensors) -> torch.nn.Sequential:
    parts: list[torch.nn.Module] = []
    for layer in range(3):
        weight = tensors[f"domain.{layer}.weight"]
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
        linear.load_state_dict({"weight": weight, "bias": tensors[f"domain.{layer}.bias"]})
        parts += [linear, torch.nn.BatchNorm1d(len(weight), affine=False), torch.nn.LeakyReLU()]
    return torch.nn.Sequential(*parts[:-2])


def prepared(**options: bool) -> tuple:
    method = small_method("faa-clip", hidden=5, **options)
    samples = small_samples(method)
    tensors = method.start(torch.Generator().manual_seed(0))
    tensors |= method.join(samples, torch.Generator().manual_seed(1))
    return method, tensors, batch_of(samples, noise={"target": torch.arange(8)})


def test_the_adversarys_loss_is_that_of_pytorchs_layers() -> None:
    method, tensors, batch = prepared()
    own, _ = method.learn(tensors, batch.inputs["features"], batch.mask)
    site, _ = method.learn(tensors, method.target, torch.ones(8))
    network = discriminator(tensors)
    scores = [network(features)[:, 0] for features in (own, site)]
    truth = [torch.zeros(len(own)), torch.ones(len(site))]
    losses = [torch.nn.functional.binary_cross_entropy_with_logits(*pair) for pair in zip(scores, truth, strict=True)]
    found = method.distance(tensors, own, site, method.target, batch)
    torch.testing.assert_close(found, sum(losses) / 2)


@pytest.mark.parametrize("both_sides", [True, False])
def test_the_attention_climbs_where_the_discriminator_descends(both_sides: bool) -> None:
    method, tensors, batch = prepared(both_sides=both_sides)

    def loss(features: torch.Tensor, sites: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return method.distance({**tensors, "domain.0.weight": weight}, features, sites, sites, batch)

    own, _ = method.learn(tensors, batch.inputs["features"], batch.mask)
    site, _ = method.learn(tensors, method.target, torch.ones(8))
    weight = tensors["domain.0.weight"]
    own, site, weight = (tensor.detach() for tensor in (own, site, weight))
    of_own, of_site, of_weight = torch.func.grad(loss, argnums=(0, 1, 2))(own, site, weight)
    step = 1e-3
    assert loss(own - step * of_own, site, weight) > loss(own, site, weight)  # it learns to deceive
    assert loss(own, site, weight - step * of_weight) < loss(own, site, weight)
    assert bool(of_site.any()) == both_sides


def test_the_discriminator_stays_with_its_client() -> None:
    federation = run_quietly(small_federation(small_method("faa-clip", hidden=5), rounds=2))
    assert not any(name.startswith("domain") for name in federation.shared)
    assert any(name.startswith("domain") for name in federation.engine.private_of(0))


def test_it_declares_what_the_table_says():
    assert_declared("faa-clip")
