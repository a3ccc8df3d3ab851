"""What depends on training images in a private run's files is on the list of what it releases, and rightly covered."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
from helpers.sensitivity import CHANGES, Setting, pair, prepared, without_noise
from helpers.small import small_method

from fedvl.display import Silent
from fedvl.federation.released import released
from fedvl.runs import experiment
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment

SETTINGS = [
    Setting("linear", "client"),
    Setting("linear", "record"),
    Setting("linear", "client", secure=True),
    Setting("linear", "record", secure=True),
    Setting("linear", "client", several=True),
    Setting("linear", "record", data=(("labels", "zero-shot"),)),
    Setting("linear", "client", data=(("long_tail", 2.0),)),
    Setting("fst-cbdg", "client"),
    Setting("promptfolio", "client", "personal"),
    Setting("promptfolio", "record", "personal"),
    Setting("promptfl", "client", "base-to-new"),
    Setting("promptfl", "record", "open"),
    Setting("fed-intra", "client", "missing"),
]


def without_images(found, client):
    """The client takes part and has nothing to train on."""
    rows = [own[:0] if number == client else own for number, own in enumerate(found.training.rows)]
    counts = found.training.counts.copy()
    counts[client] = 0
    return replace(found, training=replace(found.training, rows=rows, counts=counts))


def fields(found, folder, monkeypatch, numbers):
    """Run to the end; return each field of result.json and of the rounds' records, with the noise or without."""
    run = RunFolder(folder)
    folder.mkdir()
    run.describe(found.experiment)
    engine = experiment.local_engine(found)
    if numbers is not None:
        hidden, _ = without_noise(engine, found.experiment, numbers)
        monkeypatch.setattr(experiment, "privacy_of", lambda *_: hidden)
    result = experiment.run_rounds(run, found, engine, Silent())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return dict([*flat(json.loads(result.to_json())), *flat({"record": records})])


def flat(value, name=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else key)
    elif name == "record":
        for number, record in enumerate(value):
            yield from ((f"record.{key}@{number}", inner) for key, inner in flat(record))
    else:
        yield name, value


def of_list(listed, name, states):
    key = name.partition("@")[0]
    return any(fnmatchcase(key, pattern) for item in listed if item.state in states for pattern in item.keys)


@pytest.mark.parametrize(
    ("setting", "whole"),
    [(setting, whole) for setting in SETTINGS for whole in {False, setting.unit == "client"}],
    ids=lambda value: value.words if isinstance(value, Setting) else ("an image", "a client")[value],
)
def test_every_field_that_depends_on_training_images_is_listed(setting, whole, tmp_path, monkeypatch):
    """With the same noise, fields that differ are listed; with the same noisy sums, as not covered."""
    neighbours = pair(setting.protocol, setting.several, setting.secure, CHANGES[0])
    both = [prepared(setting, extra, neighbours.absent) for extra in (neighbours.extra, None)]
    if whole:
        both[1] = without_images(both[0], neighbours.client)
    listed = released(both[0].method, both[0].experiment, simulated=True)
    numbers: dict[object, object] = {}
    for name, states, given in (("noisy", ("covered", "not covered"), None), ("same", ("not covered",), numbers)):
        one, two = (
            fields(found, tmp_path / f"{name}{number}", monkeypatch, given) for number, found in enumerate(both)
        )
        different = [field for field in one.keys() | two.keys() if one.get(field) != two.get(field)]
        assert "partition_counts" in different
        assert [field for field in different if not of_list(listed, field, states)] == []
        for found in (one, two):
            told = {field: value for field, value in found.items() if of_list(listed, field, ("withheld",))}
            assert told
            assert all(value in (None, [None, None]) for value in told.values()), told


def test_the_list_is_of_the_run_it_describes():
    method = small_method("linear")

    def names(unit, simulated=True, **sections):
        settings = resolve_experiment({"privacy": {"unit": unit, **sections.pop("privacy", {})}, **sections})
        return {item.name: item for item in released(method, settings, simulated)}

    assert names("none") == {}
    assert "class counts, names of images" in names("client")
    assert "class counts, names of images" not in names("client", simulated=False)
    assert "numbers of images" not in names("client", simulated=False)
    assert "public" in names("record", simulated=False)["numbers of images"].why
    assert "how many bytes" in names("record", simulated=False)["who takes part"].why
    assert "one without images" in names("client")["who takes part"].why
    assert "one without images" not in names("client", federation={"secure_sum": True})["who takes part"].why
    assert "public subspace" in names("client", privacy={"subspace": 4})
    assert "figures of newcomers" in names("client", data={"newcomers": 2})
    method = small_method("ridge")
    assert names("record")["test figures"].state == "covered"
    method.task = replace(method.task, protocol="personal")  # what a client solves for itself has no noise
    assert names("record", evaluation={"protocol": "personal"})["test figures"].state == "not covered"
    assert names("record")["tensors that clients keep"].state == "not covered"
