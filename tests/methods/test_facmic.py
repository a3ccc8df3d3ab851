"""FACMIC's attention against PyTorch's own layers, its losses, and the site's images that it needs."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.small import batch_of, drawn, small_method, small_samples, small_task

from fedvl.errors import FedVLError
from fedvl.methods.facmic import FACMIC, AttentionOptions
from fedvl.runs.settings import resolve_experiment
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


def test_the_released_distance_by_plain_code() -> None:
    """Attended unit features of the client, raw ones of the site, weights of the site's attended features."""
    method = small_method("facmic", lmmd="released")
    samples = small_samples(method, 5)
    labels = torch.tensor([0, 0, 1, 2, 2])
    tensors = method.start(torch.Generator().manual_seed(0))
    sites = small_samples(method, 7, seed=5).inputs["features"]
    batch = batch_of(replace(samples, labels=labels))
    own, _ = method.learn(tensors, batch.inputs["features"], batch.mask)
    site, _ = method.learn(tensors, sites, torch.ones(7))
    left = own / own.norm(dim=-1, keepdim=True)
    guessed = (method.scale * (site / site.norm(dim=-1, keepdim=True)) @ method.task.text_features.T).softmax(-1)
    rows = torch.cat([left, sites / sites.norm(dim=-1, keepdim=True)])
    distances = torch.cdist(rows, rows).square()
    widths = [distances.sum() / (12 * 11) * 2.0**power for power in range(-2, 3)]
    kernel = torch.stack([torch.exp(-distances / width) for width in widths]).sum(0)
    common = set(labels.tolist()) & set(guessed.argmax(-1).tolist())
    expected = torch.tensor(0.0)
    for c in common:
        own_share, site_share = (labels == c) / (labels == c).sum(), guessed[:, c] / guessed[:, c].sum()
        expected = expected + own_share @ kernel[:5, :5] @ own_share + site_share @ kernel[5:, 5:] @ site_share
        expected = expected - 2 * own_share @ kernel[:5, 5:] @ site_share
    assert common
    found = method.distance(tensors, own, site, sites, batch)
    torch.testing.assert_close(found, expected / len(common), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found, small_method("facmic").distance(tensors, own, site, sites, batch))


def test_the_papers_distance_by_plain_code() -> None:
    """LMMD with its cross term, by loops over classes: attended features, zero-shot weights of the site."""
    method = small_method("facmic")
    samples = small_samples(method, 5)
    labels = torch.tensor([0, 0, 1, 2, 2])
    tensors = method.start(torch.Generator().manual_seed(0))
    sites = small_samples(method, 7, seed=5).inputs["features"]
    batch = batch_of(replace(samples, labels=labels))
    own, _ = method.learn(tensors, batch.inputs["features"], batch.mask)
    site, _ = method.learn(tensors, sites, torch.ones(7))
    guessed = (method.scale * sites @ method.task.text_features.T).softmax(-1)
    rows = torch.cat([own, site]).double()
    distances = torch.cdist(rows, rows).square()
    widths = [distances.sum() / (12 * 11) * 2.0**power for power in range(-2, 3)]
    kernel = torch.stack([torch.exp(-distances / width) for width in widths]).sum(0)
    expected = torch.tensor(0.0).double()
    for c in (0, 1, 2):
        own_share = (labels == c).double() / (labels == c).sum()
        site_share = guessed[:, c].double() / guessed[:, c].sum()
        expected = expected + own_share @ kernel[:5, :5] @ own_share + site_share @ kernel[5:, 5:] @ site_share
        expected = expected - 2 * own_share @ kernel[:5, 5:] @ site_share
    found = method.distance(tensors, own, site, sites, batch)
    torch.testing.assert_close(found.double(), expected / 3, rtol=1e-3, atol=1e-6)


def test_the_contrastive_loss_has_both_directions() -> None:
    """Of two images with unlike texts, image to text and text to image differ; the loss is their mean."""
    method = small_method("facmic", alignment=0.0, loss="contrastive")
    samples = small_samples(method, 2)
    samples = replace(samples, labels=torch.tensor([0, 1]))
    tensors = method.start(torch.Generator().manual_seed(0))
    batch = batch_of(samples, noise=drawn(method))
    own, _ = method.learn(tensors, batch.inputs["features"], batch.mask)
    own = own / own.norm(dim=-1, keepdim=True)
    scores = method.scale * own @ method.task.text_features[:2].T
    ways = [torch.nn.functional.cross_entropy(each, torch.arange(2)) for each in (scores, scores.T)]
    assert abs(float(ways[0] - ways[1])) > 0.01
    torch.testing.assert_close(method.objective(tensors, batch)[0], sum(ways) / 2, rtol=1e-4, atol=1e-5)


def test_the_label_loss_is_the_cross_entropy_of_attended_features_among_all_classes() -> None:
    method = small_method("facmic", alignment=0.0)
    samples = small_samples(method, 5)
    tensors = method.start(torch.Generator().manual_seed(0))
    features = samples.inputs["features"]
    attended = torch.nn.functional.normalize(layers(tensors, 6)(features) * features, dim=-1)
    scores = method.scale * attended @ method.task.text_features.T
    expected = torch.nn.functional.cross_entropy(scores, samples.labels)
    found = method.objective(tensors, batch_of(samples, noise=drawn(method)))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"loss": "contrastive"}, {"lmmd": "released"}])
def test_padding_changes_neither_the_loss_nor_the_distance(options: dict[str, str]) -> None:
    method = small_method("facmic", **options)
    samples = small_samples(method, 7)
    tensors = method.start(torch.Generator().manual_seed(0))
    noise = drawn(method)
    padded = batch_of(samples, noise=noise)._replace(mask=torch.tensor([1.0, 1, 1, 1, 1, 0, 0]))
    real = batch_of(samples.take(torch.arange(5)), noise=noise)
    torch.testing.assert_close(method.objective(tensors, padded)[0], method.objective(tensors, real)[0])


def test_the_released_preset_weights_clients_by_their_images() -> None:
    released = resolve_experiment({"method": {"name": "facmic", "preset": "released"}})
    assert released.method.options["lmmd"] == "released"
    assert small_method("facmic", weights="samples").weighting == "samples"
    assert small_method("facmic").weighting == "clients"


def test_it_asks_for_the_sites_images_when_it_trains_and_not_to_answer() -> None:
    method = FACMIC(AttentionOptions(), replace(small_task(), target=None))
    assert method.predict(method.start(torch.Generator()), {"features": torch.ones(1, 6)}).shape == (1, 4)
    with pytest.raises(FedVLError, match="use --protocol leave-one-domain-out, or open"):
        method.noise()
    assert "8 unlabelled images" in small_method("facmic").notes()[0]


def test_it_declares_what_the_table_says():
    assert_declared("facmic")
