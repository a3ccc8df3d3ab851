"""fedtpg: its network against torch's own layers, the names that it reads, its presets, and real images."""

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.prompts import method_on, settings, task_of
from helpers.real import accuracy
from helpers.small import batch_of, small_encoder
from torch.nn.functional import gelu, normalize

from fedvl.errors import FedVLError
from fedvl.methods.base import Samples
from fedvl.methods.fedtpg import FedTPG, FedTPGOptions
from fedvl.runs.settings import resolve_experiment
from fedvl.tensors import count_elements


def test_presets_are_the_published_settings():
    network = resolve_experiment({"method": {"name": "fedtpg"}}).training
    assert (network.learning_rate, network.weight_decay, network.batch_size, network.schedule) == (
        0.003,
        1e-5,
        200,
        "cosine",
    )
    assert resolve_experiment({"method": {"name": "fedtpg", "preset": "released"}}).federation.rounds == 500


def test_a_bad_option_is_refused():
    with pytest.raises(FedVLError, match=r"method\.classes"):
        resolve_experiment({"method": {"name": "fedtpg", "classes": "x"}})


@pytest.mark.parametrize("width, parameters", [(512, 4_206_080), (768, 9_454_848)])
def test_the_network_has_the_size_of_the_reference_table(width, parameters):
    method = method_on("fedtpg", small_encoder(joint=width, text_width=width))
    tensors = method.start(torch.Generator().manual_seed(0))
    assert count_elements(tensors) == parameters
    assert tensors["queries"].shape == (4, width)


def randomised(method, seed=0):
    """Every tensor random, so that no bias or norm is left out of a comparison."""
    generator = torch.Generator().manual_seed(seed)
    start = method.start(generator)
    return {name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()}


def test_the_network_is_that_of_torchs_layers():
    """LayerNorm on both sides, attention without a residual, then LayerNorm, GEGLU and a residual."""
    method = method_on("fedtpg", small_encoder(joint=8))
    tensors = randomised(method)
    names = normalize(method.task.encoder.encode_text(method.task.encoder.tokenise(["cat", "dog", "ship"])), dim=-1)
    attending = torch.nn.MultiheadAttention(8, 4, batch_first=True)
    attending.load_state_dict(
        {
            "in_proj_weight": torch.cat([tensors[f"{name}.weight"] for name in ("query", "key", "value")]),
            "in_proj_bias": torch.cat([tensors[f"{name}.bias"] for name in ("query", "key", "value")]),
            "out_proj.weight": tensors["mixed.weight"],
            "out_proj.bias": tensors["mixed.bias"],
        }
    )

    def layer(kind, name, *shape):
        made = kind(*shape)
        made.load_state_dict({key: tensors[f"{name}.{key}"] for key in ("weight", "bias")})
        return made

    norm = torch.nn.LayerNorm
    keys = layer(norm, "norm.names", 8)(names)
    attended, _ = attending(layer(norm, "norm.queries", 8)(tensors["queries"]), keys, keys)
    widened = layer(torch.nn.Linear, "wide", 8, 64)(layer(norm, "norm.hidden", 8)(attended))
    expected = attended + layer(torch.nn.Linear, "narrow", 32, 8)(widened[:, :32] * gelu(widened[:, 32:]))
    torch.testing.assert_close(method.generated(tensors), expected)


def test_other_names_give_another_context_and_their_order_does_not_matter():
    encoder = small_encoder()
    tensors = randomised(method_on("fedtpg", encoder))

    def context(*names):
        return method_on("fedtpg", encoder, names).generated(tensors)

    assert (context("cat", "dog", "ship") - context("cat", "dog", "airplane")).abs().max() > 1e-3
    torch.testing.assert_close(context("cat", "dog", "ship"), context("ship", "cat", "dog"))


def test_a_client_trains_with_the_names_of_its_own_classes_only():
    """Classes 0 and 2 of four, against a task that has no other classes; with "all" it is another loss."""
    encoder, names = small_encoder(), ("cat", "dog", "ship", "truck")
    whole, every = (method_on("fedtpg", encoder, names, classes=classes) for classes in ("own", "all"))
    part = method_on("fedtpg", encoder, ("cat", "ship"))
    generator = torch.Generator().manual_seed(0)
    features = {"features": normalize(torch.randn(5, 6, generator=generator), dim=-1)}
    labels = torch.tensor([0, 2, 2, 0, 2])
    tensors = randomised(whole)

    def loss(method, labels):
        samples = Samples(features, labels)
        return method.objective({**tensors, **method.join(samples, generator)}, batch_of(samples))[0]

    torch.testing.assert_close(loss(whole, labels), loss(part, labels // 2))
    assert abs(loss(every, labels) - loss(whole, labels)) > 1e-3
    unlabelled = whole.join(Samples(features, torch.full((5,), -1)), generator)
    assert unlabelled["own_classes"].all()  # a client that cannot tell its classes names all


def test_a_width_that_the_heads_cannot_share_is_refused():
    with pytest.raises(FedVLError, match="4 heads, which do not divide the text width of small, 6"):
        FedTPG(FedTPGOptions(), task_of(small_encoder(text_width=6)))


def test_it_learns_on_real_images():
    """3 times its paper's rate: at its own, 5 rounds on this small model hardly move anything."""
    learned, zero_shot = accuracy("fedtpg", settings(0.01))
    assert learned > zero_shot + 4


def test_a_new_user_can_ask_about_other_classes():
    """Four classes that nobody trained on, from three clients of two classes each: well above guessing (25%)."""
    asked = {"data": {"clients": 3}, "evaluation": {"protocol": "open"}}
    learned, _ = accuracy("fedtpg", settings(0.003, rounds=2, **asked))
    assert learned > 40


def test_it_declares_what_the_table_says():
    assert_declared("fedtpg")
