"""Write the documentation's page of reproduced tables.

fedvl reproduce all --on embedded --out FOLDER
python tools/reproduced_page.py FOLDER

Sections of recipes that were not run in FOLDER are kept. What a table says about the recipe's claims is
computed from the figures on the page, for all sections.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from fedvl.comparisons.claims import Figures, findings, shown
from fedvl.comparisons.grid import read_recipe, recipe_names

PAGE = Path(__file__).parents[1] / "docs" / "reproduced.md"
FOUND = "This table: "
NEAR_CHANCE = "†"  # after a figure: zero-shot is near chance level, so that claims do not count it
HEAD = """# The papers' tables and figures on the embedded model

`fedvl reproduce all --on embedded`: every recipe on the embedded model and images, in the reduced form that its
note describes. **None of these numbers is from CLIP or from the papers' datasets**; the paper's number is in brackets
where the recipe has one, to compare the order of rows, never their values. `±` is the standard deviation over seeds;
"a to b" is the interval of 95 % over seeds and test images ([comparisons](compare.md)), in tables made since it is computed.
What the paper shows is in words before a table. Whether our table shows it too is counted after it, from its figures.
Each recipe also writes a `report.html` with its figure.
"""


def page(folder: Path, old: str) -> str:
    """Return the page with the recipes run in a folder, and the sections of the others as they were."""
    known = sections(old)
    for path in sorted(folder.glob("*/*/*/comparison.json")):
        if "runs" not in path.parts:
            result = json.loads(path.read_bytes())
            known[result["recipe"]] = section(result)
    return "\n".join([HEAD, *(judged(name, known[name]) for name in recipe_names() if name in known)])


def sections(text: str) -> dict[str, str]:
    """Return the sections of a page by recipe."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {match[1]: part for part in parts if (match := re.search(r"`fedvl reproduce (\S+) --on embedded", part))}


def section(result: dict[str, Any]) -> str:
    """Return a section: its words are those of the recipe now, its figures those of the run."""
    recipe = read_recipe(result["recipe"])
    ours = result["recipe"].startswith(("privacy/", "bench/"))  # of no paper
    source = "" if ours else "The paper: "
    about = (
        f"## {recipe.title}\n\n`fedvl reproduce {result['recipe']} --on embedded`, {result['seeds']} "
        f"{'seed' if result['seeds'] == 1 else 'seeds'}, version {result['fedvl_version']}, {result['date'][:10]}. "
        f"{source}{recipe.shows} {recipe.on_embedded().note}"
    )
    return f"{about.rstrip()}\n\n{table(result)}"


def judged(recipe: str, text: str) -> str:
    """Return a section with what its own table says about the claims of its recipe."""
    text = re.sub(rf"^{FOUND}.*\n", "", text, flags=re.MULTILINE).rstrip() + "\n"
    found = findings(read_recipe(recipe).claims, figures_in(text))
    return f"{text}\n{FOUND}{' '.join(found)}\n" if found else text


def figures_in(text: str) -> Figures:
    """Return the table of a section, as it is printed."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows, columns, cells, guessing = [], lines[0][1:] if lines else [], {}, []
    for name, *texts in lines[1:]:
        rows.append(name)
        for column, cell in zip(columns, texts, strict=False):  # an empty last cell is stripped
            if cell:
                cells[name, column] = float(cell.split()[0].replace(",", ""))
                guessing += [(name, column)] if cell.endswith(NEAR_CHANCE) else []
    return Figures(rows, columns, cells, guessing)


def table(result: dict[str, Any]) -> str:
    cells = {(cell["row"], cell["column"]): cell for cell in result["cells"]}
    if not any(isinstance(cell.get("ours"), float | int) for cell in cells.values()):
        return "Only a figure: the command draws it.\n"
    unit = f", {result['unit']}" if result["unit"] else ""
    lines = [
        f"| {result['kind']}{unit} | {' | '.join(result['columns'])} |",
        "|" + "---|" * (len(result["columns"]) + 1),
    ]
    for row in result["rows"]:
        lines.append(f"| {row} | {' | '.join(text(cells.get((row, column))) for column in result['columns'])} |")
    return "\n".join(lines) + "\n"


def text(cell: dict[str, Any] | None) -> str:
    if cell is None or cell.get("ours") is None:
        return ""
    deviation = f" ± {cell['deviation']:.1f}" if cell["n"] > 1 else ""
    deviation += f", {cell['interval'][0]:.1f} to {cell['interval'][1]:.1f}" if cell.get("interval") else ""
    paper = f" ({cell['paper']:g})" if cell.get("paper") is not None else ""
    guessing = f" {NEAR_CHANCE}" if cell.get("near_chance") else ""
    return f"{shown(cell['ours'])}{deviation}{paper}{guessing}"


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1]), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
