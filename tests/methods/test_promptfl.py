"""promptfl: against plain loops, its presets, and real images."""

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.prompts import settings
from helpers.real import accuracy
from helpers.small import RAGGED, batch_of, run_quietly, small_federation, small_method, small_samples
from torch.nn.functional import cross_entropy, normalize

from fedvl.errors import FedVLError
from fedvl.federation.orders import order_of
from fedvl.runs.settings import resolve_experiment


def plain_scores(method, context, features):
    """The whole sentence through the text tower, as the paper has it."""
    encoder = method.task.encoder
    tokens = encoder.tokenise([f"{name}." for name in method.task.class_names])
    return 10.0 * features @ normalize(encoder.encode_text(tokens, context), dim=-1).T


def test_promptfl_averages_what_plain_loops_learn_and_counts_clients_equally():
    """Independent code: the sentence in full, torch.optim.SGD, one client after another; then the mean by hand."""
    method = small_method("promptfl", context=5)
    settings = {"learning_rate": 0.02, "momentum": 0.9, "weight_decay": 0.01, "local_epochs": 1}
    federation = small_federation(method, settings, rounds=1)
    start, samples = federation.shared["context"].clone(), small_samples(method)
    learned = []
    for client, rows in enumerate(torch.arange(sum(RAGGED)).split(RAGGED)):
        if not len(rows):
            continue
        context = start.clone().requires_grad_()
        optimiser = torch.optim.SGD([context], lr=0.02, momentum=0.9, weight_decay=0.01)
        for chosen in order_of(0, 0, client, len(rows)).split(4):
            scores = plain_scores(method, context, samples.inputs["features"][rows[chosen]])
            optimiser.zero_grad()
            cross_entropy(scores, samples.labels[rows[chosen]]).backward()
            optimiser.step()
        learned.append(context.detach())
    found = run_quietly(federation).shared["context"]
    assert len(learned) == 4
    torch.testing.assert_close(found, sum(learned) / 4, rtol=0, atol=1e-6)
    assert (found - learned[-1]).abs().max() > 1e-3  # the released code's "mean" is the last client's


def test_the_loss_of_labels_and_of_candidate_sets_is_a_mean_over_real_rows():
    """Independent code: -log of the label's share, or of the sum of the candidates' shares, of all classes."""
    method = small_method("promptfl", context=5)
    samples = small_samples(method, 5)
    tensors = method.start(torch.Generator().manual_seed(0))
    shares = plain_scores(method, tensors["context"], samples.inputs["features"]).softmax(-1)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    batch = batch_of(samples)._replace(mask=mask)
    by_label = -shares[torch.arange(5), samples.labels].log()
    torch.testing.assert_close(method.objective(tensors, batch)[0], by_label[[0, 2, 3]].mean(), rtol=1e-4, atol=1e-5)
    candidates = torch.tensor([[1.0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 1], [1, 0, 0, 0]])
    batch = batch._replace(inputs=batch.inputs | {"candidates": candidates})
    by_set = -(shares * candidates).sum(-1).log()
    torch.testing.assert_close(method.objective(tensors, batch)[0], by_set[[0, 2, 3]].mean(), rtol=1e-4, atol=1e-5)


def test_presets_are_the_published_settings():
    training = resolve_experiment({"method": {"name": "promptfl"}}).training
    assert (training.learning_rate, training.momentum, training.weight_decay, training.batch_size) == (
        0.001,
        0.9,
        5e-4,
        32,
    )
    released = resolve_experiment({"method": {"name": "promptfl", "preset": "released"}})
    assert (released.training.local_epochs, released.federation.rounds) == (5, 20)


def test_a_bad_option_is_refused():
    with pytest.raises(FedVLError, match=r"method\.context"):
        resolve_experiment({"method": {"name": "promptfl", "context": 0}})


def test_it_learns_on_real_images():
    """30 times its paper's rate: at its own, 5 rounds on this small model hardly move anything."""
    learned, zero_shot = accuracy("promptfl", settings(0.03))
    assert learned > zero_shot + 2  # 3.7 were seen: how well a context begins is a matter of luck


def test_a_new_user_can_ask_about_other_classes():
    """Four classes that nobody trained on, from three clients of two classes each: well above guessing (25%)."""
    asked = {"data": {"clients": 3}, "evaluation": {"protocol": "open"}}
    learned, _ = accuracy("promptfl", settings(0.03, rounds=2, **asked))
    assert learned > 40


def test_a_context_that_begins_as_words_serves_classes_that_nobody_trained_on():
    """Ones drawn at random are mended by training for the trained classes alone; words keep what the model knew."""
    asked = settings(0.001, rounds=2, data={"clients": 3}, evaluation={"protocol": "open"})
    drawn, zero_shot = accuracy("promptfl", asked)
    begun_as_words, _ = accuracy("promptfl", asked, words="a photo of a")
    assert begun_as_words > max(drawn + 10, zero_shot - 5)


def test_it_declares_what_the_table_says():
    assert_declared("promptfl")
