"""Write the documentation's page of reproduced tables.

fedvl reproduce all --on embedded --out FOLDER
python tools/reproduced_page.py FOLDER > docs/reproduced.md
"""

import json
import sys
from pathlib import Path
from typing import Any

LARGE = 1000  # larger numbers have no decimals
HEAD = """# The papers' tables and figures on the embedded model

`fedvl reproduce all --on embedded`: every recipe on the embedded model and images, in the reduced form that its
note describes. **None of these numbers is from CLIP or from the papers' datasets**; the paper's number is in brackets
where the recipe has one, to compare the order of rows, never their values. `±` is the standard deviation over seeds.
Each recipe also writes a `report.html` with its figure.

The rates of CacheFL, AdapterFL and PromptFL were chosen twice on validation images: first on cifar10-mini alone and
then, after test results of emoji-mini had been seen and four runs there had diverged, on both datasets.
"""


def page(folder: Path) -> str:
    found = [
        json.loads(path.read_bytes())
        for path in sorted(folder.glob("*/*/*/comparison.json"))
        if "runs" not in path.parts
    ]
    parts = [HEAD]
    for result in found:
        source = "" if result["recipe"].startswith("privacy/") else "The paper: "  # of no paper, but of a remedy
        about = (
            f"## {result['title']}\n\n`fedvl reproduce {result['recipe']} --on embedded`, {result['seeds']} "
            f"{'seed' if result['seeds'] == 1 else 'seeds'}, version {result['fedvl_version']}, {result['date'][:10]}. "
            f"{source}{result['shows']} {result['note']}"
        )
        parts.append(about.rstrip() + "\n")  # many recipes have no note
        parts.append(table(result))
    return "\n".join(parts)


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
    paper = f" ({cell['paper']:g})" if cell.get("paper") is not None else ""
    digits = 0 if abs(cell["ours"]) >= LARGE else 1
    return f"{cell['ours']:,.{digits}f}{deviation}{paper}"


if __name__ == "__main__":
    print(page(Path(sys.argv[1])).rstrip())
