"""Tables of a grid of runs: for the terminal, and as CSV, LaTeX (booktabs) and HTML."""

import csv
import io
import re
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from rich.table import Table
from rich.text import Text

from fedvl.comparisons.contents import Averaged, Comparison, GridCell
from fedvl.display import csv_cell, visible
from fedvl.evaluation.statistics import NEAR, NEARLY
from fedvl.files import Count, write_whole
from fedvl.report.tables import MISSING, human_count, points, spread

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{padding:.3rem .7rem;border-bottom:1px solid #d9dee4;text-align:right;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}small{color:#57606a}"
)
NEAR_CHANCE = "†"
LATEX = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "±": r"$\pm$"}
LATEX |= {"†": r"$^{\dagger}$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
LATEX |= {"<": "$<$", ">": "$>$", "|": "$|$"}


def write_tables(summary: Comparison, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, content in tables_of(summary).items():
        write_whole(out / name, content)


def tables_of(summary: Comparison) -> dict[str, bytes]:
    """Return the content of each file of the table, by name."""
    written = (("csv", csv_table), ("tex", latex_table), ("html", html_table))
    return {f"table.{name}": visible(text(summary)).encode() for name, text in written}


def figure(value: float, like: float | None = None) -> str:
    """Format with one decimal, or in units of 1000 if large; ``like`` sets the precision."""
    size = abs(value if like is None else like)
    return human_count(value) if size >= 1e4 else f"{value:.1f}" if size >= 1 or size == 0 else f"{value:.3g}"


class AverageCell(GridCell):
    """The mean of a row over several datasets."""

    of: Count  # datasets
    missing: Count


def with_averages(summary: Comparison) -> Comparison:
    """Return the table with a column for each average over datasets, after the others."""
    cells, added = summary.places, list[AverageCell]()
    names = []
    for group in summary.averages:
        found = {
            row: [cells[row, column] for column in group.columns if (row, column) in cells] for row in summary.rows
        }
        means = [average(row, group, own) for row, own in found.items() if len(own) > 1]
        if not means or group.name in summary.columns:
            continue
        whole = [cell.mean for cell in means if not cell.missing]
        names.append(group.name)
        added += [
            cell.model_copy(
                update={"best": not cell.missing and len(whole) > 1 and cell.mean == max(whole) > min(whole)}
            )
            for cell in means
        ]
    if not names:
        return summary
    return summary.model_copy(update={"columns": [*summary.columns, *names], "cells": [*summary.cells, *added]})


def average(row: str, group: Averaged, cells: Sequence[GridCell]) -> AverageCell:
    """Return the mean of a row's cells, with its deviation over seeds."""
    by_seed = [statistics.mean(values) for values in zip(*(cell.values for cell in cells), strict=False)]
    alike = len({tuple(cell.seeds) for cell in cells}) == 1 and len(by_seed) > 1
    papers = [cell.paper for cell in cells if cell.paper is not None]
    return AverageCell(
        row=row,
        column=group.name,
        measure=cells[0].measure,
        mean=statistics.mean(cell.mean for cell in cells),
        deviation=statistics.stdev(by_seed) if alike else None,
        n=len(by_seed),
        paper=statistics.mean(papers) if len(papers) == len(cells) else None,
        best=False,
        significant=False,
        missing=len(group.columns) - len(cells),
        of=len(group.columns),
    )


def cell_text(cell: GridCell | None) -> str:
    """Format as ``74.0 ± 0.3*``, in a recipe with the paper's value and the difference."""
    if cell is None:
        return MISSING
    text = figure(cell.mean)
    if cell.deviation is not None:
        text += f" ± {figure(cell.deviation, cell.mean)}"
    if cell.interval:
        text += f" ({interval_text(cell)})"
    text += missing_text(cell)
    text += "*" if cell.significant else ""
    text += " chosen" if cell.chosen else ""
    if cell.paper is not None:
        text += f" (paper {figure(cell.paper)}, {points(cell.mean - cell.paper, 1)})"
    return text


def missing_text(cell: GridCell) -> str:
    """Return of how many datasets an average is, where some are missing."""
    if not isinstance(cell, AverageCell) or not cell.missing:
        return ""
    return f" (of {cell.of - cell.missing} of {cell.of} datasets)"


def heading_of(name: str, summary: Comparison, axis: int = 1) -> str:
    """Return the name of a column (axis 0: row), marked if zero-shot is near chance throughout."""
    own = [cell for place, cell in summary.places.items() if place[axis] == name]
    other = [cell for place, cell in summary.places.items() if place[axis] != name]
    marked = bool(own) and all(cell.near_chance for cell in own)
    every = marked and axis == 0 and all(cell.near_chance for cell in other)  # then columns are marked
    return f"{name} {NEAR_CHANCE}" if marked and not every else name


def interval_text(cell: GridCell) -> str:
    """Return a cell's interval, and of how many images it is, where that is known."""
    images = f"; n = {cell.images:,}" if cell.images else ""
    return f"{spread(cell.interval)}{images}"


def footnote(summary: Comparison) -> str:
    """Return the caveats printed under the table: seeds, significance, failures and notes."""
    counts = sorted({cell.n for cell in summary.cells})
    compared = {tuple(cell.compared) for cell in summary.cells if cell.compared}
    seeds = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1]))) if counts else "0"
    parts = ["n = 1 seed." if seeds == "1" else f"Mean ± standard deviation over n = {seeds} seeds."]
    if any(cell.interval for cell in summary.cells):
        which = "validation" if any(cell.chosen for cell in summary.cells) else "test"
        over = f"the {which} images" if seeds == "1" else f"seeds and {which} images (two-level bootstrap)"
        parts.append(f"In brackets, the interval of 95 % over {over}.")
    parts += leads(summary) if len(summary.columns) > 1 else []
    parts += unlike(summary, summary.columns)
    if seeds == "1" and len(summary.rows) > 1:
        parts.append("Seeds were not varied: with others the order of the rows may differ.")
    if counts and counts[-1] >= 2:
        parts.append(f"* {summary.test}.")
    if len(counts) > 1 and compared:
        told = " or ".join(sorted(", ".join(map(str, one)) for one in compared))
        parts.append(f"Rows are compared on the seeds that all of a column have: {told}.")
    if any(cell.near_chance for cell in summary.cells):
        parts.append(
            f"{NEAR_CHANCE} Zero-shot is near chance level (its interval of 95 % reaches it, or it is less than "
            f"{NEAR:g} points above and below {NEARLY:g} times it): not counted."
        )
    parts += against_sentences(summary)
    if summary.failures:
        parts.append(f"{len(summary.failures)} run{'' if len(summary.failures) == 1 else 's'} failed.")
    return " ".join([*parts, *filter(None, [summary.note])])


def against_sentences(summary: Comparison) -> list[str]:
    """Return a sentence for each column on the rows against the one that was asked for."""
    sentences = []
    for column in dict.fromkeys(one.column for one in summary.against):
        rows = [one for one in summary.against if one.column == column]
        named = f"{column}, " if len(summary.columns) > 1 else ""
        each = "; ".join(f"{one.row} {points(one.difference, 1)}, {p_text(one.holm)}" for one in rows)
        test = "paired t-test over seeds, Holm's correction over rows"
        sentences.append(f"{named}against {rows[0].reference} ({test}): {each}.")
    return [sentence[0].upper() + sentence[1:] for sentence in sentences]


def p_text(p: float | None) -> str:
    return "no test" if p is None else "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def unlike(summary: Comparison, columns: Sequence[str]) -> list[str]:
    """Return a sentence for each column whose rows were measured by different protocols."""
    sentences = []
    for column in columns:
        rows: dict[str, list[str]] = {}
        for cell in summary.cells:
            if cell.column == column and cell.protocol:
                rows.setdefault(cell.protocol, []).append(cell.row)
        if len(rows) > 1:
            told = ", ".join(f"{protocol} for {' and '.join(names)}" for protocol, names in rows.items())
            which = f" of {column}" if len(columns) > 1 else ""
            sentences.append(f"The figures{which} follow different protocols ({told}) and do not compare.")
    return sentences


def opening(summary: Comparison) -> str:
    """Say which row is best, over what, and how sure that is; "" where none is."""
    if summary.opening or summary.recipe:
        return summary.opening or ""
    judged = [
        cell
        for cell in summary.cells
        if cell.against
        and cell.measure == "accuracy"
        and not (cell.near_chance and len(summary.columns) > 1)
        and not unlike(summary, [cell.column])
    ]
    if not judged:
        return ""
    if len(summary.columns) == 1:
        reference = zero_shot(summary)
        beside = "" if reference is None else f" Zero-shot has {reference:.1f} %."
        return _lead(summary, judged[0]) + beside
    wins: dict[str, list[GridCell]] = {}
    for cell in judged:
        wins.setdefault(cell.row if cell.best else "", []).append(cell)
    equal = len(wins.pop("", ()))
    varied = any(len(cell.compared) > 1 for cell in judged)
    told = [
        f"{row} in {len(cells)}" + (f", beyond chance in {sum(cell.significant for cell in cells)}" if varied else "")
        for row, cells in wins.items()
    ]
    told += [f"none in {equal}"] if equal else []
    how = (
        "beyond chance: the interval of 95 % of the lead over the next, over seeds and test images, is above 0"
        if varied
        else "seeds were not varied, so that none of this may hold for others"
    )
    return f"Best of {len(summary.rows)} rows in {len(judged)} columns: {'; '.join(told)} ({how})."


def zero_shot(summary: Comparison) -> float | None:
    """Return the zero-shot accuracy of all runs; None unless they share it."""
    found = summary.facts.get("zero_shot_accuracy", [])
    return float(found[0] or 0) if len(found) == 1 and len(summary.columns) == 1 else None


def _lead(summary: Comparison, cell: GridCell) -> str:
    other = summary.places[cell.against or "", cell.column]
    if not cell.best:
        return f"{cell.row} and {other.row} are equal: {cell.mean:.1f} %."
    ahead = f"{points(cell.ahead, 1)} points over {other.row}"
    if not cell.lead:
        return (
            f"{cell.row} has the highest accuracy, {cell.mean:.1f} %, {ahead}; there is no paired test, since the runs "
            "had different test images or did not note them."
        )
    bounds = spread(cell.lead)
    if len(cell.compared) == 1:
        return (
            f"{cell.row} has the highest accuracy, {cell.mean:.1f} %, {ahead} (95 % over the test images {bounds}, "
            "paired); one seed was compared, and others may order the rows differently."
        )
    seen = f"95 % over seeds and test images {bounds}, paired"
    if cell.significant:
        return f"{cell.row} is best: {cell.mean:.1f} %, {ahead} ({seen})."
    return f"{cell.row} has the highest accuracy, {cell.mean:.1f} %, but {ahead} may be chance ({seen})."


def leads(summary: Comparison) -> list[str]:
    """Return a sentence for each column on the lead of its best row and its interval."""
    cells, sentences = summary.places, []
    for cell in summary.cells:
        other = cells.get((cell.against or "", cell.column))
        if not cell.lead or other is None:
            continue
        column = f" ({cell.column})" if len(summary.columns) > 1 else ""
        if not cell.best:
            sentences.append(f"{cell.row} and {other.row}{column} are equal.")
            continue
        sure = "" if cell.significant or len(cell.compared) == 1 else ", so that it may be chance"
        over = "the test images" if len(cell.compared) == 1 else "seeds and test images"
        sentences.append(
            f"{cell.row} leads {other.row}{column} by {points(cell.ahead, 1)} points, 95 % over {over} "
            f"{spread(cell.lead)} (paired bootstrap){sure}."
        )
    return sentences


def heading(summary: Comparison) -> str:
    """Return the title, and the label of results that are not on the paper's model and data."""
    return ". ".join(filter(None, (summary.title, summary.label)))


def terminal_tables(summary: Comparison, width: int) -> list[Table]:
    """Return as many tables as the width requires, with the longer axis as rows."""
    summary = with_averages(summary)
    cells = summary.places
    down, across = summary.rows, summary.columns
    turned = len(across) > len(down)
    if turned:
        down, across = across, down
    texts: dict[str, list[Text]] = {}
    named = {name: heading_of(name, summary, 0) for name in summary.rows}
    named |= {name: heading_of(name, summary) for name in summary.columns}
    for name in across:
        found = [cells.get((name, other) if turned else (other, name)) for other in down]
        texts[name] = [Text(cell_text(cell), style="bold" if cell and cell.best else "") for cell in found]
    packs: list[list[str]] = []
    left = 0
    for name in across:
        needed = max(len(named[name]), *map(len, texts[name])) + 2  # plus the space between columns
        if not packs or needed > left:
            packs.append([])
            left = width - max(map(len, down))
        packs[-1].append(name)
        left -= needed
    tables = []
    for pack in packs:
        table = Table("", box=None, pad_edge=False)
        for name in pack:
            table.add_column(Text(named[name]), justify="right")
        for index, other in enumerate(down):
            table.add_row(Text(named[other]), *(texts[name][index] for name in pack))
        tables.append(table)
    return tables


def csv_table(summary: Comparison) -> str:
    """Return one line per cell at full precision, for other programs."""
    names = ("row", "column", "measure", "mean", "deviation", "n", "p", "against", "paper")
    further = ("reference", "difference", "p_difference", "p_holm")
    known = {(one.row, one.column): one for one in summary.against}
    text = io.StringIO()
    writer = csv.DictWriter(text, names + further if known else names, lineterminator="\n")
    writer.writeheader()
    for cell in summary.cells:
        line = {name: csv_cell(getattr(cell, name)) for name in names}
        if one := known.get(cell.place):
            line |= dict(zip(further, map(csv_cell, (one.reference, one.difference, one.p, one.holm)), strict=True))
        writer.writerow(line)
    return text.getvalue()


def latex_table(summary: Comparison) -> str:
    """Return a compact table for booktabs: best in bold, second underlined, notes below."""
    wide = with_averages(summary)
    name = re.sub(r"[^a-z0-9]+", "-", (summary.title or "comparison").lower()).strip("-") or "comparison"
    parts = [
        latex_rows(
            wide, wide.columns, {place: latex_cell(cell, summary.style) for place, cell in with_seconds(wide).items()}
        )
    ]
    if summary.against:
        columns = list(dict.fromkeys(one.column for one in summary.against))
        texts = {(one.row, one.column): latex_p(one.holm) for one in summary.against}
        parts += [r"\par\medskip", latex_rows(wide, columns, texts)]
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{latex(heading(summary) or 'Comparison')}}}",
            rf"\label{{tab:{name}}}",
            *parts,
            r"\par\medskip",
            rf"\begin{{minipage}}{{\linewidth}}\footnotesize {latex(' '.join(latex_notes(wide)))}\end{{minipage}}",
            r"\end{table}",
            "",
        ]
    )


def latex_rows(summary: Comparison, columns: Sequence[str], texts: Mapping[tuple[str, str], str]) -> str:
    """Return a tabular of the rows that have a text."""
    rows = [row for row in summary.rows if any((row, column) in texts for column in columns)]
    lines = [
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
        " & ".join(["", *(latex(heading_of(column, summary)) for column in columns)]) + r" \\",
        r"\midrule",
        *(
            " & ".join([latex(heading_of(row, summary, 0)), *(texts.get((row, column), "--") for column in columns)])
            + r" \\"
            for row in rows
        ),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines)


def with_seconds(summary: Comparison) -> dict[tuple[str, str], tuple[GridCell, bool]]:
    """Return each cell, and whether it is the second of its column."""
    second = {(cell.against, cell.column) for cell in summary.cells if cell.best and cell.against}
    return {cell.place: (cell, cell.place in second) for cell in summary.cells}


def latex_cell(cell: tuple[GridCell, bool], style: str) -> str:
    figures, second = cell
    text = figure(figures.mean) + missing_text(figures)
    if style == "mean-std" and figures.deviation is not None:
        text += f" ± {figure(figures.deviation, figures.mean)}"
    if style == "interval" and figures.interval is not None:
        text += f" ({spread(figures.interval)})"
    marked = (
        rf"\textbf{{{latex(text)}}}" if figures.best else rf"\underline{{{latex(text)}}}" if second else latex(text)
    )
    return marked + ("$^{*}$" if figures.significant else "")


def latex_p(p: float | None) -> str:
    return "--" if p is None else "$<$0.001" if p < 0.001 else f"{p:.3f}"


def latex_notes(summary: Comparison) -> list[str]:
    """Return the notes below a table for a paper."""
    seeds = sorted({cell.n for cell in summary.cells})
    images = sorted({cell.images for cell in summary.cells if cell.images})
    over = " to ".join(str(count) for count in dict.fromkeys((seeds[0], seeds[-1]))) if seeds else "0"
    shown = "standard deviation" if summary.style == "mean-std" else "interval of 95 %"
    notes = [f"{summary.unit} Mean and {shown} over {over} seed{'' if over == '1' else 's'}".strip()]
    notes[0] += f" on {' or '.join(f'{count:,}' for count in images)} test images." if images else "."
    notes.append("Best in bold, second underlined.")
    notes += ["* The lead over the second is beyond chance."] if any(cell.significant for cell in summary.cells) else []
    if any(cell.near_chance for cell in summary.cells):
        notes.append(f"{NEAR_CHANCE} Zero-shot is near chance level.")
    if summary.against:
        reference = summary.against[0].reference
        notes.append(f"Below: p of a paired t-test over seeds against {reference}, with Holm's correction over rows.")
    notes += [f"{len(summary.failures)} runs failed."] if summary.failures else []
    return notes


def latex(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text).replace("—", "--").replace("\N{MINUS SIGN}", "$-$")


def html_table(summary: Comparison) -> str:
    note, summary = footnote(summary), with_averages(summary)
    cells = summary.places
    head = "".join(f"<th>{escape(heading_of(column, summary))}</th>" for column in summary.columns)
    body = ""
    for row in summary.rows:
        body += f"<tr><td>{escape(heading_of(row, summary, 0))}</td>"
        for column in summary.columns:
            cell = cells.get((row, column))
            text = escape(cell_text(cell))
            body += f"<td>{f'<b>{text}</b>' if cell and cell.best else text}</td>"
        body += "</tr>\n"
    title = escape(heading(summary) or "Comparison")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>\n"
        f'<div class="wide"><table><thead><tr><th></th>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n'
        f"<p><small>{escape(note)}<br>{escape(summary.date)}, fedvl {escape(summary.fedvl_version)}, "
        f"<code>{escape(summary.command)}</code></small></p></html>\n"
    )
