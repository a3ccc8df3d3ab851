"""The front door from Python: what the command line does, as functions that return values.

    import fedvl

    result = fedvl.run(method="fst-cbdg", dataset="photos/", clients=5)
    result.accuracy, result.zero_shot_accuracy, result.rounds
    result.predict("new-photos/", classes=["cat", "dog"])

Keyword arguments are the flags of the command line (``per_round=5``) and settings as
``**{"training.learning_rate": 0.1}``. Mistakes raise :class:`fedvl.errors.FedVLError`, one sentence that says what to do.
"""

import importlib.util
import shlex
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedvl.config import FLAGS, gather_settings, nested, overlay
from fedvl.display import display_here
from fedvl.errors import FedVLError
from fedvl.run_folder import RunFolder

if TYPE_CHECKING:
    from fedvl.serve.model import TrainedModel

Row = dict[str, Any]


class RunResult:
    """A finished run: its figures, its model and its files."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.figures: Row = folder.result  # everything that result.json holds

    @property
    def folder(self) -> Path:
        return self._folder.path

    @property
    def accuracy(self) -> float | None:
        """Percent of the test images that the federated model gets right."""
        return _number(self.figures.get("accuracy"))

    @property
    def zero_shot_accuracy(self) -> float | None:
        """The same for the pretrained model; None if it cannot name classes."""
        return _number(self.figures.get("zero_shot_accuracy"))

    @property
    def rounds(self) -> Any:
        """One row for each round: a pandas DataFrame if pandas is installed, else a list of dicts."""
        return frame(self._folder.rounds)

    @cached_property
    def _model(self) -> "TrainedModel":
        from fedvl.serve.model import TrainedModel

        return TrainedModel(self._folder)

    def predict(
        self,
        images: str | Path | Sequence[str | Path],
        classes: Sequence[str] | None = None,
        *,
        top: int = 3,
        client: int | None = None,
    ) -> Any:
        """Predict image files or folders of them; ``classes`` are any names if the method allows it."""
        from fedvl.serve.model import image_files, predict_files

        given = [images] if isinstance(images, str | Path) else images
        paths = image_files([Path(path) for path in given])
        lines = predict_files(self._model, self._model.user(classes, client=client), paths, top)
        return frame([_prediction(line) for line in lines])

    def report(self) -> Path:
        """Write report.html again and return its path."""
        from fedvl.report.page import write_report

        return write_report(self.folder)

    def __repr__(self) -> str:
        figures = self.figures
        reference = f", zero-shot {self.zero_shot_accuracy:.2f} %" if self.zero_shot_accuracy is not None else ""
        reached = f"{self.accuracy:.2f} %{reference}" if self.accuracy is not None else "no test images"
        return f"<{figures['method']} on {figures['dataset']}: {reached}; {self.folder}>"


class Comparison:
    """Methods side by side: one row for each method and column, with mean, deviation and each seed."""

    def __init__(self, summary: Row, folder: Path) -> None:
        self.summary, self.folder = summary, folder

    @property
    def rows(self) -> list[Row]:
        kept = ("row", "column", "measure", "mean", "deviation", "n", "best", "significant", "values")
        return [{name: cell[name] for name in kept} for cell in self.summary["cells"]]

    def to_pandas(self) -> Any:
        """Return the table as a pandas DataFrame."""
        if importlib.util.find_spec("pandas") is None:
            raise FedVLError("A DataFrame needs pandas; install it with pip install pandas, or use .rows.")
        import pandas

        return pandas.DataFrame(self.rows)

    def report(self) -> Path:
        """Write report.html again and return its path."""
        from fedvl.report.page import write_report

        return write_report(self.folder)

    def __repr__(self) -> str:
        from fedvl.report.comparison_tables import csv_table

        return csv_table(self.summary).strip()

    def _repr_html_(self) -> str:
        from fedvl.report.comparison_tables import html_table

        return html_table(self.summary)


def run(
    experiment: str | Path | None = None, *, out: str | Path | None = None, quiet: bool = False, **settings: Any
) -> RunResult:
    """Run one experiment; the same settings give the same bits as ``fedvl run``."""
    from fedvl.experiment import complete
    from fedvl.report.page import write_report
    from fedvl.settings import resolve_experiment

    given = gather_settings(Path(experiment) if experiment else None, {})
    overlay(given, settings_of(settings))
    with RunFolder.create(Path(out) if out else None, resolve_experiment(given)) as folder:
        with display_here(quiet) as display:
            complete(folder, display)
        write_report(folder.path)
    return RunResult(folder)


def open_run(folder: str | Path) -> RunResult:
    """Open the folder of a finished run."""
    return RunResult(RunFolder(Path(folder)))


def compare(
    methods: Sequence[str],
    *,
    dataset: str | Sequence[str] = (),
    partition: str | Sequence[str] = (),
    seeds: int = 3,
    out: str | Path = "comparisons/comparison",
    quiet: bool = False,
    **settings: Any,
) -> Comparison:
    """Compare methods over datasets, partitions and seeds; finished runs are not run again."""
    from fedvl.compare.run import flags_grid, perform_grid, summarise
    from fedvl.data.opener import Opener
    from fedvl.display import GridDisplay
    from fedvl.report.page import write_comparison

    grid = flags_grid(_listed(methods), _listed(dataset), _listed(partition), seeds, settings_of(settings))
    place = Path(out)
    with display_here(quiet) as display:
        outcome = perform_grid(grid, place / "runs", GridDisplay(display), Opener.once())
    words = ["fedvl", "compare", "--methods", ",".join(_listed(methods)), "--seeds", str(seeds), "--out", str(place)]
    summary = summarise(outcome, shlex.join(words))
    write_comparison(summary, place)
    if summary["failures"]:
        failed = summary["failures"][0]
        raise FedVLError(
            f"{len(summary['failures'])} of the runs failed; the first is {failed['row']}, seed {failed['seed']}: "
            f"{failed['error']}"
        )
    return Comparison(summary, place)


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Nest keyword arguments: flags by their names, settings as section.key."""
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if "." not in name and name not in FLAGS:
            raise FedVLError(
                f"There is no argument '{name}'; arguments are {', '.join(FLAGS)}, out, quiet and settings such as "
                '**{"training.learning_rate": 0.1}.'
            )
        if value is not None:
            plain = str(value) if isinstance(value, Path) else value
            overlay(settings, nested(FLAGS.get(name, name), plain))
    return settings


def frame(rows: list[Row]) -> Any:
    """Return rows as a pandas DataFrame if pandas is installed, else as they are."""
    if importlib.util.find_spec("pandas") is None:
        return rows
    import pandas

    return pandas.DataFrame(rows)


def _prediction(line: Row) -> Row:
    """Flatten one prediction: the likeliest name first, all of the ranked names beside it."""
    ranked, zero_shot = line.get("ranked", []), line.get("zero_shot", [])
    return {
        "image": line["image"],
        "name": ranked[0]["name"] if ranked else None,
        "score": ranked[0]["score"] if ranked else None,
        "ranked": [(each["name"], each["score"]) for each in ranked],
        "zero_shot": zero_shot[0]["name"] if zero_shot else None,
        "refused": line.get("refused"),
    }


def _listed(names: str | Sequence[str]) -> list[str]:
    return names.split(",") if isinstance(names, str) and names else list(names)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
