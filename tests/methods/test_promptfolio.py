"""PromptFolio: the mixture by hand, its two ends, what stays local, and real images."""

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.prompts import SKEWED, gradient, settings
from helpers.real import accuracy
from helpers.small import batch_of, run_quietly, small_federation, small_method, small_samples

from fedvl.errors import FedVLError
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator


def started(method):
    samples = small_samples(method)
    start = method.start(torch_generator(0, "start")) | method.join(samples, torch_generator(0, "join", 0))
    return start, batch_of(samples)


def test_the_mixture_of_both_texts_is_not_normalised():
    method, plain = small_method("promptfolio", theta=0.25), small_method("promptfl")
    tensors, batch = started(method)
    shared = plain.predict({"context": tensors["context"]}, batch.inputs)
    local = plain.predict({"context": tensors["local_context"]}, batch.inputs)
    torch.testing.assert_close(method.predict(tensors, batch.inputs), 0.75 * shared + 0.25 * local)


def test_at_theta_zero_it_is_promptfl():
    method, plain = small_method("promptfolio", theta=0), small_method("promptfl")
    tensors, batch = started(method)
    torch.testing.assert_close(method.predict(tensors, batch.inputs), plain.predict(tensors, batch.inputs))
    assert gradient(method, tensors, batch, "local_context").abs().max() == 0


def test_at_theta_one_the_servers_context_does_not_move():
    method = small_method("promptfolio", theta=1)
    tensors, batch = started(method)
    assert gradient(method, tensors, batch, "context").abs().max() == 0
    assert gradient(method, tensors, batch, "local_context").abs().max() > 0
    federation = small_federation(method, {"weight_decay": 0.0})
    start = federation.shared["context"].clone()
    torch.testing.assert_close(run_quietly(federation).shared["context"], start, rtol=0, atol=1e-7)


def test_the_local_context_stays_and_who_has_none_is_answered_by_the_shared_one():
    method, plain = small_method("promptfolio"), small_method("promptfl")
    federation = run_quietly(small_federation(method, rounds=1))
    assert federation.shared.keys() == {"context"}
    assert all(kept.keys() == {"local_context"} for kept in federation.engine.private.values())
    inputs = small_samples(method).inputs
    assert torch.equal(method.predict(federation.shared, inputs), plain.predict(federation.shared, inputs))


def test_presets_are_the_published_settings():
    paper = resolve_experiment({"method": {"name": "promptfolio"}})
    assert (paper.training.learning_rate, paper.training.schedule, paper.federation.rounds) == (0.002, "cosine", 10)
    assert (paper.method.options["theta"], paper.method.options["context"]) == (0.2, 16)
    released = resolve_experiment({"method": {"name": "promptfolio", "preset": "released"}}).method.options
    assert (released["theta"], released["context"]) == (0.4, 8)
    with pytest.raises(FedVLError, match=r"method\.theta"):
        resolve_experiment({"method": {"name": "promptfolio", "theta": 1.1}})


def test_it_learns_on_real_images():
    """Each client's own images of few classes; 50 times its paper's rate, for there are few rounds."""
    learned, zero_shot = accuracy("promptfolio", settings(0.1, rounds=8, data=SKEWED), context=4)
    assert learned > zero_shot + 4


def test_it_declares_what_the_table_says():
    assert_declared("promptfolio")
