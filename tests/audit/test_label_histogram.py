"""The label histogram: read where it leaks, not where noise is sent."""

import numpy as np
import pytest
import torch
from helpers.audited import CLASSES, evidence_of, silenced

from fedvl.audit.finding import CLIENT, SERVER, SHOWN, Finding, Unmeasured
from fedvl.audit.imitation import Mixture
from fedvl.audit.label_histogram import Probe, attack, of_reports

METHODS = ("linear", "cachefl", "fst-cbdg")


def by_view(outcomes):
    return {each.view: each for each in outcomes}


@pytest.mark.parametrize("method", METHODS)
def test_the_server_reads_it_off_updates_that_leak(method):
    found = by_view(attack(evidence_of(method)))[SERVER]
    assert isinstance(found, Finding)
    assert found.value > 0.7
    assert found.verdict == SHOWN


def test_another_client_sees_the_mean_of_many_and_learns_less():
    found = by_view(attack(evidence_of()))
    assert found[CLIENT].value < found[SERVER].value - 0.2


def test_noise_gives_nothing_away():
    found = by_view(attack(silenced(evidence_of())))[SERVER]
    assert found.verdict != SHOWN
    assert found.interval[0] <= 0 <= found.interval[1]


def test_a_report_of_counts_is_read_as_it_is():
    evidence = evidence_of(rounds=1)
    evidence.messages = [
        message._replace(report={"counts": torch.tensor(evidence.histogram(message.client)), "images": torch.ones(1)})
        for message in evidence.messages
    ]
    (found,) = of_reports(evidence)
    assert found.value == pytest.approx(1.0)
    assert found.name == "label-histogram-of-report"


def test_without_true_labels_nothing_can_be_measured():
    evidence = evidence_of(rounds=1)
    evidence.training.true_labels.fill_(-1)
    assert all(isinstance(each, Unmeasured) for each in attack(evidence))


def test_a_mixture_of_directions_is_taken_apart():
    directions = torch.randn(CLASSES, 40, generator=torch.Generator().manual_seed(0))
    shares = np.array([0.5, 0.0, 0.3, 0.2, 0.0])
    change = 7 * torch.tensor(shares, dtype=torch.float32) @ directions
    assert Mixture(directions).of(change) == pytest.approx(shares, abs=1e-5)


def test_a_method_by_which_one_class_alone_teaches_nothing_is_attacked_with_all_of_them(monkeypatch):
    evidence = evidence_of(rounds=1)
    learn = evidence.method.loss

    def only_of_several(tensors, batch):
        return learn(tensors, batch) * (batch.labels != batch.labels[..., :1]).any()

    monkeypatch.setattr(evidence.method, "loss", only_of_several)
    assert by_view(attack(evidence))[SERVER].value > 0.7


def test_a_probe_of_shares_that_are_linear_in_a_message_finds_them():
    """Shares of 0.2 and 0.5 on average, which follow two of three numbers of a message."""
    messages = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = np.stack([0.2 + 0.1 * messages[:, 0].numpy(), 0.5 - 0.2 * messages[:, 2].numpy()], 1)
    probe = Probe.fit(messages, shares)
    assert probe.shares(torch.tensor([1.0, 5.0, -1.0])) == pytest.approx([0.3, 0.7], abs=0.03)
