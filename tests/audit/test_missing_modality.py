"""Missing modality: shares are taken apart from planted changes, and noise says nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.audited import evidence_of
from helpers.small import RAGGED, small_federation, small_method

from fedvl.audit.finding import SERVER, Finding, Unmeasured
from fedvl.audit.imitation import Coordinates
from fedvl.audit.messages import Message, Round, Seen
from fedvl.audit.missing_modality import Kinds, attack, kind_shares
from fedvl.methods.base import Samples
from fedvl.methods.roles import Roles, Shared
from fedvl.runs.preparation import Training


def kinds():
    names = {"uses": torch.zeros(30)}
    directions = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    return Kinds(Coordinates(["uses"], names), torch.ones(30), directions, Roles({"uses": Shared(trained=False)}))


def clients(count=12):
    """Samples of clients of which ever more lack the text, and some the image."""
    size, evidence = 20, evidence_of(rounds=1)
    shares = np.random.default_rng(0).dirichlet([1.0] * 3, count)
    lacks = [(shares[c] * size).round().astype(int) for c in range(count)]
    present = torch.ones(count * size, 2, dtype=torch.bool)
    for client, (_, text, image) in enumerate(lacks):
        present[client * size : client * size + text, 0] = False
        present[client * size + text : client * size + text + image, 1] = False
    rows = list(torch.arange(count * size).split(size))
    labels = torch.zeros(count * size, dtype=torch.long)
    training = Training(Samples({"present": present}, labels), rows, labels, evidence.training.counts, "")
    return replace(evidence, prepared=replace(evidence.prepared, training=training)), shares


def seen_of(changes):
    return [Seen(client, 0, {}, {"uses": change}) for client, change in enumerate(changes)]


def test_shares_are_read_off_changes_that_mix_the_kinds():
    evidence, shares = clients()
    found = kind_shares(evidence, SERVER, seen_of(torch.tensor(shares).float() @ kinds().directions), [kinds()])
    assert found.value > 0.95
    assert found.leaks


def test_noise_says_nothing():
    evidence, shares = clients()
    noise = torch.randn(len(shares), 30, generator=torch.Generator().manual_seed(1))
    found = kind_shares(evidence, SERVER, seen_of(noise), [kinds()])
    assert found.interval[0] <= 0 <= found.interval[1]


def test_clients_are_told_apart_by_the_prompts_of_what_they_lack():
    method = small_method("fedavg-p")
    federation = small_federation(method)
    start, data = federation.shared, federation.engine.data
    texts = method.task.fused.tokenise([f"a drawing of thing {label}" for label in data.labels.tolist()])
    complete = Samples({**data.inputs, "tokens": texts}, data.labels)
    evidence = evidence_of(rounds=1)
    rows = [part for part in torch.arange(sum(RAGGED)).split(RAGGED) if len(part)]
    evidence = replace(
        evidence,
        prepared=replace(
            evidence.prepared,
            method=method,
            training=Training(data, rows, data.labels, evidence.training.counts, ""),
        ),
        kept={},
        complete=(complete, complete),
        rounds=[Round(start, start, 1.0, False)],
        messages=[
            Message(c, 0, start, t.update, 0.0, {}) for c, t in enumerate(federation.engine.train(0, [0, 3, 4], start))
        ],
    )
    found = {each.name: each for each in attack(evidence)}["missing-modality-kind"]
    assert isinstance(found, Finding)
    assert found.value > 0.6


def test_images_alone_have_no_modality_to_miss():
    assert all(isinstance(each, Unmeasured) for each in attack(evidence_of(rounds=1)))


@pytest.mark.parametrize("shares", [(1.0, 0.0, 0.0), (0.2, 0.3, 0.5)])
def test_kinds_take_a_mixture_apart(shares):
    found = kinds().shares({"uses": torch.tensor(shares) @ kinds().directions})
    assert found == pytest.approx(np.array(shares), abs=1e-5)
