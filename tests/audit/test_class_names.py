"""Class names: told from text vectors that are sent, and with the seed from their mean."""

from dataclasses import replace

import torch
from helpers.audited import evidence_of
from helpers.small import small_method
from torch.nn.functional import normalize

from fedvl.audit.class_names import attack, guess_names, nearest_classes, text_tensors
from fedvl.audit.finding import Unmeasured
from fedvl.audit.messages import Message
from fedvl.methods.base import Samples, Update
from fedvl.seeding import torch_generator


def dictionary(count=500, width=64):
    return normalize(torch.randn(count, width, generator=torch.Generator().manual_seed(0)), dim=1).double()


def test_names_are_the_nearest_texts_or_the_parts_of_their_mean():
    texts, held = dictionary(), [3, 77, 410, 499]
    assert guess_names(texts[held] + 0.01, texts, 4) == held
    assert sorted(guess_names(texts[held].mean(0, keepdim=True), texts, 4)) == held


def test_noise_names_no_class():
    texts = dictionary()
    noise = normalize(torch.randn(20, 1, 64, generator=torch.Generator().manual_seed(1)).double(), dim=-1)
    hits = sum(len({3, 77, 410, 499} & set(guess_names(vector, texts, 4))) for vector in noise)
    assert hits <= 3  # of 80 guesses, 0.6 by chance


def test_the_seed_decodes_the_mean_of_perturbed_texts():
    method = small_method("fed-mp")
    evidence = evidence_of(rounds=1)
    evidence.prepared = replace(evidence.prepared, method=method)
    for client, held in ((0, [1]), (1, [0, 2]), (2, [1, 2, 3])):
        samples = Samples({}, torch.tensor(held))
        private = method.join(samples, torch_generator(evidence.experiment.seed, "join", client))
        sent = {"perturbed_texts": method.perturbed_texts("", private, {}, samples)}
        message = Message(client, 0, {}, Update(client, sent, 1.0), 0.0, {})
        assert nearest_classes(evidence, "perturbed_texts", message) == held
    assert text_tensors(evidence) == ["perturbed_texts"]


def test_a_method_that_sends_no_texts_is_not_attacked():
    outcomes = attack(evidence_of(rounds=1))
    assert [each.name for each in outcomes] == ["class-names", "class-names-by-seed"]
    assert all(isinstance(each, Unmeasured) and "label histogram" in each.sentence for each in outcomes)
