"""Write the preset `embedded` of every method, and the page of how it was chosen, from docs/results/presets.jsonl.

python -m tools.presets_page

It writes src/fedvl/methods/embedded.toml, and the table between two markers in docs/presets.md. tools/presets.py measures.
"""

import statistics
from pathlib import Path
from typing import Any

from fedvl.comparisons.grid import layered
from fedvl.comparisons.tuning import inline
from fedvl.config import Settings
from tools.presets import LIKE, chosen_rate, preset_settings, rates_of, read_lines, tuned_methods

ROOT = Path(__file__).parents[1]
LINES = ROOT / "docs" / "results" / "presets.jsonl"
PRESETS = ROOT / "src" / "fedvl" / "methods" / "embedded.toml"
PAGE = ROOT / "docs" / "presets.md"
BEGIN, END = "<!-- presets -->\n", "<!-- end of presets -->"
HEAD = "# Changes to the preset `paper` for the embedded model: written by tools/presets_page.py, chosen by tools/presets.py\n"


def changes_of(lines: list[dict[str, Any]], name: str) -> Settings:
    """Return what the preset changes, with the chosen rate."""
    rate = chosen_rate(lines, LIKE.get(name, name))
    return layered(preset_settings(name), {} if rate is None else {"training": {"learning_rate": rate}})


def presets_text(lines: list[dict[str, Any]]) -> str:
    parts = [HEAD]
    for name in tuned_methods():
        settings = changes_of(lines, name)
        parts.append(f"\n[{name}]\n" + "".join(f"{key} = {inline(value)}\n" for key, value in settings.items()))
    return "".join(parts)


def row_of(lines: list[dict[str, Any]], name: str) -> tuple[str, ...]:
    """Return a row of the table: the rate, its trials, and the tests against zero-shot."""
    trials = {line["rate"]: line.get("validation") for line in lines if line["method"] == name and line["seed"] is None}
    rate = chosen_rate(lines, LIKE.get(name, name))
    cells = []
    for each in rates_of(name):
        value = trials.get(each)
        shown = "" if each not in trials else "diverged" if value is None else f"{value:.1f}"
        cells.append(f"**{shown}**" if each == rate and shown else shown)
    tests = [line for line in lines if line["method"] == name and line["rate"] == rate and "accuracy" in line]
    reached = f"{statistics.mean(line['accuracy'] for line in tests):.1f}" if tests else ""
    known = [line["zero_shot"] for line in tests if line["zero_shot"] is not None]
    counts = [str(sum(1 for line in tests if check(line))) for check in (better, worse)] if known else ["", ""]
    return (
        f"`{name}`",
        "" if rate is None else f"{rate:g}",
        *cells,
        reached,
        f"{statistics.mean(known):.1f}" if known else "",
        str(len(tests)),
        *counts,
    )


def better(line: dict[str, Any]) -> bool:
    return bool(line.get("p", 1) < 0.05 and line["gained"] > line["lost"])


def worse(line: dict[str, Any]) -> bool:
    return bool(line.get("p", 1) < 0.05 and line["gained"] < line["lost"])


def table(lines: list[dict[str, Any]]) -> str:
    head = (
        "method",
        "rate",
        "lowest rate",
        "x 10",
        "x 100",
        "x 1,000",
        "x 10,000",
        "test",
        "zero-shot",
        "seeds",
        "above",
        "below",
    )
    rows = [head, ("---",) * len(head), *(row_of(lines, name) for name in tuned_methods())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    lines = read_lines(LINES)
    PRESETS.write_text(presets_text(lines), encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(lines)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
