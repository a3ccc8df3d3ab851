"""What the methods on a fused encoder share, against the encoder's own ways and PyTorch's modules; then all those methods."""

import math

import pytest
import torch
from helpers.small import (
    FUSED,
    RAGGED,
    run_quietly,
    small_federation,
    small_fused_encoder,
    small_method,
    small_samples,
)

from fedvl.config import FederationConfig, TrainingConfig
from fedvl.data.sources import open_dataset
from fedvl.federation.local import LocalEngine
from fedvl.federation.round import Federation
from fedvl.methods import load_method
from fedvl.methods.base import Samples, Task
from fedvl.methods.parts.fused import classifier_start, classify, embed, read_prompts
from fedvl.models.checkpoint import load_model
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator

ENCODER = small_fused_encoder()


def some_inputs():
    return small_samples(small_method("fedavg-p"), 25).inputs


def test_an_absent_image_is_all_ones_whatever_lies_in_memory():
    inputs = some_inputs()
    absent = ~inputs["present"][:, 1]
    assert absent.any()
    assert not absent.all()
    seen = embed(ENCODER, inputs)
    length = inputs["tokens"].shape[1]
    ones = ENCODER.embed_image(torch.ones(1, 3, *inputs["pixels"].shape[-2:]))
    torch.testing.assert_close(seen.tokens[absent, length:], ones.expand(int(absent.sum()), -1, -1))
    there = ENCODER.embed_image(ENCODER.normalise(inputs["pixels"][~absent]))
    torch.testing.assert_close(seen.tokens[~absent, length:], there)
    other = embed(ENCODER, {**inputs, "pixels": 255 - inputs["pixels"]})
    assert torch.equal(other.tokens[absent], seen.tokens[absent])
    assert not torch.equal(other.tokens[~absent], seen.tokens[~absent])


def test_padding_behind_a_text_is_not_seen():
    inputs = some_inputs()
    tensors = classifier_start(ENCODER, 4, torch.Generator().manual_seed(0))
    prompts = torch.randn(1, 25, 3, ENCODER.width, generator=torch.Generator().manual_seed(1))
    longer = {**inputs, "tokens": torch.nn.functional.pad(inputs["tokens"], (0, 2), value=ENCODER.tokenizer.end)}
    states = [read_prompts(ENCODER, tensors, embed(ENCODER, i), prompts, 3) for i in (inputs, longer)]
    torch.testing.assert_close(*states)


def test_the_state_read_is_the_encoders_own_pooled_state_at_that_position():
    inputs = {name: tensor[-5:] for name, tensor in some_inputs().items()}  # all have their images
    tensors = classifier_start(ENCODER, 4, torch.Generator().manual_seed(0))
    prompts = torch.randn(5, 3, ENCODER.width, generator=torch.Generator().manual_seed(1))
    hidden, pooled = ENCODER.encode(inputs["tokens"], ENCODER.normalise(inputs["pixels"]), prompts)
    seen = embed(ENCODER, inputs)
    torch.testing.assert_close(read_prompts(ENCODER, tensors, seen, prompts[None], 3), pooled)
    torch.testing.assert_close(read_prompts(ENCODER, tensors, seen, prompts[None], 0), ENCODER.pool(hidden, 0))
    deep = torch.randn(2, 5, 3, ENCODER.width, generator=torch.Generator().manual_seed(2))
    expected = ENCODER.pool(ENCODER.run(seen.tokens, seen.mask, deep), 6)
    torch.testing.assert_close(read_prompts(ENCODER, tensors, seen, deep, 6), expected)


def test_the_classifier_is_two_layers_with_norm_and_gelu():
    tensors = classifier_start(ENCODER, 4, torch.Generator().manual_seed(0))
    width = ENCODER.width
    modules = torch.nn.Linear(width, 2 * width), torch.nn.LayerNorm(2 * width), torch.nn.Linear(2 * width, 4)
    for name, module in zip(("hidden", "norm", "classes"), modules, strict=True):
        module.load_state_dict({part: tensors[f"{name}.{part}"] for part in ("weight", "bias")})
    state = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
    network = torch.nn.Sequential(modules[0], modules[1], torch.nn.GELU(), modules[2])
    torch.testing.assert_close(classify(tensors, state), network(state))


@pytest.fixture(scope="module")
def drawings():
    """Ten drawings with their names; the model that reads both."""
    encoder = load_model("fedvl-tiny-vilt", "cpu")
    split = open_dataset("emoji-mini").splits["train"]
    assert split.texts is not None
    rows = range(0, 1100, 110)
    has_text, has_image = torch.tensor([[1, 1, 1, 0, 0, 1, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 0, 1, 1]]).bool()
    texts = [split.texts[row] * bool(text) for row, text in zip(rows, has_text, strict=True)]
    inputs = {
        "tokens": encoder.tokenise(texts),
        "pixels": torch.stack([encoder.preprocess(split.read(row)) for row in rows]),
        "present": torch.stack([has_text, has_image], 1),
    }
    return encoder, Samples(inputs, torch.from_numpy(split.labels[list(rows)]).long())


@pytest.mark.parametrize("name", FUSED)
def test_on_the_embedded_model_batched_equals_one_by_one(name, drawings):
    """Clients that have texts alone, images alone, some of each, one sample, nothing."""
    encoder, samples = drawings
    method_type = load_method(name)
    method = method_type(method_type.options_type(), Task(tuple("abcdefghi"), torch.zeros(9, 0), encoder, 5))
    results = []
    for one_by_one in (False, True):
        config = FederationConfig(rounds=1, one_by_one=one_by_one)
        rows = torch.arange(10).split([3, 2, 4, 1, 0])
        training = TrainingConfig(batch_size=2, learning_rate=0.05, momentum=0.0)
        engine = LocalEngine(method, samples, rows, training, config, 0)
        federation = Federation(method, engine, config, 0, method.start(torch_generator(0, "start")))
        results.append(run_quietly(federation).shared)
    assert results[0].keys() == results[1].keys()
    for key, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][key], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FUSED)
def test_clients_with_only_text_only_images_one_sample_or_nothing_take_part(name):
    method = small_method(name)
    federation = small_federation(method, rounds=2)
    present = small_samples(method).inputs["present"]
    assert present[: RAGGED[0]].tolist() == [[True, False]] * RAGGED[0]
    assert present[-RAGGED[-1] :].tolist() == [[False, True]] * RAGGED[-1]
    run_quietly(federation)
    for record in federation.records:
        assert record.dropped == [1]  # it has nothing
        assert record.refused == []
        assert math.isfinite(record.loss or math.nan)
    trained = {
        result.update.client: result.update for result in federation.engine.train(0, range(5), federation.shared)
    }
    assert {client: sent.weight for client, sent in trained.items()} == {0: 7, 2: 1, 3: 12, 4: 5}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("preset", ["paper", "released"])
def test_presets_describe_a_whole_run(name, preset):
    experiment = resolve_experiment({"method": {"name": name, "preset": preset}})
    assert experiment.model.name == "fedvl-tiny-vilt"
    assert experiment.evaluation.protocol == "missing"
    assert experiment.training.learning_rate == 0.05
