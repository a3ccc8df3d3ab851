"""Write docs/claims.md: what the five papers claim, and whether the embedded model shows it too.

python -m tools.claims_page

tools/claims.toml has the claims and what each asks of a table. Verdicts are computed from the figures in
docs/results/reproduced. A reason belongs to the verdict that it explains: if new figures change a verdict,
its reason is missing and has to be written.
"""

import sys
import tomllib
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import ConfigDict, Field

from fedvl.comparisons.claims import Higher, TableFigures, as_shown, quoted, shown_figure
from fedvl.comparisons.grid import read_recipe
from tools.reproduced_page import ROOT, Model, Table, read_tables

PAGE = ROOT / "docs" / "claims.md"
CLAIMS = ROOT / "tools" / "claims.toml"
Verdict = Literal["shown", "shown in part", "not shown", "cannot be shown"]
HEAD = """# The papers' claims

Which claims of the five papers does the embedded model show too? Verdicts are computed from the figures of
[the reproduced tables](reproduced.md) (`python -m tools.claims_page`). **They say nothing about CLIP or about the
papers' datasets**: a claim that is not shown here may hold there.

- *shown*: the means agree with the claim in all places that are compared. *shown in part*: in some. *not shown*: in none.
- *cannot be shown*: no figure of this model can tell, for the reason beside it.

Places are the columns of a table; columns in which zero-shot is near chance level are not counted. "Intervals apart"
counts the places where the two intervals of 95 % over seeds and test images do not overlap, which is stricter than a
paired test: where it counts none, a lead may be chance.
"""


class Finding(NamedTuple):
    """What a check found: in which places it holds, and a sentence."""

    holds: Sequence[bool]
    sentence: str


class Above(Higher):
    """A row is above others in every column, or a column above others in every row, by at least so many points."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    by: float = 0.0
    factor: float = 1.0  # the higher figure is at least so many times the other

    def found(self, table: Table) -> Finding:
        holds: list[bool] = []
        texts = []
        for other in self.than:
            pairs = self.pairs(table.figures, other)
            above = [one > two and one - two >= self.by - 1e-9 and one >= self.factor * two for one, two in pairs]
            holds += above
            if pairs:
                leads = sorted(one - two for one, two in pairs)
                span = f"{signed(leads[0])} to {signed(leads[-1])}" if len(leads) > 1 else signed(leads[0])
                apart = self.apart(table, other)
                known = f", intervals apart in {apart}" if apart is not None else ""
                texts.append(f"{quoted(other)} in {sum(above)} of {len(above)} ({span}{known})")
        extent = f" by {shown_figure(self.by)}" if self.by else f" {self.factor:g} times" if self.factor > 1 else ""
        return Finding(holds, f"{quoted(self.higher)} above{extent}: {'; '.join(texts)}." if texts else "")

    def apart(self, table: Table, other: str) -> int | None:
        """Return in how many places the intervals do not overlap; nothing if there are none."""
        cells = {(cell.row, cell.column): cell for cell in table.cells}
        by_row = self.higher in table.rows
        found = []
        for place in self.among or (table.columns if by_row else table.rows):
            one, two = (cells.get((name, place) if by_row else (place, name)) for name in (self.higher, other))
            if one and two and one.interval and two.interval and not (one.near_chance or two.near_chance):
                found.append(one.interval[0] > two.interval[1])
        return sum(found) if found else None


class Within(Model):
    """A row stays within so many points of others in every column."""

    row: str
    within: float
    of: list[str]
    among: list[str] = []

    def found(self, table: Table) -> Finding:
        holds, texts = [], []
        for other in self.of:
            pairs = Higher(higher=self.row, than=[other], among=self.among).pairs(table.figures, other)
            holds += [abs(one - two) <= self.within + 1e-9 for one, two in pairs]
            texts += [f"{shown_figure(one)} and {shown_figure(two)} ({quoted(other)})" for one, two in pairs]
        return Finding(holds, f"{quoted(self.row)}: {', '.join(texts)}." if texts else "")


class Level(Model):
    """A row changes by at most so many points from column to column."""

    level: list[str]  # rows
    within: float
    among: list[str] = []

    def found(self, table: Table) -> Finding:
        holds, texts = [], []
        figures = table.figures
        for row in self.level:
            places = [(row, column) for column in self.among or table.columns]
            values = [as_shown(figures.cells[place]) for place in counted(figures, places)]
            if len(values) > 1:
                holds.append(max(values) - min(values) <= self.within + 1e-9)
                texts.append(f"{quoted(row)} is between {shown_figure(min(values))} and {shown_figure(max(values))}")
        return Finding(holds, f"{'; '.join(texts)}." if texts else "")


class Bound(Model):
    """Cells are above or below a number."""

    cells: list[tuple[str, str]]  # rows and columns
    above: float = float("-inf")
    below: float = float("inf")

    def found(self, table: Table) -> Finding:
        figures = table.figures
        values = {place: as_shown(figures.cells[place]) for place in counted(figures, self.cells)}
        texts = [f"{shown_figure(value)} ({quoted(row)}, {column})" for (row, column), value in values.items()]
        return Finding([self.above < value < self.below for value in values.values()], f"{'; '.join(texts)}.")


class Change(Model):
    """The difference between two cells of a row is larger than that of other rows."""

    change: str  # a row
    more_than: list[str]
    first: str  # columns
    then: str

    def found(self, table: Table) -> Finding:
        changes = {}
        for row in (self.change, *self.more_than):
            pairs = counted(table.figures, [(row, self.first), (row, self.then)])
            if len(pairs) == 2:
                first, then = (as_shown(table.figures.cells[place]) for place in pairs)
                changes[row] = then - first
        if self.change not in changes:
            return Finding([], "")
        mine = changes.pop(self.change)
        texts = [f"{signed(mine)} ({quoted(self.change)})", *(f"{signed(v)} ({quoted(r)})" for r, v in changes.items())]
        return Finding(
            [mine > value for value in changes.values()], f"{self.first} to {self.then}: {', '.join(texts)}."
        )


class AverageAbove(Model):
    """A row's average over columns is above that of the best other row by at least so many points."""

    average: str
    by: float
    among: list[str]

    def found(self, table: Table) -> Finding:
        figures = table.figures
        means = {
            row: sum(figures.cells[row, column] for column in self.among) / len(self.among)
            for row in table.rows
            if all((row, column) in figures.cells for column in self.among)
        }
        if self.average not in means:
            return Finding([], "")
        mine = means.pop(self.average)
        best = max(means, key=lambda row: means[row])
        ours, theirs = shown_figure(mine), shown_figure(means[best])
        text = f"Averages: {ours} ({quoted(self.average)}), {theirs} ({quoted(best)}, the best other)."
        return Finding([as_shown(mine) - as_shown(means[best]) >= self.by], text)


class Rounds(Model):
    """A curve comes within so many points of its highest value by a round."""

    curve: str
    column: str
    by_round: int
    within: float

    def found(self, table: Table) -> Finding:
        for one in table.series:
            if (one.row, one.column) == (self.curve, self.column):
                value, best = one.values[self.by_round], max(one.values)
                first, then, most = map(shown_figure, (one.values[0], value, best))
                text = f"{first} at first, {then} after round {self.by_round}, {most} at best."
                return Finding([best - value <= self.within], text)
        return Finding([], "")


Check = Above | Within | Level | Bound | Change | AverageAbove | Rounds


class Because(Model):
    """Reasons for a verdict, each for the one that it explains."""

    shown: str = ""
    in_part: str = ""
    not_shown: str = ""
    cannot: str = ""

    def of(self, verdict: Verdict) -> str:
        return {
            "shown": self.shown,
            "shown in part": self.in_part,
            "not shown": self.not_shown,
            "cannot be shown": self.cannot,
        }[verdict]


class Claim(Model):
    paper: str
    where: str
    says: str
    recipe: str = ""  # "" if no table can show it
    checks: list[Check] = Field(default=[])
    because: Because = Because()

    def judged(self, tables: dict[str, Table]) -> tuple[Verdict, str]:
        """Return the verdict, and the figures that it follows from."""
        found = [check.found(tables[self.recipe]) for check in self.checks if self.recipe in tables]
        holds = [one for finding in found for one in finding.holds]
        text = " ".join(finding.sentence for finding in found if finding.holds)
        if not found or not all(finding.holds for finding in found):
            return "cannot be shown", text
        return ("shown" if all(holds) else "shown in part" if any(holds) else "not shown"), text


def counted(figures: TableFigures, places: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the places that have a figure and are not near chance level."""
    return [place for place in places if place in figures.cells and place not in figures.near_chance]


def signed(value: float) -> str:
    return ("+" if value >= 0 else "\u2212") + shown_figure(abs(value))


def read_claims() -> list[Claim]:
    claims = [Claim.model_validate(one) for one in tomllib.loads(CLAIMS.read_text(encoding="utf-8"))["claims"]]
    for claim in claims:
        known = known_names(claim.recipe) if claim.recipe else set()
        for check in claim.checks:
            if strange := [name for name in names(check) if name not in known]:
                sys.exit(
                    f"{claim.recipe} has no row or column '{strange[0]}', which a claim of tools/claims.toml names."
                )
    return claims


def known_names(recipe: str) -> set[str]:
    grid = read_recipe(recipe).on_embedded()
    return {*grid.rows, *grid.columns}


def names(check: Check) -> list[str]:
    """Return the rows and columns that a check names."""
    found: list[str] = []
    for field, value in check.model_dump().items():
        if field == "cells":
            found += [name for cell in value for name in cell]
        elif isinstance(value, str):
            found.append(value)
        elif isinstance(value, list):
            found += value
    return found


def page(claims: Sequence[Claim], tables: dict[str, Table]) -> str:
    verdicts = [claim.judged(tables) for claim in claims]
    papers = list(dict.fromkeys(claim.paper for claim in claims))
    kinds: list[Verdict] = ["shown", "shown in part", "not shown", "cannot be shown"]
    lines = [HEAD, f"| paper | claims | {' | '.join(kinds)} |", "|" + "---|" * 6]
    for paper in papers:
        own = [verdict for claim, (verdict, _) in zip(claims, verdicts, strict=True) if claim.paper == paper]
        lines.append(f"| {paper} | {len(own)} | {' | '.join(str(own.count(kind)) for kind in kinds)} |")
    for paper in papers:
        lines += ["", f"## {paper}", "", "| the paper | where | verdict | figures and reason |", "|---|---|---|---|"]
        for claim, (verdict, text) in zip(claims, verdicts, strict=True):
            if claim.paper == paper:
                reason = " ".join(filter(None, (text, claim.because.of(verdict))))
                lines.append(f"| {claim.says} | {source(claim)} | {verdict} | {reason} |")
    return "\n".join(lines) + "\n"


def source(claim: Claim) -> str:
    return f"{claim.where}, `{claim.recipe}`" if claim.recipe else claim.where


def unexplained(claims: Sequence[Claim], tables: dict[str, Table]) -> list[str]:
    """Return the claims that are not shown, and do not say why."""
    return [
        f"{claim.paper}: {claim.says}"
        for claim in claims
        if (verdict := claim.judged(tables)[0]) != "shown" and not claim.because.of(verdict)
    ]


def main() -> int:
    claims, tables = read_claims(), read_tables()
    if missing := unexplained(claims, tables):
        sys.exit("Write in tools/claims.toml why these are not shown:\n" + "\n".join(missing))
    PAGE.write_text(page(claims, tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
