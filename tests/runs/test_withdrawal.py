"""A client that withdraws: the run without it, against engines that never let it take part, and what is measured."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.contents import record_of
from helpers.finished import finish
from helpers.runs import prepare
from helpers.runs import run as run_through

from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.evaluation.statistics import mcnemar, wilson
from fedvl.federation.local import LocalEngine
from fedvl.federation.privacy import noise_seed
from fedvl.federation.round import Federation
from fedvl.report.ending import withdrawal_sentences
from fedvl.runs import contents
from fedvl.runs.contents import Status, Withdrawal
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.runs.withdrawal import (
    TestAnswers,
    answer_difference,
    check_comparable,
    distances,
    find_client,
    measure_withdrawal,
    norm,
    with_withdrawn,
    without_client,
)
from fedvl.seeding import torch_generator
from fedvl.tensors import load

LEAVING = 1
SMALL = {"data": {"shots": 12, "clients": 5, "minimum": 0}, "federation": {"rounds": 3, "threads": 1}}


def settings(name, method=None, data=None, federation=None, **rest):
    return {
        "method": {"name": name, **(method or {})},
        "data": {**SMALL["data"], **(data or {})},
        "federation": {**SMALL["federation"], **(federation or {})},
        **rest,
    }


CASES = {
    "draws of clients and of drop-outs": settings("linear", federation={"per_round": 3, "dropout": 0.3, "attempts": 9}),
    "residuals and soft labels": settings("fst-cbdg"),
    "last updates that are kept": settings("fed-mp"),
    "a consultation": settings("fedpp", {"visual_prompts": False, "context": 2}, training={"local_epochs": 1}),
    "a secure sum": settings("linear", federation={"secure_sum": True}),
    "pseudo-labels": settings("linear", data={"labels": "upl", "pseudo_shots": 4}),
}


class Deaf(LocalEngine):
    """The clients of a federation in which one has its images and never answers."""

    def train(self, round_index, cohort, shared, own=None):
        return super().train(round_index, [client for client in cohort if client != LEAVING], shared, own)

    def _with_data(self):
        return [client for client in super()._with_data() if client != LEAVING]


@pytest.mark.parametrize("case", CASES)
def test_a_run_without_a_client_is_one_in_which_it_never_answers(case):
    whole = prepare(CASES[case])
    experiment, training = whole.experiment, whole.training
    assert len(training.rows[LEAVING])
    engine = Deaf(whole.method, training.samples, training.rows, experiment.training, experiment.federation,
                  experiment.seed, experiment.privacy)  # fmt: skip
    start = whole.method.start(torch_generator(experiment.seed, "start"))
    expected = Federation(whole.method, engine, experiment.federation, experiment.seed, start)
    expected.run()
    left = {**CASES[case], "federation": {**CASES[case]["federation"], "withdrawn": [LEAVING]}}
    found = run_through(left).federation
    assert any(LEAVING in record.cohort for record in expected.records)
    assert not any(LEAVING in record.cohort for record in found.records)
    for theirs, ours in (
        (expected.shared, found.shared),
        *((expected.last.get(client, {}), found.last.get(client, {})) for client in range(5)),
        *((engine.private.get(client, {}), found.engine.private.get(client, {})) for client in range(5)),
    ):
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert LEAVING not in {*found.last, *found.engine.private}


def test_the_others_keep_their_images_and_the_servers_root_loses_those_of_the_client():
    everything = {"shots": 200}  # so that the server takes images that clients would have
    common = settings("linear", data=everything, federation={"robust": "root", "root_images": 30})
    before = prepare(common).training
    left = {**common, "federation": {**common["federation"], "withdrawn": [LEAVING]}}
    after = prepare(left).training
    for client in range(5):
        assert torch.equal(after.rows[client], before.rows[client][: 0 if client == LEAVING else None])
    plain = prepare(settings("linear", data=everything)).training.rows[LEAVING]  # with those that the server took
    kept = [row for row in before.root.tolist() if row not in plain.tolist()]
    assert 0 < len(kept) < 30
    assert after.root.tolist() == kept
    assert after.counts[LEAVING].sum() == 0
    assert np.array_equal(np.delete(after.counts, LEAVING, 0), np.delete(before.counts, LEAVING, 0))


def test_labels_that_are_chosen_together_are_chosen_by_those_who_stay():
    left = settings("linear", data={"labels": "cps"}, federation={"withdrawn": [LEAVING]})
    samples = prepare(left).training.samples
    plain = prepare(settings("linear")).training
    everything = prepare(settings("linear", data={"labels": "cps"})).training.samples.labels
    own = torch.isin(torch.arange(len(samples.labels)), plain.rows[LEAVING])
    assert (samples.labels[own] == -1).all()
    assert (everything[own] >= 0).any()


def test_pooled_images_lose_those_of_the_client():
    rows = prepare(settings("linear")).training.rows
    for leaving in (0, 3):
        pooled = run_through(settings("centralised", federation={"withdrawn": [leaving]}))
        kept = sorted(row for client in range(5) if client != leaving for row in rows[client].tolist())
        assert [own.tolist() for own in pooled.prepared.training.rows] == [kept]
        assert len(pooled.federation.records) == 3


def test_a_personal_test_has_no_part_of_the_client():
    left = settings("linear", evaluation={"protocol": "personal"}, federation={"withdrawn": [LEAVING]})
    finished = run_through(left)
    figures = finished.judge.judge(finished.federation.shared, {}).figures
    assert [value is None for value in figures["per_client_accuracy"]] == [client == LEAVING for client in range(5)]


@pytest.mark.parametrize(
    ("federation", "sentence"),
    [
        ({"withdrawn": [5]}, "no client 5 to withdraw; clients are 0 to 4"),
        ({"withdrawn": [1, 1]}, "names a client twice"),
        ({"withdrawn": [0, 1, 2, 3, 4]}, "All clients have withdrawn"),
        ({"withdrawn": [0, 1, 2], "secure_sum": True}, "A sum of 2 clients is too few"),
    ],
)
def test_what_cannot_be_left_out_is_refused(federation, sentence):
    with pytest.raises(FedVLError, match=sentence):
        prepare(settings("linear", federation=federation))


# --- noise

NOISY: dict[str, dict[str, Any]] = {
    "by the server": {"privacy": {"unit": "client", "epsilon": 3.0, "clip": 0.01}},
    "in shares": {"privacy": {"unit": "client", "epsilon": 3.0, "clip": 0.01}, "federation": {"secure_sum": True}},
    "on images": {"privacy": {"unit": "record", "epsilon": 3.0, "clip": 0.01}},
}


@pytest.mark.parametrize("case", NOISY)
def test_the_run_without_a_client_has_noise_of_its_own_and_the_budgets_add(case, tmp_path):
    """With the noise of the first model, the difference of the two would be the client's moves alone."""
    sections = NOISY[case]
    federation = {"rounds": 2, "threads": 1, **sections.get("federation", {})}
    wanted = {**settings("linear", federation=federation), "privacy": sections["privacy"]}
    finish(tmp_path / "run", wanted)
    left = leave(tmp_path / "run", LEAVING, tmp_path / "left")
    one, two = (load(path / "model.safetensors") for path in (tmp_path / "run", left.path))
    start = prepare(wanted).method.start(torch_generator(0, "start"))
    moved = [norm(distances(start, model)) for model in (one, two)]  # noise, for a clip this short leaves little else
    apart = norm(distances(one, two))
    assert apart == pytest.approx(math.hypot(*moved), rel=0.1)  # independent: at a right angle
    again = leave(tmp_path / "run", LEAVING, tmp_path / "again")
    assert again.result.state_sha256 == left.result.state_sha256
    measured = measure_withdrawal(RunFolder(tmp_path / "run"), left, LEAVING, None, Silent())
    spent = [RunFolder(folder).result.privacy.epsilon for folder in (tmp_path / "run", left.path)]
    assert measured.privacy.epsilon == pytest.approx(sum(spent))
    assert measured.privacy.delta == pytest.approx(2e-5)
    assert not measured.same_draws
    said = " ".join(withdrawal_sentences(measured))
    assert "Noise and samples are drawn anew" in said
    assert f"Budgets add: both models together spend epsilon {sum(spent):.2f}, delta 2e-05, of each" in said
    assert RunFolder(tmp_path / "run").withdrawals == [Withdrawal.model_validate_json(measured.to_json())]


def test_another_set_of_clients_that_withdrew_is_other_noise():
    hidden = prepare({**settings("linear"), "privacy": {"unit": "record"}}).experiment
    seeds = [noise_seed(with_withdrawn(hidden, clients)) for clients in ((), (1,), (2,), (1, 2))]
    assert len(set(seeds)) == 4
    assert seeds[0] == hidden.seed
    assert noise_seed(with_withdrawn(hidden, (2, 1))) == seeds[3]
    plain = with_withdrawn(prepare(settings("linear")).experiment, (1,))
    assert noise_seed(plain) == plain.seed


# --- the difference


def answers(classes, trained, start=None):
    folder = SimpleNamespace(
        path=SimpleNamespace(absolute=lambda: "a folder"), result=SimpleNamespace(state_sha256=None)
    )
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    return TestAnswers(folder, np.array(classes), labels, trained, start or {})  # type: ignore[arg-type]


def test_the_difference_is_counted_on_the_images_that_both_answer():
    start = {"w": torch.zeros(2), "b": torch.zeros(1), "n": torch.tensor([1])}
    one = answers([0, 0, 0, 1, 1, 1, 0, 0, 2, -1], {"w": torch.tensor([3.0, 4.0]), "b": torch.zeros(1)}, start)
    two = answers([0, 0, 1, 0, 0, 0, 0, 2, 2, 2], {"w": torch.tensor([3.0, 1.0]), "b": torch.tensor([4.0])})
    found = answer_difference(one, two)
    # of nine images: 6 right, then 4; one gained (the fourth), three lost, and the eighth wrong in another way
    assert found["images"] == 9
    assert found["run"].accuracy == pytest.approx(100 * 6 / 9)
    assert found["without"].accuracy == pytest.approx(100 * 4 / 9)
    assert found["difference"] == pytest.approx(-200 / 9)
    # the intervals that a report gives of the same answers
    assert found["run"].interval == pytest.approx(list(wilson(100 * 6 / 9, 9)))
    assert found["changed_interval"] == pytest.approx(list(wilson(100 * 5 / 9, 9)))
    paired = mcnemar("111011001", "110100001")
    assert paired is not None
    assert (paired.gained, paired.lost) == (1, 3)
    assert found["difference_interval"] == list(paired.interval)
    assert found["changed"] == pytest.approx(500 / 9)
    assert found["distance_by_tensor"] == {"w": 3.0, "b": 4.0}
    assert (found["distance"], found["moved"]) == (5.0, 5.0)
    said = " ".join(withdrawal_sentences(Withdrawal(client=1, party=None, same_draws=False, **found)))
    assert "With client 1: 66.67 % (" in said
    assert "Difference: -22.22 points" in said
    assert "55.56 % of the answers changed" in said
    assert "100.0 % as far apart as training moved them" in said
    assert "part of the difference is chance" in said


def test_runs_that_are_the_same_differ_by_nothing():
    one = answers([0] * 10, {"w": torch.ones(2)})
    found = answer_difference(one, one)
    assert (found["difference"], found["changed"], found["distance"], found["moved"]) == (0, 0, 0, None)
    assert found["difference_interval"][0] < 0 < found["difference_interval"][1]  # ten images do not prove it


# --- folders


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    finish(folder, settings("linear"))
    return folder


def leave(run, client, path):
    with RunFolder.create(path, without_client(RunFolder(run).experiment, client)) as folder:
        complete(folder, Silent())
    return folder


def test_both_folders_have_the_same_record_and_it_is_that_of_their_results(run, tmp_path):
    found = leave(run, 2, tmp_path / "left")
    for _ in range(2):  # measured again, it replaces what was measured
        measured = measure_withdrawal(RunFolder(run), found, 2, None, Silent())
    assert RunFolder(run).withdrawals == found.withdrawals == [Withdrawal.model_validate_json(measured.to_json())]
    assert measured.run.accuracy == pytest.approx(RunFolder(run).result.accuracy)
    assert measured.without.accuracy == pytest.approx(found.result.accuracy)
    one, two = (load(path / "model.safetensors") for path in (run, found.path))
    assert measured.distance == pytest.approx(
        float(torch.cat([(one[name] - two[name]).flatten() for name in one]).norm())
    )
    assert "Clients 2 have withdrawn" in " ".join(found.result.notes)
    check_comparable(RunFolder(run), found, 2)
    with pytest.raises(FedVLError, match="has withdrawn already"):
        without_client(found.experiment, 2)
    twice = without_client(found.experiment, 0)
    assert twice.federation.withdrawn == (0, 2)


def test_a_second_run_in_which_the_client_took_part_or_of_other_settings_is_refused(run, tmp_path):
    with pytest.raises(FedVLError, match="Client 3 took part in round 1 of"):
        check_comparable(RunFolder(run), RunFolder(run), 3)
    other = tmp_path / "other"
    other.mkdir()
    changed = without_client(RunFolder(run).experiment, 3).model_copy(update={"seed": 5})
    RunFolder(other).describe(changed)
    with pytest.raises(FedVLError, match="have another seed, so that their difference is not the client's"):
        check_comparable(RunFolder(run), RunFolder(other), 3)


def test_a_client_that_was_drawn_and_dropped_out_took_no_part(run, tmp_path):
    path = tmp_path / "other"
    path.mkdir()
    other = RunFolder(path)
    other.describe(RunFolder(run).experiment)
    other.append_round(record_of({"round": 1, "cohort": [0, 2, 3], "dropped": [3]}))
    other.append_round(record_of({"round": 2, "cohort": [0, 2], "dropped": []}))
    check_comparable(RunFolder(run), RunFolder(path), 3)
    other.append_round(record_of({"round": 3, "cohort": [0, 3], "dropped": [0]}))
    with pytest.raises(FedVLError, match="Client 3 took part in round 3 of"):
        check_comparable(RunFolder(run), RunFolder(path), 3)


def test_a_client_goes_by_number_or_by_the_name_of_its_party(run, tmp_path):
    assert find_client(RunFolder(run), "4") == (4, None)
    for name in ("5", "north", "-1", "99999999999", "²"):
        with pytest.raises(FedVLError, match=f"no client '{name}'; its clients are 0 to 4"):
            find_client(RunFolder(run), name)
    machines = tmp_path / "machines"
    machines.mkdir()
    RunFolder(machines).describe(with_withdrawn(RunFolder(run).experiment, ()))
    RunFolder(machines).write_federation(contents.Federation(federation="clinic", run="a"))
    RunFolder(machines).write_status(Status(parties=["north", "south"], connected=[]))
    assert find_client(RunFolder(machines), "south") == (1, "south")
    assert find_client(RunFolder(machines), "0") == (0, "north")
    with pytest.raises(FedVLError, match="no client 'west'; its parties are north, south"):
        find_client(RunFolder(machines), "west")


@pytest.mark.parametrize("content", ["[]", '{"withdrawals": [{"client": 1}]}', '{"withdrawals": {}}', "{"])
def test_a_damaged_record_is_one_sentence(run, content, tmp_path):
    (tmp_path / "withdrawals.json").write_text(content)
    with pytest.raises(FedVLError):
        _ = RunFolder(tmp_path).withdrawals
