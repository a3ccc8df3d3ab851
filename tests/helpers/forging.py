"""Small comparisons through the command line, and changes that a forger would make in their files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fedvl.cli import app
from fedvl.commands.verify import pages
from fedvl.comparisons.contents import Comparison
from fedvl.comparisons.grid import Grid
from fedvl.comparisons.run import summarise
from fedvl.comparisons.verification import performed_again
from fedvl.data.sources import Opener
from fedvl.errors import FedVLError

SMALL: dict[str, Any] = {
    "data.clients": 2,
    "data.partition": "iid",
    "data.shots": 8,
    "data.test_shots": 10,
    "federation.rounds": 2,
    "federation.threads": 1,
}


def compared_with(out: Path, *words: str, **settings: Any) -> Path:
    """Run a small comparison; return its folder."""
    given = [f"--set={key}={value}" for key, value in {**SMALL, **settings}.items()]
    done = CliRunner().invoke(app, ["compare", *words, *given, "--quiet", "--out", str(out)])
    assert done.exit_code == 0, (done.output, done.exception)
    return out


def verdict_of(place: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """Verify a run, comparison or pack; return what was found, or the error."""
    done = CliRunner().invoke(app, ["verify", str(place), "--json", "--quiet", *words])
    if isinstance(done.exception, FedVLError):
        assert code == 2, done.exception
        return {"error": str(done.exception)}
    assert done.exit_code == code, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def edited(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the content of a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def forged_right(result: dict[str, Any]) -> None:
    """Make a wrong answer right, and the accuracy what follows from that."""
    right = result["right"].replace("0", "1", 1)
    result.update(right=right, accuracy=100 * right.count("1") / len(right))


def summarised_again(folder: Path) -> None:
    """Write the summary, tables and page that follow from the runs as they are."""
    claimed = Comparison.model_validate(json.loads((folder / "comparison.json").read_text()))
    grid = Grid.model_validate(claimed.grid)
    _, outcome = performed_again(grid, folder / "runs", Opener.once())
    summary = summarise(outcome, claimed.command, grid)
    for lock in folder.rglob(".lock"):
        lock.unlink()
    (folder / "comparison.json").write_text(summary.to_json(indent=1))
    for name, content in pages(summary).items():
        if (folder / name).exists():
            (folder / name).write_bytes(content)
