"""Tables of a grid of runs: for the terminal, and as CSV, LaTeX (booktabs) and HTML."""

import csv
import io
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedvl.display import visible
from fedvl.evaluation.statistics import Interval
from fedvl.files import write_whole
from fedvl.report.tables import MISSING, csv_cell, human_count, points, spread

Summary = Mapping[str, Any]  # the contents of comparison.json, or of a recipe's result.json
GridCell = Mapping[str, Any]  # one of its cells

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{padding:.3rem .7rem;border-bottom:1px solid #d9dee4;text-align:right;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}small{color:#57606a}"
)
LATEX = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "±": r"$\pm$"}
LATEX |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}


def write_tables(summary: Summary, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, text in (("csv", csv_table), ("tex", latex_table), ("html", html_table)):
        write_whole(out / f"table.{name}", visible(text(summary)).encode())


def by_place(summary: Summary) -> dict[tuple[str, str], GridCell]:
    return {(cell["row"], cell["column"]): cell for cell in summary["cells"]}


def figure(value: float, like: float | None = None) -> str:
    """Format with one decimal, or in units of 1000 if large; ``like`` sets the precision."""
    size = abs(value if like is None else like)
    return human_count(value) if size >= 1e4 else f"{value:.1f}" if size >= 1 or size == 0 else f"{value:.3g}"


def cell_text(cell: GridCell | None) -> str:
    """Format as ``74.0 ± 0.3*``, in a recipe with the paper's value and the difference."""
    if cell is None:
        return MISSING
    text = figure(cell["mean"])
    if cell["deviation"] is not None:
        text += f" ± {figure(cell['deviation'], cell['mean'])}"
    if cell.get("interval"):
        text += f" ({interval_text(cell)})"
    text += "*" if cell["significant"] else ""
    text += " chosen" if cell.get("chosen") else ""
    if cell.get("paper") is not None:
        text += f" (paper {figure(cell['paper'])}, {points(cell['mean'] - cell['paper'], 1)})"
    return text


def interval_text(cell: GridCell) -> str:
    """Return a cell's interval, and of how many images it is, where that is known."""
    images = f"; n = {cell['images']:,}" if cell.get("images") else ""
    return f"{spread(Interval(*cell['interval']))}{images}"


def footnote(summary: Summary) -> str:
    """Return the caveats printed under the table: seeds, significance, failures and notes."""
    counts = sorted({cell["n"] for cell in summary["cells"]})
    seeds = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1]))) if counts else "0"
    parts = ["n = 1 seed." if seeds == "1" else f"Mean ± standard deviation over n = {seeds} seeds."]
    if any(cell.get("interval") for cell in summary["cells"]):
        which = "validation" if any(cell.get("chosen") for cell in summary["cells"]) else "test"
        over = f"the {which} images" if seeds == "1" else f"seeds and {which} images (two-level bootstrap)"
        parts.append(f"In brackets, the interval of 95 % over {over}.")
    parts += leads(summary) if len(summary["columns"]) > 1 else []
    parts += unlike(summary)
    if counts and counts[-1] >= 3:
        parts.append(f"* p < 0.05, {summary['test']}.")
    if summary["failures"]:
        parts.append(f"{len(summary['failures'])} run{'' if len(summary['failures']) == 1 else 's'} failed.")
    return " ".join([*parts, *filter(None, [summary.get("note")])])


def unlike(summary: Summary) -> list[str]:
    """Return a sentence for each column whose rows were measured by different protocols."""
    sentences = []
    for column in summary["columns"]:
        rows: dict[str, list[str]] = {}
        for cell in summary["cells"]:
            if cell["column"] == column and cell.get("protocol"):
                rows.setdefault(cell["protocol"], []).append(cell["row"])
        if len(rows) > 1:
            told = ", ".join(f"{protocol} for {' and '.join(names)}" for protocol, names in rows.items())
            which = f" of {column}" if len(summary["columns"]) > 1 else ""
            sentences.append(f"The figures{which} follow different protocols ({told}) and do not compare.")
    return sentences


def opening(summary: Summary) -> str:
    """Say which row is best, over what, and how sure that is; "" where none is."""
    if summary.get("opening") or summary.get("recipe"):
        return str(summary.get("opening") or "")
    judged = [
        cell
        for cell in summary["cells"]
        if cell.get("against")
        and cell["measure"] == "accuracy"
        and not unlike({**summary, "columns": [cell["column"]]})
    ]
    if not judged:
        return ""
    if len(summary["columns"]) == 1:
        reference = zero_shot(summary)
        beside = "" if reference is None else f" Zero-shot has {reference:.1f} %."
        return _lead(summary, judged[0]) + beside
    wins: dict[str, list[GridCell]] = {}
    for cell in judged:
        wins.setdefault(cell["row"] if cell["best"] else "", []).append(cell)
    equal = len(wins.pop("", ()))
    told = [f"{row} in {len(cells)}, surely so in {sum(map(_sure, cells))}" for row, cells in wins.items()]
    told += [f"none in {equal}"] if equal else []
    return (
        f"Best of {len(summary['rows'])} rows in {len(judged)} columns: {'; '.join(told)} "
        "(sure: the interval of 95 % of the lead over the next, paired over the test images, is above 0)."
    )


def zero_shot(summary: Summary) -> float | None:
    """Return the zero-shot accuracy of all runs; None unless they share it."""
    found = list((summary.get("facts") or {}).get("zero_shot_accuracy") or ())
    return float(found[0]) if len(found) == 1 and len(summary["columns"]) == 1 else None


def _sure(cell: GridCell) -> bool:
    return bool(cell.get("lead")) and cell["lead"][0] > 0


def _lead(summary: Summary, cell: GridCell) -> str:
    other = by_place(summary)[cell["against"], cell["column"]]
    if not cell["best"]:
        return f"{cell['row']} and {other['row']} are equal: {cell['mean']:.1f} %."
    ahead = f"{points(cell['mean'] - other['mean'], 1)} points over {other['row']}"
    if not cell.get("lead"):
        return (
            f"{cell['row']} has the highest accuracy, {cell['mean']:.1f} %, {ahead}; there is no paired test, since the runs "
            "had different test images or did not note them."
        )
    seen = f"95 % over the test images {spread(Interval(*cell['lead']))}, paired"
    if _sure(cell):
        return f"{cell['row']} is best: {cell['mean']:.1f} %, {ahead} ({seen})."
    return f"{cell['row']} has the highest accuracy, {cell['mean']:.1f} %, but {ahead} may be chance ({seen})."


def leads(summary: Summary) -> list[str]:
    """Return a sentence for each column on how sure the lead of its best row is, image by image."""
    cells, sentences = by_place(summary), []
    for cell in summary["cells"]:
        other = cells.get((cell.get("against") or "", cell["column"]))
        if not cell.get("lead") or other is None:
            continue
        column = f" ({cell['column']})" if len(summary["columns"]) > 1 else ""
        if cell["mean"] == other["mean"]:
            sentences.append(f"{cell['row']} and {other['row']}{column} are equal.")
            continue
        interval = Interval(*cell["lead"])
        sure = "" if interval.low > 0 else ", so that it may be chance"
        sentences.append(
            f"{cell['row']} leads {other['row']}{column} by {points(cell['mean'] - other['mean'], 1)} points, 95 % over the test "
            f"images {spread(interval)} (paired bootstrap){sure}."
        )
    return sentences


def heading(summary: Summary) -> str:
    """Return the title, and the label of results that are not on the paper's model and data."""
    return ". ".join(filter(None, (summary["title"], summary.get("label"))))


def terminal_tables(summary: Summary, width: int) -> list[Table]:
    """Return as many tables as the width requires, with the longer axis as rows."""
    cells = by_place(summary)
    down, across = summary["rows"], summary["columns"]
    turned = len(across) > len(down)
    if turned:
        down, across = across, down
    texts: dict[str, list[Text]] = {}
    for name in across:
        found = [cells.get((name, other) if turned else (other, name)) for other in down]
        texts[name] = [Text(cell_text(cell), style="bold" if cell and cell["best"] else "") for cell in found]
    packs: list[list[str]] = []
    left = 0
    for name in across:
        needed = max(len(name), *map(len, texts[name])) + 2  # plus the space between columns
        if not packs or needed > left:
            packs.append([])
            left = width - max(map(len, down))
        packs[-1].append(name)
        left -= needed
    tables = []
    for pack in packs:
        table = Table("", box=None, pad_edge=False)
        for name in pack:
            table.add_column(Text(name), justify="right")
        for index, other in enumerate(down):
            table.add_row(Text(other), *(texts[name][index] for name in pack))
        tables.append(table)
    return tables


def csv_table(summary: Summary) -> str:
    """Return one line per cell at full precision, for other programs."""
    names = ("row", "column", "measure", "mean", "deviation", "n", "p", "against", "paper")
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: csv_cell(value) for key, value in cell.items()} for cell in summary["cells"])
    return text.getvalue()


def latex_table(summary: Summary) -> str:
    cells = by_place(summary)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex(f'{heading(summary)} {footnote(summary)}'.strip())}}}",
        rf"\begin{{tabular}}{{l{'r' * len(summary['columns'])}}}",
        r"\toprule",
        " & ".join(["", *map(latex, summary["columns"])]) + r" \\",
        r"\midrule",
    ]
    for row in summary["rows"]:
        texts = [latex(row)]
        for column in summary["columns"]:
            cell = cells.get((row, column))
            text = latex(cell_text(cell)).replace("*", "$^{*}$")
            texts.append(rf"\textbf{{{text}}}" if cell and cell["best"] else text)
        lines.append(" & ".join(texts) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def latex(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text).replace("—", "--").replace("\N{MINUS SIGN}", "$-$")


def html_table(summary: Summary) -> str:
    cells = by_place(summary)
    head = "".join(f"<th>{escape(column)}</th>" for column in summary["columns"])
    body = ""
    for row in summary["rows"]:
        body += f"<tr><td>{escape(row)}</td>"
        for column in summary["columns"]:
            cell = cells.get((row, column))
            text = escape(cell_text(cell))
            body += f"<td>{f'<b>{text}</b>' if cell and cell['best'] else text}</td>"
        body += "</tr>\n"
    title = escape(heading(summary) or "Comparison")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>\n"
        f'<div class="wide"><table><thead><tr><th></th>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n'
        f"<p><small>{escape(footnote(summary))}<br>{escape(summary['date'])}, fedvl {escape(summary['fedvl_version'])}, "
        f"<code>{escape(summary['command'])}</code></small></p></html>\n"
    )
