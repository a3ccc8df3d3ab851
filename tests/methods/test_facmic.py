"""FACMIC's attention against PyTorch's own layers, its losses, and the site's images that it needs."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.small import batch_of, drawn, small_method, small_samples, small_task

from fedvl.errors import FedVLError
from fedvl.methods import load_method
from fedvl.methods.facmic import FACMIC, AttentionOptions
from fedvl.tensors import Tensors


def layers(tensors: Tensors, width: int) -> torch.nn.Sequential:
    """The same network of PyTorch's layers."""
    made = torch.nn.Sequential(
        torch.nn.Linear(width, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.LeakyReLU(),
        torch.nn.Linear(width, width),
        torch.nn.Softmax(-1),
    )
    names = (
        "attention.0.weight",
        "attention.0.bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
    )
    state = dict(
        zip(("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"), names, strict=True)
    )
    state |= {"3.weight": "attention.1.weight", "3.bias": "attention.1.bias"}
    made.load_state_dict(
        {**{name: tensors[ours] for name, ours in state.items()}, "1.num_batches_tracked": torch.tensor(0)}
    )
    return made


def test_attention_and_running_statistics_are_those_of_pytorchs_layers() -> None:
    method = small_method("facmic")
    tensors = method.start(torch.Generator().manual_seed(0))
    tensors |= {"norm.running_mean": torch.randn(6), "norm.running_var": torch.rand(6) + 0.5}
    features = small_samples(method).inputs["features"]
    reference = layers(tensors, 6)
    reference.eval()
    adapted = torch.nn.functional.normalize(reference(features) * features, dim=-1)
    expected = method.scale * adapted @ method.task.text_features.T
    torch.testing.assert_close(method.predict(tensors, {"features": features}), expected)
    reference.train()
    expected = reference(features) * features
    padded = torch.cat([features, torch.full((3, 6), 9.0)])
    mask = torch.cat([torch.ones(len(features)), torch.zeros(3)])
    found, changed = method.learn(tensors, padded, mask)
    torch.testing.assert_close(found[: len(features)], expected)
    torch.testing.assert_close(changed["norm.running_mean"], reference[1].running_mean)
    torch.testing.assert_close(changed["norm.running_var"], reference[1].running_var)


@pytest.mark.parametrize("name", ["facmic", "faa-clip"])
def test_images_of_one_class_are_negatives_of_each_other_in_the_released_loss_alone(name: str) -> None:
    """With two images of one class the released loss stays above log 2, however good the features are."""
    plain = small_method(name, alignment=0.0)
    released = small_method(name, alignment=0.0, **{"loss": "contrastive"})
    samples = small_samples(plain).take(torch.tensor([0, 0]))
    tensors = plain.start(torch.Generator().manual_seed(0)) | plain.join(samples, torch.Generator())
    tensors["attention.1.weight"] = torch.zeros(6, 6)
    text = plain.task.text_features[samples.labels]
    samples = replace(samples, inputs={"features": text})
    tensors["attention.1.bias"] = torch.zeros(6)
    batch = batch_of(samples, noise=drawn(plain))
    assert float(plain.objective(tensors, batch)[0]) < 0.1
    assert float(released.objective(tensors, batch)[0]) == pytest.approx(math.log(2), rel=1e-4)


def test_training_brings_a_clients_features_nearer_to_the_sites() -> None:
    method = small_method("facmic", alignment=1.0)
    samples = small_samples(method)
    tensors = method.start(torch.Generator().manual_seed(0))
    batch = batch_of(samples, noise={"target": torch.arange(8)})

    def apart(tensors: Tensors) -> torch.Tensor:
        own, _ = method.learn(tensors, batch.inputs["features"], batch.mask)
        sites = method.target
        site, _ = method.learn(tensors, sites, torch.ones(len(sites)))
        return method.distance(tensors, own, site, sites, batch)

    gradients = torch.func.grad(apart)(tensors)
    moved = {name: tensor - 0.1 * gradients[name] for name, tensor in tensors.items()}
    assert apart(moved) < apart(tensors)
    without = small_method("facmic", alignment=0.0).objective(tensors, batch)[0]
    torch.testing.assert_close(method.objective(tensors, batch)[0], without + apart(tensors))


def test_it_asks_for_the_sites_images_when_it_trains_and_not_to_answer() -> None:
    method = FACMIC(AttentionOptions(), replace(small_task(), target=None))
    assert method.predict(method.start(torch.Generator()), {"features": torch.ones(1, 6)}).shape == (1, 4)
    with pytest.raises(FedVLError, match="use --protocol leave-one-domain-out, or open"):
        method.noise()
    assert load_method("facmic").presets["released"]["method"] == {"loss": "contrastive"}
    assert "8 unlabelled images" in small_method("facmic").notes()[0]
