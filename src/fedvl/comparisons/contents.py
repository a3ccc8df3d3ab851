"""What comparison.json may hold, checked when it is read."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedvl.files import Bounds, Content, Count, Finite, Names, Number, Scalar, same_lengths, square


class GridCell(Content):
    row: str
    column: str
    measure: str
    mean: Finite
    deviation: Finite | None
    n: Count
    values: list[Finite] = []
    seeds: list[Count] = []  # of these values
    runs: Names = []
    interval: Bounds | None = None
    images: Count | None = None
    protocol: str | None = None
    against: str | None = None
    p: Finite | None = None
    ahead: Finite | None = None  # of `against`, on the seeds that are compared
    compared: list[Count] = []  # the seeds that all rows of the column have
    near_chance: bool = False  # zero-shot is
    chosen: bool = False
    lead: Bounds | None = None
    best: bool
    significant: bool
    paper: Finite | None = None


class GridSeries(Content):
    row: str
    column: str
    values: list[Finite] = []


class Different(Content):
    """A setting in which the rows of a comparison differ."""

    setting: str
    values: Names


class GridPoints(Content):
    """What a figure draws of one cell; which keys there are depends on the kind of figure."""

    row: str
    column: str
    x: list[Finite] | None = None
    y: list[Finite] | None = None
    bound: Finite | None = None
    label: list[Annotated[int, Field(ge=0)]] | None = None
    by_text: list[Annotated[int, Field(ge=0)]] | None = None
    with_prototypes: list[Annotated[int, Field(ge=0)]] | None = None
    present: list[Literal["both", "text", "image"]] | None = None
    class_names: Names | None = None
    partition_counts: list[list[Count]] | None = None
    partition_class_names: Names | None = None
    partition_note: str | None = None
    panels: list[str] | None = None
    steps: list[Count] | None = None
    psnr: list[Number] | None = None
    label_found: bool | None = None
    label_from_keys: bool | None = None
    feature_cosine: Number | None = None

    @model_validator(mode="after")
    def lengths_agree(self) -> Self:
        if self.label is not None:
            same_lengths(x=self.x, y=self.y, label=self.label, present=self.present)
            same_lengths(by_text=self.by_text, with_prototypes=self.with_prototypes, label=self.label)
        for numbers in (self.label, self.by_text, self.with_prototypes):
            if self.class_names and numbers and max(numbers) >= len(self.class_names):
                raise ValueError("a class has no name")
        square(self.partition_counts, len(self.partition_class_names or ()), "partition_counts")
        same_lengths(steps=self.steps, psnr=self.psnr)
        return self


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


class Comparison(Content):
    """comparison.json of a comparison or of a reproduced recipe."""

    kind: Literal["table", "curves", "lines", "bars", "radar", "scatter", "map", "bubbles", "panels"]
    rows: Names
    columns: Names
    seeds: Count = 1
    cells: list[GridCell]
    averages: list[Averaged] = []
    series: list[GridSeries] = []
    points: list[GridPoints] = []
    facts: dict[str, list[Scalar]] = {}
    curves: list[GridSeries] = []
    different: list[Different] = []
    failures: list[Failure] = []
    tuned: list[TunedCell] = []
    title: str = ""
    opening: str | None = None
    unit: str = ""
    test: str = ""
    command: str = ""
    date: str = ""
    fedvl_version: str = ""
    recipe: str | None = None
    shows: str | None = None
    findings: list[str] = []
    label: str | None = None
    note: str | None = None

    @model_validator(mode="after")
    def points_have_what_is_drawn(self) -> Self:
        for points in self.points:
            for key in NEEDED.get(self.kind, ()):
                if getattr(points, key) is None:
                    raise ValueError(f"a figure of this kind needs {key}")
        return self
