"""A method in a file of the user's own: the worked example of the documentation, as a user would follow it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedvl.comparisons.grid import Case
from fedvl.comparisons.measures import MeasuredRun
from fedvl.comparisons.run import perform_case
from fedvl.data.sources import Opener
from fedvl.display import GridDisplay, Silent, TerminalDisplay
from fedvl.errors import FedVLError
from fedvl.files import file_sha256
from fedvl.methods import load_method
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment

PAGE = Path(__file__).parents[2] / "docs" / "add-a-method.md"
SMALL = {"federation": {"rounds": 2}, "data": {"clients": 2, "partition": "iid"}}


@pytest.fixture(scope="module")
def opener() -> Opener:
    return Opener.once()


@pytest.fixture
def quiet() -> Iterator[GridDisplay]:
    with TerminalDisplay(quiet=True) as display:
        yield GridDisplay(display)


@pytest.fixture
def examples(tmp_path: Path) -> dict[str, Path]:
    """The files of the page, under the names that it gives them."""
    found = re.findall(
        r"Write this as `(\w+\.py)`:\n\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    for name, code in found:
        (tmp_path / name).write_text(code, encoding="utf-8")
    return {name: tmp_path / name for name, _ in found}


@pytest.fixture
def mine(examples: dict[str, Path]) -> Path:
    return examples["mine.py"]


def described(mine: Path, **options: float) -> dict:
    return {"method": {"name": str(mine), **options}, **SMALL}


def test_the_worked_example_runs_and_learns(mine: Path, tmp_path: Path, opener: Opener, quiet: GridDisplay) -> None:
    folder, _ = perform_case(Case("mine", "", 0, "accuracy", described(mine)), tmp_path / "runs", quiet, opener)
    result = folder.result
    assert result.method == "mine"
    assert result.method_sha256 == file_sha256(mine) == file_sha256(folder.path / "mine.py")
    assert result.accuracy > result.zero_shot_accuracy
    assert result.per_round_loss[1] < result.per_round_loss[0]


def test_the_smallest_method_runs_and_learns(
    examples: dict[str, Path], tmp_path: Path, opener: Opener, quiet: GridDisplay
) -> None:
    case = Case("smallest", "", 0, "accuracy", described(examples["smallest.py"]))
    folder, _ = perform_case(case, tmp_path / "runs", quiet, opener)
    result = folder.result
    assert result.accuracy > result.zero_shot_accuracy


def test_its_option_does_what_it_says(mine: Path, tmp_path: Path, opener: Opener, quiet: GridDisplay) -> None:
    """The head ends nearer to the texts, where it began, under a stronger pull."""
    moved = {}
    for pull in (0.0, 10.0):
        case = Case("mine", "", 0, "accuracy", described(mine, pull=pull))
        folder, _ = perform_case(case, tmp_path / "runs", quiet, opener)
        run = MeasuredRun(folder, opener).reopened
        moved[pull] = float((run.shared["weight"] - run.prepared.method.task.text_features).norm())
    assert 0 < moved[10.0] < moved[0.0]


def test_resume_uses_the_copy_of_the_run(mine: Path, tmp_path: Path, opener: Opener) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    RunFolder(folder).describe(resolve_experiment(described(mine)))
    mine.unlink()
    with pytest.raises(FedVLError, match="say --trust-method"):
        complete(RunFolder(folder), Silent(), opener)
    assert complete(RunFolder(folder, trust_method=True), Silent(), opener).rounds == 2


def test_a_changed_copy_is_refused(mine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    RunFolder(folder).describe(resolve_experiment(described(mine)))
    with (folder / "mine.py").open("a", encoding="utf-8") as file:
        file.write("# another thought\n")
    with pytest.raises(FedVLError, match="has changed since the run began"):
        _ = RunFolder(folder, trust_method=True).experiment


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x = 1\n", "defines 0 subclasses"),
        ("from fedvl.methods.base import Method\nclass A(Method): ...\nclass B(Method): ...\n", "defines 2 subclasses"),
        ("import nothing_of_this_name\n", "cannot be loaded: ModuleNotFoundError"),
        ("def (:\n", "cannot be loaded: SyntaxError"),
    ],
)
def test_a_file_that_is_no_method_is_told_so(code: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(code, encoding="utf-8")
    with pytest.raises(FedVLError, match=told):
        load_method(str(file))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FedVLError, match="There is no method file"):
        load_method(str(tmp_path / "absent.py"))
