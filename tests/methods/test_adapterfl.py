"""AdapterFL: CLIP-Adapter by hand and against torch's own layers."""

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.small import small_method, small_samples
from pydantic import ValidationError
from torch.nn.functional import cross_entropy, normalize

from fedvl.methods.adapterfl import AdapterOptions
from fedvl.methods.base import Batch
from fedvl.methods.parts.adapters import bottleneck_start
from fedvl.runs.settings import resolve_experiment


@pytest.mark.parametrize("width, parameters", [(1024, 524_288), (512, 131_072), (768, 294_912)])
def test_sizes_of_the_reference_table(width, parameters):
    tensors = bottleneck_start(width, 4, torch.Generator().manual_seed(0))
    assert sum(tensor.numel() for tensor in tensors.values()) == parameters
    assert tensors["down.weight"].abs().max() <= width**-0.5  # as nn.Linear draws them
    assert tensors["up.weight"].abs().max() <= (width // 4) ** -0.5


@pytest.mark.parametrize("ratio", [0.2, 0.7])
def test_scores_and_loss_equal_those_of_torch_layers_on_embeddings_of_any_length(ratio):
    method = small_method("adapterfl", ratio=ratio, reduction=2)
    tensors = method.start(torch.Generator().manual_seed(4))
    samples = small_samples(method, 9)
    layers = torch.nn.Sequential(
        torch.nn.Linear(6, 3, bias=False), torch.nn.ReLU(), torch.nn.Linear(3, 6, bias=False), torch.nn.ReLU()
    )
    layers.load_state_dict({"0.weight": tensors["down.weight"], "2.weight": tensors["up.weight"]})
    embeddings = 7.0 * samples.inputs["features"]  # CLIP-Adapter sees them as long as the encoder made them
    mixed = normalize(ratio * layers(embeddings) + (1 - ratio) * embeddings, dim=-1)
    expected = 10.0 * mixed @ method.task.text_features.T
    torch.testing.assert_close(method.predict(tensors, samples.inputs), expected.detach(), rtol=1e-4, atol=1e-5)
    batch = Batch(samples.inputs, samples.labels, torch.ones(9), torch.arange(9), {}, {})
    loss, changed = method.objective(tensors, batch)
    torch.testing.assert_close(loss, cross_entropy(expected, samples.labels).detach(), rtol=1e-4, atol=1e-5)
    assert changed == {}


def test_without_the_adapter_it_is_zero_shot():
    method = small_method("adapterfl", ratio=0.0)
    inputs = small_samples(method).inputs
    scores = method.predict(method.start(torch.Generator()), inputs)
    torch.testing.assert_close(scores, small_method("zero-shot").predict({}, inputs))


def test_settings_are_those_of_cachefls_table():
    ours, theirs = (resolve_experiment({"method": {"name": name}}) for name in ("adapterfl", "cachefl"))
    assert (ours.training, ours.federation, ours.data) == (theirs.training, theirs.federation, theirs.data)


@pytest.mark.parametrize("wrong", [{"ratio": 1.1}, {"ratio": -0.1}, {"reduction": 0}, {"scale": 0}])
def test_bad_options_are_refused(wrong):
    with pytest.raises(ValidationError):
        AdapterOptions(**wrong)


def test_it_declares_what_the_table_says():
    assert_declared("adapterfl")
