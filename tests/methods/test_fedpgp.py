"""FedPGP: its loss by hand, where its gradients go, what stays local, and real images."""

import math

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.prompts import SKEWED, gradient, settings
from helpers.real import accuracy
from helpers.small import batch_of, run_quietly, small_federation, small_method, small_samples

from fedvl.errors import FedVLError
from fedvl.methods.parts.losses import label_loss
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator


def started(method, **changed):
    samples = small_samples(method)
    start = method.start(torch_generator(0, "start")) | method.join(samples, torch_generator(0, "join", 0))
    return {**start, **changed}, batch_of(samples)


def test_without_a_left_factor_it_is_promptfl_and_the_right_one_has_no_gradient():
    method, plain = small_method("fedpgp"), small_method("promptfl")
    tensors, batch = started(method)
    tensors["left"] = torch.zeros_like(tensors["left"])
    torch.testing.assert_close(method.predict(tensors, batch.inputs), plain.predict(tensors, batch.inputs))
    assert gradient(method, tensors, batch, "right").abs().max() == 0
    assert gradient(method, tensors, batch, "left").abs().max() > 0


def test_without_the_contrast_the_shared_gradient_is_promptfls_at_the_clients_context():
    method, plain = small_method("fedpgp", mu=0), small_method("promptfl")
    tensors, batch = started(method, left=torch.ones(16, 8))
    found = gradient(method, tensors, batch, "context")
    own = tensors["context"] + tensors["left"] @ tensors["right"]
    torch.testing.assert_close(found, gradient(plain, {"context": own}, batch, "context"))


def test_the_contrast_by_hand():
    """Two classes: cosines of the shared text with the frozen one are 1 and 0, with the own one 0 and 1; temperature 1/2."""
    method = small_method("fedpgp")
    method.frozen = torch.eye(6)[[0, 0]]
    shared, own = torch.eye(6)[[0, 1]], torch.eye(6)[[1, 1]]
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(2))) / 2
    torch.testing.assert_close(method.contrast(own, shared), torch.tensor(expected))


def test_the_loss_adds_the_contrast_times_mu():
    method, without = small_method("fedpgp", mu=2.0), small_method("fedpgp", mu=0)
    tensors, batch = started(method, left=torch.ones(16, 8))
    own = method.texts.features(method.own_context(tensors))
    contrast = method.contrast(own, method.texts.features(tensors["context"]))
    torch.testing.assert_close(method.loss(tensors, batch), without.loss(tensors, batch) + 2 * contrast)
    torch.testing.assert_close(without.loss(tensors, batch), label_loss(method.predict(tensors, batch.inputs), batch))


def test_a_step_against_the_contrast_brings_shared_texts_to_the_frozen_ones_and_own_texts_away():
    method = small_method("fedpgp", mu=1000.0)
    tensors, batch = started(method, left=torch.ones(16, 8))

    def cosines(tensors):
        shared, own = (method.texts.features(c) for c in (tensors["context"], method.own_context(tensors)))
        return float((shared * method.frozen).sum(-1).mean()), float((shared * own).sum(-1).mean())

    moved = {name: tensor - 1e-6 * gradient(method, tensors, batch, name) for name, tensor in tensors.items()}
    (to_frozen, to_own), (then_to_frozen, then_to_own) = cosines(tensors), cosines(moved)
    assert then_to_frozen - then_to_own > to_frozen - to_own


def test_the_released_codes_frozen_texts_are_of_a_placeholder():
    method = small_method("fedpgp", frozen="placeholder", context=3)
    encoder = method.task.encoder
    plain = encoder.encode_text(encoder.tokenise([f"X X X {name}." for name in method.task.class_names]))
    torch.testing.assert_close(method.frozen, torch.nn.functional.normalize(plain, dim=-1))
    assert torch.equal(small_method("fedpgp").frozen, method.task.text_features)


def test_the_factors_stay_with_their_client_and_the_context_is_averaged_by_size():
    federation = run_quietly(small_federation(small_method("fedpgp"), rounds=1))
    assert federation.shared.keys() == {"context"}
    assert federation.records[0].bytes_up == 4 * 16 * 8 * 4  # clients with data, tokens, width, bytes
    assert {name for kept in federation.engine.private.values() for name in kept} == {"left", "right"}
    trained = federation.engine.train(1, range(5), federation.shared)
    assert [result.update.weight for result in trained] == [7, 1, 12, 5]


def test_presets_are_the_published_settings():
    paper = resolve_experiment({"method": {"name": "fedpgp"}})
    assert (paper.training.learning_rate, paper.training.local_epochs, paper.federation.rounds) == (0.001, 2, 25)
    released = resolve_experiment({"method": {"name": "fedpgp", "preset": "released"}})
    assert released.method.options["frozen"] == "placeholder"
    with pytest.raises(FedVLError, match=r"method\.rank"):
        resolve_experiment({"method": {"name": "fedpgp", "rank": 0}})


def test_it_learns_on_real_images():
    """Each client's own images of few classes; 100 times its paper's rate, for there are few rounds."""
    learned, zero_shot = accuracy("fedpgp", settings(0.1, rounds=3, data=SKEWED), context=4)
    assert learned > zero_shot + 4


def test_it_declares_what_the_table_says():
    assert_declared("fedpgp")
