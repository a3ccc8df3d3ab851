"""comparison.json: built by comparisons, validated when it is read, and shown by reports."""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from fedvl.errors import FedVLError
from fedvl.evaluation.statistics import Interval
from fedvl.files import Content, Count, Finite, Names, Number, Scalar, same_lengths, square

COMPARISON_SCHEMA = 1
TableStyle = Literal["mean-std", "interval"]  # of the cells of table.tex
Amount = Annotated[float, Field(ge=-1e30, le=1e30)]  # operations of a round may be more than 1e15


def table_style(name: str) -> str:
    """Return the name of a style of table.tex, or raise FedVLError."""
    if name not in get_args(TableStyle):
        raise FedVLError(f"The style of a table is {' or '.join(get_args(TableStyle))}, not '{name}'.")
    return name


class GridCell(Content):
    row: str
    column: str
    measure: str
    mean: Amount
    deviation: Amount | None
    n: Count
    values: list[Amount] = []
    seeds: list[Count] = []  # of these values
    runs: Names = []
    interval: Interval | None = None
    images: Count | None = None
    protocol: str | None = None
    near_chance: bool = False  # zero-shot is
    best: bool
    p: Finite | None = None
    against: str | None = None
    ahead: Amount | None = None  # of `against`, on the seeds that are compared
    compared: list[Count] = []  # the seeds that all rows of the column have
    significant: bool
    lead: Interval | None = None
    chosen: bool = False
    paper: Amount | None = None
    ours: Amount | None = None  # of a recipe: the mean, beside the paper's
    difference: Amount | None = None

    @property
    def place(self) -> tuple[str, str]:
        return self.row, self.column


class GridSeries(Content):
    """The mean over seeds of each step."""

    row: str
    column: str
    rounds: list[Count] = []  # round of each value; empty: 1, 2, ...
    values: list[Amount] = []
    deviations: list[Amount | None] = []
    n: Count = 1


class Different(Content):
    """A setting in which the rows of a comparison differ."""

    setting: str
    values: Names  # of each row; "" where it does not have the setting


class Points(Content):
    """What a figure draws of one run; which keys there are depends on the kind of figure."""

    value: Number | None = None  # the number that stands for it in a table
    value_is: str = ""
    x: list[Finite] = []
    y: list[Finite] = []
    bound: Finite = 0.0
    label: list[Annotated[int, Field(ge=0)]] = []
    by_text: list[Annotated[int, Field(ge=0)]] = []
    with_prototypes: list[Annotated[int, Field(ge=0)]] = []
    present: list[Literal["both", "text", "image"]] | None = None
    class_names: Names = []
    partition_counts: list[list[Count]] = []
    partition_class_names: Names = []
    partition_note: str | None = None
    panels: list[str] = []
    steps: list[Count] = []
    psnr: list[Number] = []
    label_found: bool = False
    label_from_keys: bool = False
    feature_cosine: Number | None = None

    @model_validator(mode="after")
    def lengths_agree(self) -> Self:
        if self.label:
            same_lengths(x=self.x, y=self.y, label=self.label, present=self.present)
            same_lengths(by_text=self.by_text or None, with_prototypes=self.with_prototypes or None, label=self.label)
        for numbers in (self.label, self.by_text, self.with_prototypes):
            if self.class_names and numbers and max(numbers) >= len(self.class_names):
                raise ValueError("a class has no name")
        square(self.partition_counts, len(self.partition_class_names), "partition_counts")
        same_lengths(steps=self.steps, psnr=self.psnr)
        return self


class GridPoints(Points):
    """What a figure draws of one cell."""

    row: str
    column: str


Kind = Literal["table", "curves", "lines", "bars", "radar", "scatter", "map", "bubbles", "panels"]

NEEDED = {
    "scatter": ("y", "bound"),
    "map": ("x", "y", "label"),
    "bubbles": ("partition_counts", "partition_class_names"),
    "panels": ("panels", "steps", "psnr", "label_found"),
}


class Averaged(Content):
    """Columns of several datasets that are alike otherwise, and the name of their average."""

    name: str
    columns: Names


class Failure(Content):
    row: str
    column: str
    seed: int
    error: str


class TunedCell(Content):
    """The settings tried in a cell on validation images, and the one chosen."""

    row: str
    column: str
    tried: Names
    validation: list[Finite | None]  # accuracy of each, the mean over seeds; None where a run failed
    chosen: str
    images: Count
    seeds: Count
    untrained: Finite  # accuracy of the model before training
    at_edge: Names = []  # settings whose chosen value is the smallest or the largest
    ties: Names = []  # further settings that are as good

    @property
    def best(self) -> float | None:
        return dict(zip(self.tried, self.validation, strict=True)).get(self.chosen)


class AgainstRow(Content):
    """A row against the one that all others of its column are compared with."""

    row: str
    column: str
    reference: str
    difference: Amount  # of the means over the seeds that both have
    seeds: list[Count]
    p: Finite | None = None  # of a paired t-test over seeds
    holm: Finite | None = None  # with Holm's correction over the rows of the column


class Comparison(Content):
    """comparison.json of a comparison or of a reproduced recipe."""

    recipe: str | None = None
    shows: str | None = None
    label: str | None = None
    note: str | None = None
    findings: list[str] = []
    fedvl_version: str = ""
    date: str = ""
    command: str = ""
    title: str = ""
    opening: str | None = None
    kind: Kind
    unit: str = ""
    seeds: Count = 1
    test: str = ""
    rows: Names
    columns: Names
    cells: list[GridCell]
    averages: list[Averaged] = []
    series: list[GridSeries] = []
    points: list[GridPoints] = []
    facts: dict[str, list[Scalar]] = {}
    curves: list[GridSeries] = []
    different: list[Different] = []
    failures: list[Failure] = []
    tuned: list[TunedCell] = []
    against: list[AgainstRow] = []
    style: TableStyle = "mean-std"
    settings: dict[str, object] = {}  # as they were asked for
    grid: dict[str, object] = {}  # with what its cells try; `fedvl verify` performs it again

    @property
    def places(self) -> dict[tuple[str, str], GridCell]:
        return {cell.place: cell for cell in self.cells}

    @model_validator(mode="after")
    def points_have_what_is_drawn(self) -> Self:
        for points in self.points:
            for key in NEEDED.get(self.kind, ()):
                if key not in points.model_fields_set:
                    raise ValueError(f"a figure of this kind needs {key}")
        return self
