"""What a recipe claims about its table, computed from the figures of that table."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class TableFigures(NamedTuple):
    """A table: its rows and columns in order, and the figures that it has."""

    rows: Sequence[str]
    columns: Sequence[str]
    cells: Mapping[tuple[str, str], float]
    near_chance: Collection[tuple[str, str]] = ()  # cells in which the pretrained model all but guesses


class Higher(BaseModel):
    """One row is higher than others in every column, or one column in every row."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    higher: str  # a row or a column
    than: list[str] = Field(min_length=1)  # rows, or columns
    among: list[str] = []  # the columns, or rows, to look at; all if none is named

    @property
    def names(self) -> list[str]:
        return [self.higher, *self.than, *self.among]

    def finding(self, table: TableFigures) -> str:
        """Return in how many places the table agrees; nothing if it lacks the figures."""
        counted = []
        for other in self.than:
            if pairs := self.pairs(table, other):
                higher, equal = sum(one > two for one, two in pairs), sum(one == two for one, two in pairs)
                ties = f" ({equal} equal)" if equal else ""
                counted.append(f"{quoted(other)} in {higher} of {len(pairs)}{ties}")
        places = "columns" if self.higher in table.rows else "rows"
        where = f" of the {places} that the recipe names for this" if self.among else f" {places}"
        return f"{quoted(self.higher)} is higher than {', than '.join(counted)}{where}." if counted else ""

    def pairs(self, table: TableFigures, other: str) -> list[tuple[float, float]]:
        """Return the two figures of each place, as shown."""
        found = []
        by_row = self.higher in table.rows
        for place in self.among or (table.columns if by_row else table.rows):
            one, two = ((name, place) if by_row else (place, name) for name in (self.higher, other))
            guessing = one in table.near_chance or two in table.near_chance
            if one in table.cells and two in table.cells and not guessing:
                found.append((as_shown(table.cells[one]), as_shown(table.cells[two])))
        return found


class Level(BaseModel):
    """A row hardly changes from column to column; every row, if none is named."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    level: str  # a row, or * for each
    among: list[str] = []  # the columns to look at; all if none is named

    @property
    def names(self) -> list[str]:
        return [*([] if self.level == "*" else [self.level]), *self.among]

    def finding(self, table: TableFigures) -> str:
        """Return the least and the largest figure of the row, or of each row."""
        found = []
        for row in table.rows if self.level == "*" else [self.level]:
            values = [table.cells[row, place] for place in self.among or table.columns if (row, place) in table.cells]
            if values:
                where = " in the columns that the recipe names for this" if self.among else ""
                found.append(
                    f"{quoted(row)} is between {shown_figure(min(values))} and {shown_figure(max(values))}{where}."
                )
        return " ".join(found)


class Improvement(BaseModel):
    """By how many percent of it a row improves on the best of others, in every column."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    improved: str  # a row
    over: list[str] = Field(min_length=1)  # rows

    @property
    def names(self) -> list[str]:
        return [self.improved, *self.over]

    def finding(self, table: TableFigures) -> str:
        """Return the improvement in each column; nothing if the table lacks the figures."""
        found = []
        for column in table.columns:
            places = [(row, column) for row in self.names]
            if all(place in table.cells and place not in table.near_chance for place in places):
                mine, *others = (table.cells[place] for place in places)
                found.append(f"{100 * (mine / max(others) - 1):+.1f} % ({column})")
        return f"{quoted(self.improved)} improves on the best other row by {', '.join(found)}." if found else ""


Claim = Higher | Level | Improvement


def findings(claims: Sequence[Claim], table: TableFigures) -> list[str]:
    """Return a sentence for each claim, computed from the figures as they are shown."""
    found = [sentence for claim in claims if (sentence := claim.finding(table))]
    if any(isinstance(claim, Higher) for claim in claims) and (names := near_chance_names(table)):
        found.append(f"Not counted, since zero-shot is near chance level: {', '.join(names)}.")
    return found


def near_chance_names(table: TableFigures) -> list[str]:
    """Return the columns, else rows, whose figures are all near chance level; else the cells."""
    for axis, names in ((1, table.columns), (0, table.rows)):
        cells = {name: {place for place in table.cells if place[axis] == name} for name in names}
        marked = [name for name, own in cells.items() if own and own <= set(table.near_chance)]
        if marked and {place for name in marked for place in cells[name]} >= set(table.near_chance):
            return marked
    return [f"{row} ({column})" for row, column in table.near_chance]


def quoted(name: str) -> str:
    """Return a name in quotes if its commas would break a sentence."""
    return f'"{name}"' if "," in name else name


def shown_figure(value: float) -> str:
    """Format a figure as tables of reproduced recipes show it."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 1 or size == 0 else f"{value:.3g}"


def as_shown(value: float) -> float:
    """Return the number that a reader of the table sees."""
    return float(shown_figure(value).replace(",", ""))
