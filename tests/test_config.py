import tomllib
from pathlib import Path

import pytest
from helpers.declarations import limits_of, plain
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from fedvl.config import (
    Experiment,
    PrivacyConfig,
    TrainingConfig,
    field_help,
    gather_settings,
    parse_assignment,
    read_toml,
    resolve,
    write_toml,
)
from fedvl.errors import FedVLError
from fedvl.runs.settings import resolve_experiment


def test_later_layers_win_and_sections_merge():
    experiment = resolve([{"training": {"learning_rate": 1.0, "momentum": 0.5}}, {"training": {"learning_rate": 2.0}}])
    assert (experiment.training.learning_rate, experiment.training.momentum) == (2.0, 0.5)


def test_a_preset_lies_under_the_users_settings_and_over_the_defaults():
    plain = resolve_experiment({"method": {"name": "fedclip"}})
    assert (plain.training.optimiser, plain.training.learning_rate, plain.training.betas) == ("adam", 5e-5, (0.9, 0.98))
    mine = resolve_experiment({"method": {"name": "fedclip"}, "training": {"learning_rate": 0.1}})
    assert (mine.training.optimiser, mine.training.learning_rate) == ("adam", 0.1)


def test_what_is_written_resolves_to_the_same_experiment():
    experiment = resolve_experiment(
        {"method": {"name": "fedprox", "mu": 0.3}, "data": {"dataset": 'odd "name" \\ ü', "shots": 4}, "seed": 9}
    )
    again = resolve_experiment(tomllib.loads(experiment.to_toml()))
    assert again == experiment
    assert again.method.options["mu"] == 0.3


names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
)


@given(st.dictionaries(names, st.one_of(scalars, st.dictionaries(names, scalars, max_size=3)), max_size=4))
def test_any_settings_survive_toml(settings):
    assert tomllib.loads(write_toml(settings)) == settings


@pytest.mark.parametrize(
    "text, expected",
    [
        ("seed=3", {"seed": 3}),
        ("training.learning_rate=0.1", {"training": {"learning_rate": 0.1}}),
        ("federation.one_by_one=true", {"federation": {"one_by_one": True}}),
        ("data.dataset=my/folder", {"data": {"dataset": "my/folder"}}),
        ("training.betas=[0.5, 0.6]", {"training": {"betas": [0.5, 0.6]}}),
        ("data.dataset=a=b", {"data": {"dataset": "a=b"}}),
    ],
)
def test_assignments_read_values_as_toml_or_text(text, expected):
    assert parse_assignment(text) == expected


@pytest.mark.parametrize("text", ["seed", "=3", "a.b.c=1", "a..b=1", "1x=2"])
def test_malformed_assignments_are_explained(text):
    with pytest.raises(FedVLError, match="--set takes"):
        parse_assignment(text)


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"training": {"learning_rte": 1}},
            "no setting 'training.learning_rte'; did you mean 'training.learning_rate'",
        ),
        ({"training": {"learning_rate": -1}}, "'training.learning_rate' is -1, but it must be greater than 0"),
        ({"federation": {"rounds": "many"}}, "'federation.rounds' is 'many', but"),
        ({"method": {"name": "fedprox", "nu": 1}}, "no setting 'method.nu'; did you mean 'method.mu'"),
        ({"method": {"name": "fedprox", "mu": "x"}}, "'method.mu' is 'x'"),
        ({"method": {"name": "fedporx"}}, "no method 'fedporx'; did you mean 'fedprox'"),
        ({"method": {"name": "linear", "preset": "mine"}}, "no preset 'mine'"),
    ],
)
def test_wrong_settings_are_told_in_a_sentence(settings, message):
    with pytest.raises(FedVLError, match=message):
        resolve_experiment(settings)


def test_files_that_are_not_toml(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("a = = 1")
    with pytest.raises(FedVLError, match="not valid TOML"):
        read_toml(path)
    with pytest.raises(FedVLError, match="no experiment file"):
        read_toml(tmp_path / "none.toml")


def test_every_setting_has_a_description_that_is_a_sentence():
    fields = {f"Experiment.{name}": field for name, field in Experiment.model_fields.items()}
    for section in list(fields.values()):
        if isinstance(section.annotation, type) and issubclass(section.annotation, BaseModel):
            model = section.annotation
            fields |= {f"{model.__name__}.{name}": field for name, field in model.model_fields.items()}
    assert len(fields) > 70
    assert [name for name, field in fields.items() if not (field.description or "").endswith(".")] == []


def test_the_help_of_a_setting_has_its_choices_on_one_line():
    assert field_help(TrainingConfig.model_fields["optimiser"]) == (
        "One of sgd, adam, adamw. Optimiser of the clients' local training."
    )
    assert "\n" not in field_help(PrivacyConfig.model_fields["clip"])


def test_defaults_are_complete():
    assert Experiment() == resolve([{}])


def test_defaults_and_limits_are_those_of_the_table():
    sections = {
        name: kind
        for name, field in Experiment.model_fields.items()
        if isinstance(kind := field.annotation, type) and issubclass(kind, BaseModel)
    }
    found = {"experiment": limits_of(Experiment)} | {name: limits_of(kind) for name, kind in sections.items()}
    defaults = {name: plain(kind().model_dump(exclude_none=True)) for name, kind in sections.items()}
    table = tomllib.loads(Path(__file__).with_name("settings.toml").read_text(encoding="utf-8"))
    assert {"limits": found, "defaults": defaults} == table


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("federation", "threads", 257),  # torch ends the process with 100,000
        ("federation", "rounds", 10**6),
        ("federation", "deadline", float("inf")),
        ("data", "clients", 10_000_001),
        ("data", "shots", 10**30),
        ("training", "learning_rate", float("inf")),
        ("training", "weight_decay", float("nan")),
        ("training", "betas", (0.9, float("nan"))),
        ("training", "local_epochs", 10**12),
        ("evaluation", "examples", 10**12),
        ("data", "dataset", "x" * 5000),
    ],
)
def test_settings_have_an_end(section, key, value):
    with pytest.raises(FedVLError, match=rf"^Setting '{section}.{key}") as error:
        resolve([{section: {key: value}}])
    assert len(str(error.value)) < 400


def test_options_of_a_method_are_finite_too():
    with pytest.raises(FedVLError, match=r"^Setting 'method.mu' is inf"):
        resolve_experiment({"method": {"name": "fedprox", "mu": float("inf")}})


def test_a_key_of_many_parts_is_refused_before_it_is_parsed(tmp_path):
    """The parser's time grows with the square of them: a megabyte would take hours."""
    (tmp_path / "a.toml").write_text("a" + ".a" * 400_000 + " = 1\n")
    with pytest.raises(FedVLError, match="more than 200 dots"):
        read_toml(tmp_path / "a.toml")


def test_privacy_is_a_section_in_one_flag():
    assert gather_settings(None, {"privacy": "client:eps=3"}) == {"privacy": {"unit": "client", "epsilon": 3.0}}
    found = gather_settings(None, {"privacy": "record:eps=8,delta=1e-6,clip=0.5"}, ["privacy.clip=2.0"])
    assert found == {"privacy": {"unit": "record", "epsilon": 8.0, "delta": 1e-6, "clip": 2.0}}
    assert gather_settings(None, {"privacy": "none"}) == {"privacy": {"unit": "none"}}
    assert resolve([found]).privacy.unit == "record"


@pytest.mark.parametrize(
    "text", ["client", "record:", "image:eps=3", "client:eps=three", "client:epsilon=3", "none:eps=3", ""]
)
def test_privacy_that_is_none_is_told_with_an_example(text):
    with pytest.raises(FedVLError, match=r"--privacy takes client or record and an epsilon, for example client:eps=3"):
        gather_settings(None, {"privacy": text})


@pytest.mark.parametrize(
    "flag",
    [
        "client:eps=0",
        "client:eps=-1",
        "client:eps=1000",
        "client:eps=3,delta=2",
        "record:eps=3,clip=0",
        "client:eps=nan",
    ],
)
def test_budgets_that_are_none_are_refused(flag):
    with pytest.raises(FedVLError, match=r"Setting 'privacy\.(epsilon|delta|clip)' is"):
        resolve([gather_settings(None, {"privacy": flag})])


def test_a_learning_rate_never_grows_by_its_schedule():
    resolve_experiment({"training": {"schedule": "step", "step_factor": 1.0}})
    with pytest.raises(FedVLError, match="step_factor"):
        resolve_experiment({"training": {"schedule": "step", "step_factor": 1.5}})
