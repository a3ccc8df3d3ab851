"""From settings to an experiment and back: what wins, what may change between rounds, and the shortest command."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedvl.cli import app
from fedvl.config import Experiment, FederationConfig, PrivacyConfig, gather_settings, overlay
from fedvl.errors import FedVLError
from fedvl.files import file_sha256
from fedvl.methods import load_method, method_names
from fedvl.runs.settings import command_for, options_for_dataset, resolve_experiment, resume_key

# --- resolve_experiment


def test_layers_lie_over_each_other_defaults_preset_dataset_user():
    plain = resolve_experiment({"method": {"name": "cachefl"}})
    preset = load_method("cachefl").presets["paper"]
    for section, part in preset.items():
        for key, value in part.items():
            assert getattr(getattr(plain, section), key) == value
    assert plain.federation.rounds == preset.get("federation", {}).get("rounds", Experiment().federation.rounds)
    mine = resolve_experiment({"method": {"name": "cachefl"}, "training": {"learning_rate": 7.0}})
    assert mine.training.learning_rate == 7.0
    assert mine.training.model_copy(update={"learning_rate": plain.training.learning_rate}) == plain.training


@pytest.mark.parametrize("dataset", ["flowers102", "somewhere/flowers102.parquet"])  # a file goes by its name
def test_a_dataset_sets_what_the_methods_paper_sets_for_it_and_the_user_wins(dataset):
    of_paper = {"alpha": 10.0, "beta": 1.0}
    of_cpl = {"cpl_alpha": 0.6, "cpl_beta": 0.99}
    assert options_for_dataset("cachefl", dataset) == {"method": of_paper, "data": of_cpl}
    found = resolve_experiment({"method": {"name": "cachefl"}, "data": {"dataset": dataset}})
    assert {key: found.method.options[key] for key in of_paper} == of_paper
    assert resolve_experiment({"method": {"name": "cachefl"}}).method.options["alpha"] != 10.0
    mine = resolve_experiment({"method": {"name": "cachefl", "alpha": 2.5}, "data": {"dataset": dataset}})
    assert (mine.method.options["alpha"], mine.method.options["beta"]) == (2.5, 1.0)


def test_a_dataset_of_ones_own_sets_nothing():
    assert options_for_dataset("cachefl", "photos/") == {}
    assert options_for_dataset("linear", "ucf101") == {"method": {}, "data": {}}


@pytest.mark.parametrize("name", method_names())
def test_every_option_of_a_method_is_written_out_and_resolves_to_itself(name):
    for preset in load_method(name).presets:
        experiment = resolve_experiment({"method": {"name": name, "preset": preset}})
        written = experiment.model_dump(mode="json", exclude_none=True)
        assert resolve_experiment(written) == experiment
        needed = {
            key for key, field in load_method(name).options_type.model_fields.items() if field.default is not None
        }
        assert needed <= experiment.method.options.keys()


def test_what_was_given_is_not_changed():
    given_settings: dict[str, Any] = {"method": {"name": "fedprox"}, "data": {"clients": 3}}
    before = json.dumps(given_settings)
    resolve_experiment(given_settings)
    assert json.dumps(given_settings) == before


MINE = "from fedvl.methods.linear import Linear\n\n\nclass Mine(Linear):\n    pass\n"


def test_a_file_is_noted_by_its_hash_and_a_changed_one_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    experiment = resolve_experiment({"method": {"name": str(file)}})
    assert experiment.method.sha256 == file_sha256(file)
    assert experiment.method.label == "mine"
    assert resolve_experiment(experiment.model_dump(mode="json", exclude_none=True)) == experiment
    file.write_text(MINE + "# a second thought\n")
    with pytest.raises(FedVLError, match="has changed since the run began; restore it, or start a new run") as error:
        resolve_experiment(experiment.model_dump(mode="json", exclude_none=True))
    assert len(str(error.value).splitlines()) == 1


# --- resume_key


KEY = resume_key(resolve_experiment({}))
MAY_CHANGE: list[dict[str, Any]] = [
    {"device": "cpu"},
    {"data": {"root": "/elsewhere"}},
    {"data": {"dataset": "/moved/cifar10-mini"}},
    {"model": {"name": "/moved/fedvl-tiny"}},
    {"federation": {"rounds": 99}},
    {"evaluation": {"every": 5}},
]
MAY_NOT: list[dict[str, Any]] = [
    {"seed": 1},
    {"method": {"name": "fedprox"}},
    {"method": {"initial": "zeros"}},
    {"data": {"dataset": "emoji-mini"}},
    {"data": {"clients": 11}},
    {"data": {"partition": "iid"}},
    {"model": {"name": "fedvl-tiny-vilt"}},
    {"training": {"learning_rate": 0.011}},
    {"evaluation": {"protocol": "personal"}},
    {"evaluation": {"validation": 0.2}},
]
# of every setting of a federation, a value that is not the default
FEDERATION: dict[str, Any] = {
    "rounds": 99,
    "per_round": 5,
    "dropout": 0.1,
    "quorum": 2,
    "attempts": 4,
    "patience": 3,
    "withdrawn": [1],
    "drift": True,
    "chunk": 2,
    "sequential": True,
    "one_step": True,
    "one_by_one": True,
    "threads": 1,
    "max_update_norm": 1e3,
    "max_norm_ratio": 5.0,
    "max_examples": 1e5,
    "robust": "median",
    "root_images": 99,
    "attack": "scaled:0.3",
    "secure_sum": True,
    "least_clients": 4,
    "sum_threshold": 0.75,
    "deadline": 10.0,
    "max_message_bytes": 2**20,
}
STAY = {"rounds", "quorum", "attempts", "patience", "drift", "deadline", "max_message_bytes"}
# of differential privacy, beside a budget for clients
PRIVACY: dict[str, Any] = {
    "unit": "record",
    "epsilon": 3.0,
    "delta": 1e-6,
    "clip": 0.5,
    "subspace": 16,
    "images": 2000,
    "public": "emoji-mini",
}


@pytest.mark.parametrize("change", MAY_CHANGE, ids=str)
def test_a_run_may_go_on_though_this_has_changed(change):
    changed = resolve_experiment(change)
    assert changed != resolve_experiment({}), "else nothing was changed"
    assert resume_key(changed) == KEY


@pytest.mark.parametrize("change", MAY_NOT, ids=str)
def test_a_run_may_not_go_on_if_this_has_changed(change):
    assert resume_key(resolve_experiment(change)) != KEY


def test_every_setting_of_a_federation_and_of_privacy_is_looked_at_here():
    assert FEDERATION.keys() == FederationConfig.model_fields.keys()
    assert PRIVACY.keys() == PrivacyConfig.model_fields.keys()


@pytest.mark.parametrize("name", FEDERATION)
def test_a_run_goes_on_with_another_setting_of_the_federation_only_if_its_rounds_would_be_the_same(name):
    changed = resolve_experiment({"federation": {name: FEDERATION[name]}})
    assert changed != resolve_experiment({}), "else nothing was changed"
    assert (resume_key(changed) == KEY) == (name in STAY)


@pytest.mark.parametrize("name", PRIVACY)
def test_a_private_run_does_not_go_on_with_another_budget(name):
    private = {"unit": "client"}
    kept = resume_key(resolve_experiment({"privacy": private}))
    assert kept != KEY
    assert resume_key(resolve_experiment({"privacy": {**private, name: PRIVACY[name]}})) != kept
    if name != "unit":  # without a unit there is no noise
        assert resume_key(resolve_experiment({"privacy": {name: PRIVACY[name]}})) == KEY


def test_rounds_count_where_the_learning_rate_depends_on_them_and_evaluations_where_they_choose_the_round():
    keys = [
        resume_key(resolve_experiment({"training": {"schedule": "cosine"}, "federation": {"rounds": rounds}}))
        for rounds in (10, 99)
    ]
    assert keys[0] != keys[1]
    keys = [resume_key(resolve_experiment({"evaluation": {"validation": 0.2, "every": every}})) for every in (1, 5)]
    assert keys[0] != keys[1]


def test_a_method_in_a_file_may_move_but_not_change(tmp_path):
    keys = []
    for folder, text in (("a", MINE), ("b", MINE), ("c", MINE + "# another thought\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(text)
        keys.append(resume_key(resolve_experiment({"method": {"name": str(tmp_path / folder / "mine.py")}})))
    assert keys[0] == keys[1] != keys[2]


# --- command_for


def parsed(command: str) -> Experiment:
    """What `fedvl run` makes of a command: flags, and over them --set."""
    program, run, *words = shlex.split(command)
    assert (program, run) == ("fedvl", "run")
    flags: dict[str, Any] = {}
    assignments = []
    for flag, value in zip(words[::2], words[1::2], strict=True):
        if flag == "--set":
            assignments.append(value)
        else:
            flags[flag.removeprefix("--")] = int(value) if flag == "--seed" else value
    return resolve_experiment(gather_settings(None, flags, assignments))


positive = st.floats(1e-6, 10)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**31),
    "device": st.sampled_from(["auto", "cpu", "cuda:1"]),
    "data.dataset": st.one_of(names, st.sampled_from(["emoji-mini", "flowers102", "a b/flowers102.csv", "3", "true"])),
    "data.root": names,
    "data.partition": st.sampled_from(["iid", "dirichlet:0.1", "shards:2"]),
    "data.clients": st.integers(1, 500),
    "data.shots": st.integers(1, 99),
    "data.missing": st.sampled_from(["text:0.5", "both:0.7"]),
    "data.labels": st.sampled_from(["true", "cps"]),
    "model.name": names,
    "training.optimiser": st.sampled_from(["sgd", "adam", "adamw"]),
    "training.learning_rate": positive,
    "training.betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)).map(list),
    "federation.rounds": st.integers(0, 1000),
    "federation.per_round": st.integers(1, 50),
    "federation.one_by_one": st.booleans(),
    "federation.max_update_norm": st.floats(1e-300, 1e300),
    "evaluation.protocol": st.sampled_from(["closed", "open", "personal"]),
    "evaluation.examples": st.integers(0, 9),
}
OPTIONS: dict[
    str, dict[str, st.SearchStrategy[Any]]
] = {  # of some methods: one with choices, one with switches, and one that datasets set options of
    "cachefl": {"method.alpha": positive, "method.beta": positive},
    "linear": {"method.initial": st.sampled_from(["text", "zeros"]), "method.scale": positive},
    "fedprox": {"method.mu": positive},
    "fst-cbdg": {
        "method.gamma": st.floats(0, 1),
        "method.estimate_sigma": st.booleans(),
        "method.beta": st.floats(0, 0.99),
    },
    "fedclip": {},
    "fed-prime": {},
    "promptfl": {},
}


@st.composite
def experiments(draw):
    """Any experiment that a user may describe."""
    name = draw(st.sampled_from(sorted(OPTIONS)))
    preset = draw(st.sampled_from(sorted(load_method(name).presets)))
    described: dict[str, Any] = {"method": {"name": name, "preset": preset}}
    possible = {**SETTINGS, **OPTIONS[name]}
    for key in draw(st.lists(st.sampled_from(sorted(possible)), unique=True, max_size=8)):
        section, _, rest = key.partition(".")
        value = draw(possible[key])
        overlay(described, {section: {rest: value}} if rest else {section: value})
    return resolve_experiment(described)


@settings(max_examples=300, deadline=None)
@given(experiments())
def test_the_command_of_any_experiment_gives_it_again(experiment):
    assert parsed(command_for(experiment)) == experiment


@settings(max_examples=60, deadline=None)
@given(experiments())
def test_no_word_of_the_command_is_needless(experiment):
    """Each --set that is left out gives another experiment."""
    words = shlex.split(command_for(experiment))
    for index, word in enumerate(words):
        if word.startswith("--") and word not in ("--method", "--preset"):
            assert parsed(shlex.join(words[:index] + words[index + 2 :])) != experiment, words[index + 1]


@pytest.mark.parametrize(
    ("described", "command"),
    [
        ({}, "fedvl run --method linear"),
        ({"seed": 3}, "fedvl run --method linear --seed 3"),
        ({"method": {"name": "fedclip"}}, "fedvl run --method fedclip"),
        ({"data": {"clients": 10}}, "fedvl run --method linear"),
        ({"data": {"clients": 5, "shots": 4}}, "fedvl run --method linear --set data.clients=5 --set data.shots=4"),
        (
            {"data": {"dataset": "my photos"}, "method": {"name": "fedprox", "mu": 0.5}},
            "fedvl run --method fedprox --set method.mu=0.5 --set 'data.dataset=\"my photos\"'",
        ),
    ],
)
def test_the_command_says_only_what_differs(described, command):
    assert command_for(resolve_experiment(described)) == command


def test_the_command_line_reads_the_command_as_this_test_does(tmp_path, monkeypatch):
    """The real one, up to the folder of the run."""
    monkeypatch.chdir(tmp_path)
    described = {"seed": 4, "method": {"name": "fedprox", "mu": 0.3}, "data": {"dataset": "a b", "shots": 3}}
    experiment = resolve_experiment(described)
    asked: list[Experiment] = []

    def create(out, wanted):
        asked.append(wanted)
        raise FedVLError("enough.")

    monkeypatch.setattr("fedvl.runs.folder.RunFolder.create", create)
    ended = CliRunner().invoke(app, shlex.split(command_for(experiment))[1:])
    assert str(ended.exception) == "enough."
    assert asked == [experiment] == [parsed(command_for(experiment))]
    assert list(Path().iterdir()) == []


# --- images of one's own


def test_images_of_ones_own_are_one_client_unless_clients_are_asked_for(tmp_path):
    (tmp_path / "photos").mkdir()
    own = {"dataset": str(tmp_path / "photos")}

    def shared(data, **sections):
        found = resolve_experiment({"data": data, **sections})
        return found.data.clients, found.data.partition

    assert shared(own) == (1, "iid")
    assert shared({**own, "clients": 5}) == (5, "dirichlet:0.5")
    assert shared({**own, "partition": "shards:2"}) == (10, "shards:2")
    assert shared(own, evaluation={"protocol": "personal"}) == (10, "dirichlet:0.5")
    assert shared(own, federation={"secure_sum": True}) == (10, "dirichlet:0.5")
    assert shared(own, federation={"per_round": 3}) == (10, "dirichlet:0.5")
    assert shared({"dataset": "cifar10-mini"}) == (10, "dirichlet:0.5")
    experiment = resolve_experiment({"data": own})
    assert "data." in command_for(experiment) and "clients" not in command_for(experiment)  # noqa: PT018


def test_an_option_outside_its_limits_is_one_sentence_with_its_name():
    with pytest.raises(FedVLError, match=r"method\.server_rate"):
        resolve_experiment({"method": {"name": "scaffold", "server_rate": -1.0}})
