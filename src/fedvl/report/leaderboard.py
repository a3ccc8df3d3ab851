"""A table of methods from packs that were verified: page, CSV and JSON."""

import csv
import io
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fedvl.comparisons.contents import Comparison
from fedvl.display import csv_cell, visible
from fedvl.files import Content, write_whole
from fedvl.report.comparison_tables import STYLE, figure
from fedvl.version import __version__

COLUMNS = ("column", "row", "mean", "deviation", "n", "images", "verdict", "executed", "of", "pack", "sha256")


class Entry(Content):
    """A row of a comparison in a pack."""

    row: str
    column: str
    measure: str
    mean: float
    deviation: float | None
    n: int
    images: int | None
    data: str
    """Dataset, model, partition and clients."""
    verdict: str
    executed: int
    """Runs that were executed again."""
    of: int
    """Runs of the pack."""
    checked: bool
    """Whether the features are known to be those of the dataset."""
    pack: str
    sha256: str
    """Of its pack.json."""


class Rejected(Content):
    """A pack that is not in the table, and why."""

    pack: str
    reason: str


class Leaderboard(Content):
    """leaderboard.json."""

    fedvl_version: str
    entries: list[Entry]
    rejected: list[Rejected]


def leaderboard_of(entries: Sequence[Entry], rejected: Sequence[Rejected]) -> Leaderboard:
    """Return the table: best mean first among rows of the same data, column and measure."""
    order = sorted(entries, key=lambda one: (one.data, one.column, one.measure, -one.mean, one.row, one.pack))
    return Leaderboard(fedvl_version=__version__, entries=order, rejected=list(rejected))


def data_of(summary: Comparison) -> str:
    """Name what the rows of a comparison share."""
    facts = summary.facts
    return ", ".join(" or ".join(map(str, facts.get(key, ()))) for key in ("dataset", "model", "protocol"))


def write_leaderboard(table: Leaderboard, out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "leaderboard.json", json.dumps(table.to_dict(), indent=1).encode())
    text = io.StringIO()
    writer = csv.DictWriter(text, ("data", *COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(getattr(one, name)) for name in ("data", *COLUMNS)} for one in table.entries)
    write_whole(out / "leaderboard.csv", visible(text.getvalue()).encode())
    path = out / "leaderboard.html"
    write_whole(path, visible(page(table)).encode())
    return path


def page(table: Leaderboard) -> str:
    """Return the page: a table for each dataset, model and protocol, and the rejected packs."""
    parts = []
    for data in dict.fromkeys(one.data for one in table.entries):
        rows = "".join(line(one) for one in table.entries if one.data == data)
        head = "<th>Column</th><th>Method</th><th>Mean ± deviation</th><th>Seeds</th><th>Verified</th><th>Pack</th>"
        parts.append(
            f'<h2>{escape(data)}</h2><div class="wide"><table><thead><tr>{head}</tr></thead>{rows}</table></div>'
        )
    if table.rejected:
        listed = "".join(f"<li>{escape(one.pack)}: {escape(one.reason)}</li>" for one in table.rejected)
        parts.append(f"<h2>Rejected</h2><ul>{listed}</ul>")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Leaderboard</title><style>{STYLE}</style><h1>Leaderboard</h1>"
        "<p>Every pack was executed again here. This shows that its figures follow from its features, labels and settings. It "
        "does not show that the features are of the images that the author names, unless “data checked” is said.</p>"
        f"{''.join(parts)}<p><small>fedvl {escape(table.fedvl_version)}</small></p></html>\n"
    )


def line(one: Entry) -> str:
    spread = "" if one.deviation is None else f" ± {figure(one.deviation, one.mean)}"
    known = "data checked" if one.checked else "data as sent"
    verified = f"{one.verdict}, {one.executed} of {one.of} runs, {known}"
    cells = (
        one.column,
        one.row,
        f"{figure(one.mean)}{spread}",
        str(one.n),
        verified,
        f"{one.pack} ({one.sha256[:12]})",
    )
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"
