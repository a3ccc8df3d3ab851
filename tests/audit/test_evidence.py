"""The evidence: the messages of the run itself, to the bit, and only what each view sees."""

import hashlib
from pathlib import Path

import pytest
import torch
from helpers.audited import CLASSES, CLIENTS, WIDTH, evidence_of
from helpers.runs import OPENER, run_experiment

from fedvl.audit import feature_recovery, picture
from fedvl.audit.evidence import gather, share_out
from fedvl.audit.messages import EXAMPLES, LOSS, WEIGHT, Message, Recorder, seen_in, subtract
from fedvl.audit.perform import leaves
from fedvl.config import Experiment, PrivacyConfig
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.federation.accounting import sigma_for
from fedvl.runs.experiment import local_engine
from fedvl.runs.preparation import prepare
from fedvl.runs.settings import resolve_experiment
from fedvl.tensors import Tensors

PRIVATE = PrivacyConfig(unit="record", epsilon=2.0)
SMALL = {"data": {"clients": 5, "shots": 8, "partition": "dirichlet:0.5"}, "training": {"batch_size": 4}}


def test_what_is_kept_is_what_was_sent_in_every_round():
    evidence = evidence_of(rounds=2)
    assert [(m.client, m.round_index) for m in evidence.messages] == [(c, r) for c in range(CLIENTS) for r in (0, 1)]
    first, second = evidence.rounds
    assert first.after is second.before
    weights = {m.client: m.update.weight for m in evidence.messages}
    sent = [weights[m.client] * m.update.tensors["weight"].double() for m in evidence.messages if m.round_index == 1]
    mean = torch.stack(sent).sum(0) / sum(weights.values())
    assert torch.allclose(second.after["weight"].double(), mean, atol=1e-7)
    assert second.weight == sum(weights.values())


# --- the same bits as fedvl run


def digest(tensors: Tensors, *numbers: float) -> str:
    """The SHA-256 of named tensors and numbers, by a way of its own."""
    found = hashlib.sha256(repr(numbers).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def digest_of(message: Message) -> str:
    sent = {**message.update.tensors, **{f"report {name}": t for name, t in message.report.items()}}
    return digest(sent, message.update.weight, message.loss, message.examples)


def record_run(experiment: Experiment, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, list[str]]:
    """Run an experiment as `fedvl run` does; return digests of its messages and of its secure sums."""
    sent: dict[tuple[int, int], str] = {}
    sums: list[str] = []
    reports: dict[int, Tensors] = {}

    def recorded(prepared):
        engine = local_engine(prepared)
        train, add, report = engine.train, engine.sum_updates, engine.reports

        def training(round_index, cohort, shared, own=None):
            found = train(round_index, cohort, shared, own)
            for update, _, loss, examples in found:
                told = {f"report {name}": t for name, t in reports.get(update.client, {}).items()}
                sent[update.client, round_index] = digest({**update.tensors, **told}, update.weight, loss, examples)
            reports.clear()
            return found

        def adding(round_index, cohort, shared):
            found = add(round_index, cohort, shared)
            sums.append(digest({"total": found.total}))
            return found

        def reporting(round_index, shared):
            found = report(round_index, shared)
            reports.update({each.client: each.tensors for each in found[0] if each.client is not None})
            return found

        vars(engine).update(train=training, sum_updates=adding, reports=reporting)
        return engine

    monkeypatch.setattr("fedvl.runs.experiment.local_engine", recorded)
    run_experiment(experiment, folder, Silent())
    return sent, sums


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("linear", {}),
        ("linear", {"federation": {"attack": "scaled:0.4"}}),
        ("linear", {"federation": {"attack": "label-flip:0.4", "per_round": 3}}),
        ("linear", {"federation": {"secure_sum": True}}),
        ("linear", {"privacy": {"unit": "record"}}),
        ("linear", {"federation": {"withdrawn": [1], "dropout": 0.3}, "evaluation": {"validation": 0.3}}),
        ("fed-mp", {}),
        ("fedpp", {"method": {"visual_prompts": False, "context": 2}}),
    ],
)
def test_the_audited_messages_are_those_of_the_run_to_the_bit(method, changes, tmp_path, monkeypatch):
    settings = {**SMALL, **changes, "method": {"name": method, **changes.get("method", {})}}
    settings["federation"] = {"rounds": 2, "threads": 1, **changes.get("federation", {})}
    experiment = resolve_experiment(settings)
    sent, sums = record_run(experiment, tmp_path, monkeypatch)
    monkeypatch.undo()
    totals: list[str] = []

    class Spy(Recorder):
        def _sum_updates(self, sum_updates, round_index, cohort, shared):
            def kept(*arguments):
                found = sum_updates(*arguments)
                totals.append(digest({"total": found.total}))
                return found

            return super()._sum_updates(kept, round_index, cohort, shared)

    monkeypatch.setattr("fedvl.audit.evidence.Recorder", Spy)
    evidence = gather(experiment, 5, 2, Silent(), OPENER)
    audited = {(m.client, m.round_index): digest_of(m) for m in evidence.messages}
    assert len(audited) > 2
    assert audited == sent
    assert totals == sums
    assert bool(sums) is experiment.federation.secure_sum


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluation": {"validation": 0.2}, "privacy": {"unit": "record"}},
        {"federation": {"sequential": True, "secure_sum": True}},
        {"federation": {"sequential": True, "robust": "median"}},
        {"privacy": {"unit": "record", "subspace": 4}},
        {"method": {"name": "fed-mp"}, "federation": {"secure_sum": True}},
    ],
)
def test_what_a_run_refuses_an_audit_refuses_with_the_same_words(changes):
    experiment = resolve_experiment({**SMALL, "method": {"name": "linear"}, **changes})
    with pytest.raises(FedVLError) as of_run:
        prepare(experiment, Silent(), OPENER)
    with pytest.raises(FedVLError) as of_audit:
        gather(experiment, 2, 1, Silent(), OPENER)
    assert str(of_audit.value) == str(of_run.value)


def test_clients_that_take_one_step_are_audited_one_by_one():
    evidence = evidence_of(rounds=1, federation={"one_step": True})
    assert evidence.clients == list(range(CLIENTS))


# --- what each view sees


def test_another_client_sees_the_mean_of_all_but_itself():
    evidence = evidence_of(rounds=1)
    changes = {m.client: subtract(m.update.tensors, m.before)["weight"] for m in evidence.messages}
    for seen in evidence.seen_by_client():
        observer = (seen.client + 1) % CLIENTS
        others = torch.stack([change for client, change in changes.items() if client != observer]).mean(0)
        assert torch.allclose(seen.change["weight"], others, atol=1e-6)


def changes_of(evidence):
    return {m.client: subtract(m.update.tensors, m.before)["weight"] for m in evidence.messages}


def test_in_a_secure_sum_the_server_sees_sums_alone():
    evidence = evidence_of(rounds=1, secure_sum=True)
    mean = torch.stack(list(changes_of(evidence).values())).mean(0)
    seen = evidence.seen_by_server()
    assert [each.client for each in seen] == list(range(CLIENTS))
    assert all(torch.allclose(each.change["weight"], mean, atol=1e-6) for each in seen)
    assert all(each.items.keys() == {"weight", "bias", WEIGHT, LOSS, EXAMPLES} for each in seen)
    losses = sum(message.loss for message in evidence.messages)
    assert float(seen[0].items[LOSS]) == pytest.approx(losses, abs=1e-6)
    assert (float(seen[0].items[WEIGHT]), float(seen[0].items[EXAMPLES])) == (20.0 * CLIENTS, CLIENTS)
    assert evidence.what_server_sees == "the mean of all clients' updates"
    outcomes = (*feature_recovery.attack(evidence), *picture.attack(evidence))
    assert {each.name for each in outcomes if each.name.startswith(("one-image", "picture"))} == {
        "one-image-recovery",
        "one-image-linking",
        "picture",
        "picture-linking",
    }
    assert not any(hasattr(each, "value") for each in outcomes if each.name.startswith(("one-image", "picture")))
    rows = leaves(evidence, [])
    assert [row.shape for row in rows] == [[CLASSES, WIDTH], [CLASSES], [], [], []]
    assert all(row.masked and row.example == [] for row in rows)  # each number is as random as its mask


def test_every_tensor_and_number_of_a_message_is_an_item():
    evidence = evidence_of(rounds=1)
    message = evidence.messages[0]
    sent = {**message.update.tensors, "extra": torch.ones(3), "weight": message.before["weight"] + 2}
    more = message._replace(update=message.update._replace(tensors=sent), report={"counts": torch.ones(CLASSES)})
    items = seen_in(more).items
    assert torch.allclose(items["weight"], torch.full_like(items["weight"], 2.0), atol=1e-6)
    assert torch.equal(items["extra"], torch.ones(3))
    assert torch.equal(items["report of counts"], torch.ones(CLASSES))
    assert float(items[EXAMPLES]) == 20
    assert items["low bits of extra"].tolist() == [0.0, 0.0, 0.0]
    odd = torch.tensor([1.0 + 2**-23, 1.0 + 3 * 2**-23])  # one and three units in the last place
    tensors = {**sent, "extra": odd}
    assert seen_in(more._replace(update=more.update._replace(tensors=tensors))).items["low bits of extra"].tolist() == [
        1,
        3,
    ]


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


# --- the attacker's images


@pytest.mark.parametrize(("shots", "split"), [(200, "test"), (100, "train")])
def test_outsiders_are_unused_training_images_where_there_are_any(shots, split):
    settings = {"method": {"name": "linear"}, "data": {"shots": shots, "clients": 10}}
    prepared = prepare(resolve_experiment(settings), Silent(), OPENER)
    evidence = share_out(prepared)
    assert evidence.outside_split == split
    features = prepared.encoded.read[split].forms["features"]
    assert torch.equal(evidence.outside.inputs["features"], features[evidence.outside_rows])
    if split == "train":
        assert not torch.isin(evidence.outside_rows, torch.cat(prepared.training.rows)).any()
    else:
        assert not torch.isin(evidence.outside_rows, evidence.own_rows).any()


def test_an_audit_without_test_images_says_what_is_missing():
    settings = {"method": {"name": "linear"}, "data": {"test_shots": 1, "clients": 3}}
    with pytest.raises(FedVLError, match="two of each at least"):
        gather(resolve_experiment(settings), 2, 1, Silent())
