"""Methods by name, of the package and of a user's file."""

import sys
from hashlib import sha256

import pytest

import fedvl
from fedvl.errors import FedVLError
from fedvl.evaluation.statistics import mcnemar
from fedvl.methods import (
    FOLDER,
    file_digest,
    load_file,
    load_method,
    load_packaged,
    method_names,
    method_summaries,
    presets_of,
)
from fedvl.methods.base import Method
from fedvl.runs.settings import resolve_experiment

SOUND = "from fedvl.methods.base import Method\nclass Mine(Method):\n    inputs = ('features',)\n"


def test_every_method_says_what_it_is():
    assert set(method_summaries()) == set(method_names())
    assert all(len(summary) > 20 for summary in method_summaries().values())


def test_names_are_those_of_the_files_that_define_a_method():
    defines = {path.stem for path in FOLDER.glob("*.py") if "(Options)" in path.read_text(encoding="utf-8")}
    names = method_names()
    assert names == sorted(names)
    assert defines <= {name.replace("-", "_") for name in names}
    assert not {"base", "roles", "mistakes", "show", "--init--"} & set(names)


def test_a_summary_is_the_first_line_of_the_modules_docstring():
    module = load_packaged("fed-mp")
    assert module.__name__ == "fedvl.methods.fed_mp"
    assert method_summaries()["fed-mp"] == (module.__doc__ or "").splitlines()[0]


def test_a_misspelt_name_gets_a_suggestion_and_another_the_list():
    with pytest.raises(FedVLError, match=r"^There is no method 'fedproxx'; did you mean 'fedprox'\?$"):
        load_method("fedproxx")
    with pytest.raises(FedVLError, match=r"^There is no method 'qqqq'; known are adapterfl, .*, zero-shot\.$"):
        load_method("qqqq")


def test_a_file_is_executed_once_per_content(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOUND)
    first = load_file(file)
    assert load_file(file) is first
    assert first.__name__ == f"fedvl_method_mine_{sha256(SOUND.encode()).hexdigest()[:16]}"
    file.write_text(f"{SOUND}\nMORE = 1\n")
    assert load_file(file).MORE == 1


def test_the_method_of_a_file_is_the_class_that_no_other_derives_from(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"{SOUND}class Better(Mine):\n    pass\n")
    found = load_method(str(file))
    assert issubclass(found, Method)
    assert found.__name__ == "Better"


@pytest.mark.parametrize(
    "code, count", [("x = 1", 0), ("from fedvl.methods.linear import Linear", 0), (f"{SOUND}class B(Method): ...", 2)]
)
def test_a_file_defines_one_method(code, count, tmp_path):
    """An imported method is not one that the file defines."""
    file = tmp_path / "mine.py"
    file.write_text(code)
    with pytest.raises(FedVLError, match=rf"mine\.py defines {count} subclasses of .*; it must define one\."):
        load_method(str(file))


def test_an_error_in_a_file_names_its_last_line_there_and_leaves_no_module(tmp_path):
    file = tmp_path / "faulty.py"
    file.write_text("def divide():\n    return 1 / 0\n\ndivide()\n")
    with pytest.raises(FedVLError) as error:
        load_method(str(file))
    said = "faulty.py cannot be loaded: ZeroDivisionError: division by zero (line 2: `return 1 / 0`)."
    assert str(error.value).endswith(said)
    assert not [name for name in sys.modules if name.startswith("fedvl_method_faulty_")]


def test_a_syntax_error_has_no_line_of_the_file_in_its_traceback(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def (:\n")
    with pytest.raises(FedVLError, match=r"cannot be loaded: SyntaxError: .*\)\.$"):
        load_method(str(file))


def test_a_digest_is_that_of_the_bytes(tmp_path):
    (tmp_path / "mine.py").write_bytes(b"x = 1\n")
    assert file_digest(tmp_path / "mine.py") == sha256(b"x = 1\n").hexdigest()
    with pytest.raises(FedVLError, match=r"There is no method file .*absent\.py; check the path"):
        file_digest(tmp_path / "absent.py")


# --- the preset `embedded`


@pytest.mark.parametrize("name", method_names())
def test_every_method_has_the_preset_embedded_which_changes_what_the_paper_has(name):
    paper, tuned = presets_of(name)["paper"], presets_of(name)["embedded"]
    assert presets_of(name)["paper"] == load_method(name).presets["paper"], "reading it changes no other"
    assert paper.keys() <= tuned.keys()
    experiment = resolve_experiment({"method": {"name": name, "preset": "embedded"}})
    assert experiment.model.name.startswith("fedvl-tiny")
    assert experiment.federation.rounds <= 20


def test_a_method_of_the_users_has_the_presets_of_its_file(tmp_path):
    (tmp_path / "mine.py").write_text(SOUND)
    assert set(presets_of(str(tmp_path / "mine.py"))) == {"paper"}


@pytest.mark.parametrize("name", ["adapterfl", "fst-cbdg"])
def test_methods_that_stay_at_zero_shot_by_their_papers_settings_rise_above_it_beyond_chance(name, tmp_path):
    seldom = {"evaluation.every": 10, "evaluation.examples": 0}
    result = fedvl.run(method=name, preset="embedded", out=tmp_path / "run", quiet=True, **seldom).figures
    test = mcnemar(result.zero_shot_right or "", result.right or "")
    assert test is not None
    assert test.gained > test.lost
    assert test.p < 0.001
