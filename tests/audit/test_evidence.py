"""The evidence: the messages of the run itself, and only what each view sees."""

import pytest
import torch
from helpers.audited import CLIENTS, evidence_of
from helpers.small import small_federation, small_method

from fedvl.audit.evidence import Watched, gather, subtract
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.settings import resolve_experiment


def test_what_is_kept_is_what_was_sent_in_every_round():
    evidence = evidence_of(rounds=2)
    assert [(m.client, m.round_index) for m in evidence.messages] == [(c, r) for c in range(CLIENTS) for r in (0, 1)]
    first, second = evidence.rounds
    assert first.after is second.before
    weights = {m.client: m.update.weight for m in evidence.messages}
    sent = [weights[m.client] * m.update.tensors["weight"].double() for m in evidence.messages if m.round_index == 1]
    mean = torch.stack(sent).sum(0) / sum(weights.values())
    assert torch.allclose(second.after["weight"].double(), mean, atol=1e-7)


def test_another_client_sees_the_mean_of_all_but_itself():
    evidence = evidence_of(rounds=1)
    changes = {m.client: subtract(m.update.tensors, m.before)["weight"] for m in evidence.messages}
    for seen in evidence.seen_by_client():
        observer = (seen.client + 1) % CLIENTS
        others = torch.stack([change for client, change in changes.items() if client != observer]).mean(0)
        assert torch.allclose(seen.change["weight"], others, atol=1e-6)


def test_the_report_of_each_client_is_kept_though_the_method_needs_their_sum():
    method = small_method("fedpp", visual_prompts=False)
    engine = small_federation(method).engine
    watched = Watched(2, method, engine.data, engine.rows, engine.training, engine.federation, 0)
    start = method.start(torch.Generator())
    summed, _ = watched.report(0, start)
    assert len(summed) == 1
    assert sorted(watched.reported) == [0, 2]  # client 1 has no images
    assert all(report["images"].item() == len(engine.rows[client]) for client, report in watched.reported.items())


def test_an_audit_without_test_images_says_what_is_missing():
    settings = {"method": {"name": "linear"}, "data": {"test_shots": 1, "clients": 3}}
    with pytest.raises(FedVLError, match="two of each at least"):
        gather(resolve_experiment(settings), 2, 1, Silent())
