"""A finished run that is asked: as its own evaluation asked it, about other names, by other users; and damaged runs."""

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from helpers.finished import RUNS, asked_rows, finish, picture, png
from helpers.runs import prepare
from helpers.small import encoder_of

from fedvl.data.images import BadImage
from fedvl.errors import FedVLError
from fedvl.evaluation.predict import answer_all
from fedvl.methods.base import Task
from fedvl.methods.fedavg_nn import FedAvgNN, NetworkOptions
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment
from fedvl.serve.model import TrainedModel, User
from fedvl.tensors import save


def rows_of(run, prepared):
    """The prepared test of a run, image by image."""
    inputs = prepared.test.samples.inputs
    return [{form: tensor[row] for form, tensor in inputs.items()} for row in range(len(prepared.test.samples))]


def test_a_run_answers_its_own_test_as_it_did(fed_mp):
    prepared = prepare(RUNS["fed-mp"])
    user = fed_mp.user()
    rows = rows_of(fed_mp, prepared)
    said = [reply.ranked[0][0] for first in range(0, len(rows), 18) for reply in user.ask(rows[first : first + 18], 1)]
    right = [name == user.names[label] for name, label in zip(said, prepared.test.samples.labels.tolist(), strict=True)]
    assert 100 * np.mean(right) == pytest.approx(fed_mp.result.accuracy)
    method = fed_mp.user().conversation
    expected = answer_all(method.method, method.tensors, prepared.test.samples, 18)
    assert said == [user.names[c] for c in expected]


def test_images_are_encoded_as_in_the_cache(fed_mp):
    """The bytes of a file, decoded and encoded here, give the features that evaluation had."""
    prepared = prepare(RUNS["fed-mp"])
    rows = asked_rows(fed_mp.result)[:8]
    encoded = fed_mp.encode([fed_mp.encoder.preprocess(picture(row)) for row in rows])
    for form, expected in prepared.test.samples.inputs.items():
        torch.testing.assert_close(torch.stack([row[form] for row in encoded]), expected[:8], rtol=2e-3, atol=2e-3)


def test_ranks_shares_and_ties(fed_mp):
    user = fed_mp.user(["cat", "dog", "ship", "frog"])
    row = {form: torch.zeros(256) for form in ("embeddings", "features")}
    (reply,) = user.ask([row], 3)
    assert reply.ranked == reply.zero_shot == [("cat", 0.25), ("dog", 0.25), ("ship", 0.25)]
    assert reply.entropy == pytest.approx(np.log(4))
    assert reply.example_of is None


def test_each_user_gets_a_model_of_its_own_and_remembers_alone(fed_mp):
    rows = rows_of(fed_mp, prepare(RUNS["fed-mp"]))[:18]
    one, same, other = fed_mp.user(), fed_mp.user(), fed_mp.user(["boat", "jet"])
    assert sum(one.client_weights.values()) == pytest.approx(1)
    assert one.client_weights == same.client_weights != other.client_weights
    first = one.ask(rows, 4)
    assert any(reply.example_of for reply in first)
    assert one.ask(rows, 4) != first  # it has learnt from them
    assert same.ask(rows, 4) == first  # and nobody else has


def test_names_in_any_order_and_script(fed_mp):
    shuffled = fed_mp.user(fed_mp.class_names[::-1])
    assert shuffled.names == tuple(fed_mp.class_names)
    assert fed_mp.user(["猫", "кошка", "🐈"]).names == ("猫", "кошка", "🐈")
    for names, templates, sentence in (
        (["cat", "cat"], None, "given twice"),
        (["cat", " "], None, "is empty"),
        (["cat"], ["a photo"], "where the class name goes"),
    ):
        with pytest.raises(FedVLError, match=sentence):
            fed_mp.user(names, templates)


def test_templates_change_the_texts_but_not_the_names(fed_mp):
    plain, own = fed_mp.user(["cat", "dog"]), fed_mp.user(["cat", "dog"], ["{}", "a drawing of a {}"])
    first, second = (user.conversation.method.task.text_features for user in (plain, own))
    assert not torch.allclose(first, second, atol=1e-3)
    assert plain.names == own.names


def test_a_method_of_fixed_classes_says_so(folder_of, monkeypatch):
    run = TrainedModel(RunFolder(folder_of("linear")))
    assert not run.answers_new_classes
    assert run.user().names == run.user(run.class_names[::-1]).names == tuple(run.class_names)
    with pytest.raises(FedVLError, match=r"knows only the classes that it was trained on \(airplane, automobile"):
        run.user(["cat", "unicorn"])
    for count, told in ((20, r"name 19\), with"), (21, r"name 19, \.\.\.\), with")):
        with monkeypatch.context() as changed:
            changed.setattr(TrainedModel, "class_names", [f"name {number}" for number in range(count)])
            with pytest.raises(FedVLError, match=told):
                run.user(["cat"])
    with pytest.raises(FedVLError, match="have no model of their own"):
        run.user(client=0)


def test_a_clients_personal_model_answers_as_in_evaluation(folder_of):
    run = TrainedModel(RunFolder(folder_of("fedpp")))
    prepared = prepare(RUNS["fedpp"])
    rows = rows_of(run, prepared)
    for client, part in enumerate(prepared.test.parts):
        replies = run.user(client=client).ask([rows[row] for row in part.tolist()], 1)
        truth = [run.class_names[label] for label in prepared.test.samples.labels[part].tolist()]
        right = [reply.ranked[0][0] == name for reply, name in zip(replies, truth, strict=True)]
        assert 100 * np.mean(right) == pytest.approx(run.result.per_client_accuracy[client])
    shared = run.user().ask(rows[:20], 1)
    assert shared != run.user(client=0).ask(rows[:20], 1)
    assert [reply.ranked[0][0] for reply in shared] == [reply.zero_shot[0][0] for reply in shared]  # nothing is shared
    with pytest.raises(FedVLError, match="no private tensors of client 7; it has those of: 0, 1, 2"):
        run.user(client=7)


def test_damaged_and_unfinished_runs_are_refused_and_left_alone(folder_of, tmp_path):
    def copy(name, spoil):
        folder = tmp_path / name
        shutil.copytree(folder_of("fed-mp"), folder)
        spoil(folder)
        before = sorted((path, path.read_bytes()) for path in folder.rglob("*") if path.is_file())
        with pytest.raises(FedVLError) as refusal:
            TrainedModel(RunFolder(folder))
        assert sorted((path, path.read_bytes()) for path in folder.rglob("*") if path.is_file()) == before
        return str(refusal.value)

    def flip(file):
        def spoil(folder):
            content = bytearray((folder / file).read_bytes())
            content[-1] ^= 1
            (folder / file).write_bytes(content)

        return spoil

    def edit(**changes):
        def spoil(folder):
            result = json.loads((folder / "result.json").read_bytes())
            (folder / "result.json").write_text(json.dumps({**result, **changes}))

        return spoil

    assert "model.safetensors is damaged" in copy("model", flip("model.safetensors"))
    assert "kept.safetensors is damaged" in copy("kept", flip("kept.safetensors"))
    assert "is not finished" in copy("unfinished", lambda folder: (folder / "result.json").unlink())
    assert "cannot be read" in copy("cut", lambda folder: (folder / "result.json").write_text("{"))
    assert "not the one that this run was trained with" in copy("other", edit(model_fingerprint="0"))


def test_a_damaged_journal_is_refused_and_left_alone(folder_of, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(folder_of("fedpp"), folder)
    tensors = folder / "journal" / "000001.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\xff")
    with pytest.raises(FedVLError, match="is damaged"):
        TrainedModel(RunFolder(folder)).user(client=0)
    manifest = folder / "journal" / "000001.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"round": 1', b'"round": 2'))
    with pytest.raises(FedVLError, match="missing or damaged"):
        TrainedModel(RunFolder(folder)).user(client=0)
    assert manifest.exists()
    assert tensors.exists()


def test_a_network_that_only_clusters_cannot_be_asked(folder_of, tmp_path):
    """The folder of a run on pixels, without the hours that it would take."""

    def pretend(protocol):
        settings = {"method": {"name": "fedavg-nn", "width": 1}, "evaluation": {"protocol": protocol}}
        result = json.loads((folder_of("linear") / "result.json").read_bytes())
        task = Task(tuple(result["class_names"]), torch.zeros(10, 256), encoder_of(), 3, protocol=protocol)
        start = FedAvgNN(NetworkOptions(width=1), task).start(torch.Generator())
        folder = tmp_path / protocol
        folder.mkdir()
        result["files_sha256"] = {"model.safetensors": save(folder / "model.safetensors", start)}
        (folder / "config.toml").write_text(resolve_experiment(settings).to_toml())
        (folder / "result.json").write_text(json.dumps(result))
        return folder

    with pytest.raises(FedVLError, match="clusters without names"):
        TrainedModel(RunFolder(pretend("open")))
    run = TrainedModel(RunFolder(pretend("closed")))
    assert not run.answers_new_classes
    (row,) = run.encode([torch.zeros(3, 64, 64, dtype=torch.uint8)])
    assert not isinstance(row, BadImage)
    assert len(run.user().ask([row], 10)[0].ranked) == 10
    with pytest.raises(FedVLError, match="knows only"):
        run.user(["cat", "unicorn"])


def test_shares_of_a_run_without_labels_are_calibrated_on_its_training_images(tmp_path):
    """FST-CBDG's scores are cosines, whose softmax is nearly even; its shares are as sure as the pretrained model's."""
    settings = {
        "method": {"name": "fst-cbdg"},
        "data": {"clients": 3, "shots": 20},
        "federation": {"rounds": 1, "threads": 1},
        "evaluation": {"batch_size": 37},  # the temperature is fitted to several batches
    }
    result = finish(tmp_path / "run", settings)
    run = TrainedModel(RunFolder(tmp_path / "run"))
    assert run.temperature == result.temperature
    assert result.temperature_from == "the pretrained model's shares of 2,000 training images"
    assert "uncalibrated_ece" not in result.model_fields_set  # scores that are no shares have no error
    assert result.ece is not None
    encoded = [row for row in run.encode([run.read(png(row)) for row in range(0, 400, 20)]) if isinstance(row, dict)]
    replies = run.user().ask(encoded, 10)
    first, pretrained = (
        np.mean([names[0][1] for names in kind])
        for kind in zip(*((r.ranked, r.zero_shot) for r in replies), strict=True)
    )
    assert first == pytest.approx(pretrained, abs=0.1)
    assert first > 0.3
    plain = User(run.user().conversation.method, run.user().conversation.tensors, {}).ask(encoded, 10)
    assert max(reply.ranked[0][1] for reply in plain) < 0.15
    assert [r.ranked[0][0] for r in plain] == [r.ranked[0][0] for r in replies]
    for reply in replies:
        assert reply.entropy == pytest.approx(-sum(share * np.log(share) for _, share in reply.ranked), abs=1e-4)


def test_names_above_their_thresholds_are_told_for_the_classes_of_the_run(folder_of, tmp_path):
    path = shutil.copytree(folder_of("linear"), tmp_path / "run")
    names = RunFolder(path).result.class_names
    run = TrainedModel(RunFolder(path))
    image: Any = run.encode([run.encoder.preprocess(picture(0))])
    shares = dict(run.user().ask(image, len(names))[0].ranked)
    likeliest, second = sorted(shares, key=shares.__getitem__)[:-3:-1]
    limits = dict.fromkeys(names, 1.0) | {likeliest: shares[likeliest] + 1e-4, second: shares[second] - 1e-4}
    (path / "thresholds.json").write_text(json.dumps({"chosen": "by hand", "shares": limits}))
    (reply,) = TrainedModel(RunFolder(path)).user().ask(image, 1)
    assert reply.above == [second]
    (path / "thresholds.json").unlink()
    assert TrainedModel(RunFolder(path)).user().ask(image, 1)[0].above is None


def test_other_names_have_no_thresholds(fed_mp):
    assert fed_mp.user().thresholds is not None
    assert fed_mp.user(["cat", "dog"]).thresholds is None
