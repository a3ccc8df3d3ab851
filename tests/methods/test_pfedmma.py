"""pFedMMA: adapters by hand, how their gradients are scaled, what travels, and real images."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.prompts import gradient
from helpers.runs import run
from helpers.small import batch_of, run_quietly, small_federation, small_method, small_samples
from torch.nn.functional import linear, normalize, relu

from fedvl.errors import FedVLError
from fedvl.methods.pfedmma import PFedMMA, PFedMMAOptions, adapter
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator


def started(method):
    samples = small_samples(method, 4)
    start = method.start(torch_generator(0, "start")) | method.join(samples, torch_generator(0, "join", 0))
    return start, batch_of(samples)


def doubled(scale):
    """The method with an encoder in double precision, for differences of close numbers."""
    method = small_method("pfedmma", adapter_scale=scale, dimension=3)
    task = replace(method.task, encoder=copy.deepcopy(method.task.encoder).double())
    task = replace(task, text_embeddings=task.text_embeddings.double())
    return PFedMMA(method.options, task)


def test_the_adapter_by_hand():
    """Down to (1, -2), of which 1 is left; doubled in the middle plus the bias 1 is 3; up to (3, -6); by 0.5."""
    x = torch.tensor([[1.0, 2.0]])
    down = torch.tensor([[1.0, 0.0], [0.0, -1.0]]), torch.zeros(2)
    middle = torch.tensor([[2.0, 5.0], [0.0, -1.0]]), torch.tensor([1.0, 0.0])
    up = torch.tensor([[1.0, 0.0], [-2.0, 0.0]]), torch.zeros(2)
    torch.testing.assert_close(adapter(x, down, middle, up, 0.5), torch.tensor([[1.5, -3.0]]))


def test_at_scale_zero_it_is_the_pretrained_model_and_still_learns():
    method = small_method("pfedmma", adapter_scale=0.0)
    tensors, batch = started(method)
    encoder = method.task.encoder
    images = encoder.encode_image(encoder.normalise(batch.inputs["pixels"]).float())
    texts = encoder.encode_text(encoder.tokenise([f"a photo of a {name}." for name in method.task.class_names]))
    expected = 10 * normalize(images, dim=-1) @ normalize(texts, dim=-1).T
    torch.testing.assert_close(method.predict(tensors, batch.inputs), expected)
    assert gradient(method, tensors, batch, "image.up.weight").abs().max() > 0


@pytest.mark.parametrize("name", ["text.up.weight", "image.down.weight", "middle.bias"])
def test_gradients_are_those_of_the_unscaled_adapter(name):
    """Of the true derivative by differences, which has the scale in it, they are 1 / scale."""
    method = doubled(0.01)
    tensors, batch = started(method)
    tensors = {key: tensor + 0.1 for key, tensor in tensors.items()}  # no bias at the kink of a relu
    found = gradient(method, tensors, batch, name)
    place = tuple(int(i) for i in (found.abs() == found.abs().max()).nonzero()[0])
    step = torch.zeros_like(tensors[name])
    step[place] = 1e-4
    above, below = (method.loss({**tensors, name: tensors[name] + sign * step}, batch) for sign in (1, -1))
    torch.testing.assert_close(found[place], (above - below) / 2e-4 / 0.01, rtol=1e-4, atol=0)


def test_the_gradient_does_not_depend_on_the_scale():
    gradients = []
    for scale in (0.0, 1e-6):
        method = doubled(scale)
        tensors, batch = started(method)
        gradients.append(gradient(method, tensors, batch, "text.up.weight"))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-8)
    assert gradients[0].abs().max() > 1e-3


def test_an_adapter_passes_back_its_scaled_part():
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layers = [(torch.eye(4).double(), torch.ones(4).double()) for _ in range(3)]

    def plain(x):
        for weight, bias in layers[:2]:
            x = relu(linear(x, weight, bias))
        return linear(x, *layers[2])

    found = torch.func.grad(lambda x: adapter(x, layers[0], layers[1], layers[2], 0.001).sum())(x)
    torch.testing.assert_close(found, 0.001 * torch.func.grad(lambda x: plain(x).sum())(x))


def test_towers_of_unlike_depth_are_paired_from_the_end():
    method = small_method("pfedmma", layers=2, dimension=3)
    method.adapted = {"image": 2, "text": 1}
    tensors, _ = started(method)
    assert tensors["middle.weight"].shape == (2, 3, 3)
    first, last = method.changes(tensors, "text")
    assert first.beside is None
    assert torch.equal(last.beside.keywords["middle"][0], tensors["middle.weight"][1])
    assert torch.equal(method.changes(tensors, "image")[1].beside.keywords["middle"][0], tensors["middle.weight"][1])


def test_only_the_middle_travels():
    federation = run_quietly(small_federation(small_method("pfedmma"), rounds=1))
    assert federation.shared.keys() == {"middle.weight", "middle.bias"}
    assert federation.records[0].bytes_up == 4 * 2 * (32 * 32 + 32) * 4  # clients with data, layers, numbers, bytes
    kept = {name for private in federation.engine.private.values() for name in private}
    assert kept == {f"{t}.{p}.{k}" for t in ("image", "text") for p in ("down", "up") for k in ("weight", "bias")}


def test_who_has_no_adapters_is_answered_by_the_pretrained_model():
    method = small_method("pfedmma")
    start, inputs = method.start(torch_generator(0, "start")), small_samples(method, 4).inputs
    expected = 10 * inputs["features"] @ method.task.text_features.T
    torch.testing.assert_close(method.predict(start, inputs), expected)


def test_presets_are_the_published_settings_and_bad_options_are_refused():
    paper = resolve_experiment({"method": {"name": "pfedmma"}})
    assert (paper.training.batch_size, paper.training.local_epochs, paper.federation.rounds) == (16, 2, 50)
    released = resolve_experiment({"method": {"name": "pfedmma", "preset": "released"}})
    assert (released.training.local_epochs, released.federation.rounds) == (1, 100)
    with pytest.raises(FedVLError, match=r"method\.layers"):
        resolve_experiment({"method": {"name": "pfedmma", "layers": 0}})
    with pytest.raises(FedVLError, match="write one"):
        PFedMMA(PFedMMAOptions(template="a photo"), small_method("pfedmma").task)


def test_it_learns_its_clients_classes_on_real_images():
    """Small: each step runs both towers. Clients of two classes each are asked about their own part of the test."""
    data = {"clients": 5, "shots": 3, "test_shots": 4, "partition": "disjoint"}
    training = {"learning_rate": 0.1, "batch_size": 3}
    settings = {"data": data, "training": training, "federation": {"rounds": 2}, "evaluation": {"protocol": "personal"}}
    finished = run({"method": {"name": "pfedmma"}, **settings})
    first, second = (record.loss for record in finished.federation.records)
    assert second < 0.7 * first  # 1.98 and 0.72 were seen
    assert finished.accuracy > finished.zero_shot_accuracy - 5  # of 40 images


def test_it_declares_what_the_table_says():
    assert_declared("pfedmma")
