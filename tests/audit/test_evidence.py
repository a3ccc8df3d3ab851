"""The evidence: the messages of the run itself, and only what each view sees."""

import pytest
import torch
from helpers.audited import CLASSES, CLIENTS, WIDTH, evidence_of
from helpers.small import small_federation, small_method

from fedvl.audit import feature_recovery, picture
from fedvl.audit.evidence import Watched, gather, subtract
from fedvl.audit.perform import leaves
from fedvl.config import PrivacyConfig
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.federation.accounting import sigma_for
from fedvl.settings import resolve_experiment

PRIVATE = PrivacyConfig(unit="record", epsilon=2.0)


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


def changes_of(evidence):
    return {m.client: subtract(m.update.tensors, m.before)["weight"] for m in evidence.messages}


def test_in_a_secure_sum_the_server_sees_the_mean_alone():
    evidence = evidence_of(rounds=1, secure_sum=True)
    mean = torch.stack(list(changes_of(evidence).values())).mean(0)
    seen = evidence.seen_by_server()
    assert [each.client for each in seen] == list(range(CLIENTS))
    assert all(torch.allclose(each.change["weight"], mean, atol=1e-6) for each in seen)
    assert evidence.what_server_sees == "the mean of all clients' updates"
    names = {each.name for each in (*feature_recovery.attack(evidence), *picture.attack(evidence))}
    assert "one-image-linking" not in names
    (row,) = leaves(evidence)  # no number can be shown as an example: each is as random as its mask
    assert (row["in"], row["shape"], row["example"]) == ("update, masked", [CLASSES * WIDTH + CLASSES + 3], [])


def test_noise_that_hides_images_is_in_what_is_seen():
    plain, hidden = (changes_of(evidence_of(rounds=1, privacy=unit)) for unit in (None, PRIVATE))
    apart = torch.stack([hidden[client] - plain[client] for client in hidden])
    # one step of 20 images at a rate of 0.002: noise of sigma x clip / 20, and the gradients are cut besides
    sigma = sigma_for(PRIVATE.epsilon, 1.0, 1, PRIVATE.delta)
    assert float(apart.std()) == pytest.approx(0.002 * sigma / 20, rel=0.2)


def test_noise_that_hides_clients_is_in_what_the_server_sees_of_a_sum():
    config = PRIVATE.model_copy(update={"unit": "client", "clip": 0.01})
    evidence = evidence_of(rounds=1, secure_sum=True, privacy=config)
    mean = torch.stack(list(changes_of(evidence).values())).mean(0)
    (seen, *_) = evidence.seen_by_server()
    sigma = sigma_for(config.epsilon, 1.0, 1, config.delta)
    assert float((seen.change["weight"] - mean).std()) == pytest.approx(sigma * 0.01 / CLIENTS, rel=0.2)


def test_of_reports_in_a_secure_sum_the_sum_alone_is_kept():
    method = small_method("fedpp", visual_prompts=False)
    engine = small_federation(method, secure_sum=True).engine
    watched = Watched(2, method, engine.data, engine.rows, engine.training, engine.federation, 0)
    watched.report(0, method.start(torch.Generator()))
    assert all(report["images"].item() == sum(map(len, engine.rows)) for report in watched.reported.values())


def test_what_a_run_refuses_an_audit_refuses():
    settings = {"method": {"name": "fed-mp"}, "data": {"clients": 3}, "federation": {"secure_sum": True}}
    with pytest.raises(FedVLError, match="fed-mp"):
        gather(resolve_experiment(settings), 2, 1, Silent())


def test_an_audit_without_test_images_says_what_is_missing():
    settings = {"method": {"name": "linear"}, "data": {"test_shots": 1, "clients": 3}}
    with pytest.raises(FedVLError, match="two of each at least"):
        gather(resolve_experiment(settings), 2, 1, Silent())
