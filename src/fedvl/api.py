"""The front door from Python: what the command line does, as functions that return values.

    import fedvl

    result = fedvl.run(method="fst-cbdg", dataset="photos/", clients=5)
    result.accuracy, result.zero_shot_accuracy, result.rounds
    result.predict("new-photos/", classes=["cat", "dog"])

``method`` may also be a class, ``dataset`` arrays with labels, and ``partition`` rows by client.
Keyword arguments are the flags of the command line (``per_round=5``) and settings as
``**{"training.learning_rate": 0.1}``. Mistakes raise :class:`fedvl.FedVLError`: one sentence.
"""

import csv
import difflib
import inspect
import io
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from pydantic import BaseModel

from fedvl.config import (
    FLAGS,
    Experiment,
    field_help,
    field_type,
    gather_settings,
    nested,
    overlay,
    setting_field,
    setting_names,
    toml_value,
)
from fedvl.display import display_here
from fedvl.errors import FedVLError
from fedvl.files import SHORTENED
from fedvl.methods import register
from fedvl.report.notebook import frame, html_table
from fedvl.runs.contents import Result
from fedvl.runs.folder import RunFolder
from fedvl.runs.objects import settings_of_objects

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from fedvl.comparisons.contents import Comparison as Summary
    from fedvl.data.given import AnyImage
    from fedvl.report.notebook import Chart
    from fedvl.runs.looking import OnRound
    from fedvl.serve.model import Line, TrainedModel
    from fedvl.tensors import Tensors

P = ParamSpec("P")
R = TypeVar("R")
Row = dict[str, Any]
# Not narrower, for type checkers would then refuse **{"training.learning_rate": 0.1}, which might be any of the arguments.
# What is given is checked when it is given.
Given = Any


class RunResult:
    """A finished run: its figures, its model and its files."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.figures: Result = folder.result  # everything that result.json holds
        self._model = cache(self._open)

    @property
    def folder(self) -> Path:
        return self._folder.path

    @property
    def accuracy(self) -> float | None:
        """Percent of the test images that the federated model gets right."""
        return self.figures.accuracy

    @property
    def zero_shot_accuracy(self) -> float | None:
        """The same for the pretrained model; None if it cannot name classes."""
        return self.figures.zero_shot_accuracy

    @property
    def rounds(self) -> Any:
        """One row per round: a DataFrame if pandas is installed, else a list of dicts."""
        return frame([record.to_dict() for record in self._folder.rounds])

    @property
    def remarks(self) -> list[str]:
        """What the command line says below its table, in sentences."""
        from fedvl.report.ending import ending

        return ending(self.figures)

    @property
    def clients(self) -> Any:
        """One row per client: its training images by class, and its accuracy if it was tested."""
        known = self.figures
        columns: dict[str, Sequence[Any]] = {
            "test_images": known.per_client_test_images,
            "accuracy": known.per_client_accuracy,
            "zero_shot_accuracy": known.zero_shot_per_client_accuracy,
        }
        rows: list[Row] = []
        for client, counts in enumerate(known.partition_counts):
            by_class = dict(zip(known.partition_class_names, counts, strict=True))
            tested = {name: values[client] for name, values in columns.items() if values}
            rows.append({"client": client, "images": sum(counts), **by_class, **tested})
        return frame(rows)

    @property
    def predictions(self) -> Any:
        """One row per test image, most unsure first: file, truth, prediction, share and entropy."""
        path = self._folder.file("test.csv")
        if not path.is_file():
            raise FedVLError(f"The run in {self.folder} has no test.csv; run it again with a test.")
        with path.open(encoding="utf-8", newline="") as file:
            rows: list[Row] = list(csv.DictReader(file))
        numbers = ("share", "entropy")
        return frame([{**row, **{name: float(row[name]) if row[name] else None for name in numbers}} for row in rows])

    def tensors(self, round: int | None = None, client: int | None = None) -> "Tensors":
        """Return the shared tensors, or those of a client's own: private ones and last update.

        They are of the round whose model is kept; the journal also has the last one.
        """
        from fedvl.federation.journal import BEST, Journal, chosen_round, read_state

        rounds = self.figures.rounds or 0
        if not rounds:
            return self._folder.tensors()[0]
        if round not in (None, rounds):
            raise FedVLError(
                f"The run in {self.folder} keeps the tensors of round {rounds}, its last, and not those of round {round}; "
                "collect them with on_round."
            )
        found = Journal(self._folder.file("journal")).tensors(rounds)
        kept = chosen_round(found) if round is None else {k: t for k, t in found.items() if not k.startswith(BEST)}
        state = read_state(kept, "cpu")
        if client is None:
            return state.shared
        if not 0 <= client < len(self.figures.partition_counts):
            raise FedVLError(f"The run in {self.folder} has no client {client}; clients count from 0.")
        return {**state.last.get(client, {}), **state.private.get(client, {})}

    def export(
        self, folder: str | Path, classes: str | Sequence[str] | None = None, *, client: int | None = None
    ) -> Path:
        """Write the model as a folder that needs no FedVL, as ``fedvl export`` does; return it."""
        from fedvl.serve.export import export

        with torch_as_new():
            export(self._model(None), Path(folder), None if classes is None else _listed(classes), client)
        return Path(folder)

    def predict(
        self,
        images: "AnyImage | Sequence[AnyImage]",
        classes: str | Sequence[str] | None = None,
        *,
        top: int = 3,
        client: int | None = None,
        unsure: float | None = None,
        device: str | None = None,
    ) -> Any:
        """Predict images, a row each: files, folders, PIL images or NumPy arrays (0 to 255).

        ``classes`` are any names if the method allows it, else the run's own; ``client`` takes that
        client's personal model. The answer is "unsure" where the likeliest name's share is below
        ``unsure``, or below the run's setting of that name.
        """
        from fedvl.data.given import image_sources
        from fedvl.serve.model import predict_images

        if top < 1:
            raise FedVLError(f"At least one name is returned for an image; top is {top}.")
        sources = list(image_sources(images))
        with torch_as_new():
            model = self._model(device)
            user = model.user(None if classes is None else _listed(classes), client=client, unsure=unsure)
            lines = list(predict_images(model, user, sources, top))
        return frame([_prediction(line) for line in lines])

    def _open(self, device: str | None) -> "TrainedModel":
        from fedvl.serve.model import TrainedModel

        return TrainedModel(self._folder, device)

    def chart(self) -> "Chart":
        """Draw the accuracy of each round against zero-shot, as the report does."""
        from fedvl.report.charts.lines import Series, line_chart
        from fedvl.report.notebook import Chart
        from fedvl.report.reading import series

        accuracy, reference = series(self._folder, "per_round", "accuracy"), self.zero_shot_accuracy
        if not accuracy:
            raise FedVLError(f"The run in {self.folder} has no rounds to draw.")
        drawn = line_chart([Series("", accuracy)], reference, 640, 260, "accuracy, %", unit=" %")
        return Chart(drawn, self._title + ("; dashed: zero-shot" if reference is not None else ""))

    def images_page(self) -> Path:
        """Write images.html, to browse the test images and correct labels, and return its path."""
        from fedvl.report.images_page import write_images_page

        with torch_as_new(), display_here(quiet=True) as display:
            return write_images_page(self._folder, display)

    def report(self) -> Path:
        """Write report.html again and return its path."""
        from fedvl.report.page import write_report

        return write_report(self.folder)

    @property
    def _title(self) -> str:
        return f"{self.figures.method} on {self.figures.dataset}"

    def __repr__(self) -> str:
        reference = f", zero-shot {self.zero_shot_accuracy:.2f} %" if self.zero_shot_accuracy is not None else ""
        reached = f"{self.accuracy:.2f} %{reference}" if self.accuracy is not None else "no test images"
        return f"<{self._title}: {reached}; {self.folder}>"

    def _repr_html_(self) -> str:
        from fedvl.report.tables import accuracy_rows

        rows = [(row.label, row.text) for row in accuracy_rows(self.figures) if not row.label.startswith("Macro")]
        rows += [("Rounds", str(self.figures.rounds)), ("Folder", str(self.folder))]
        return html_table([], [[escape(cell) for cell in row] for row in rows], title=self._title)


class Comparison:
    """Methods side by side: mean, deviation and each seed of every method and column."""

    def __init__(self, summary: "Summary", folder: Path) -> None:
        self.summary, self.folder = summary, folder

    @property
    def rows(self) -> list[Row]:
        """One for each method and column; ``runs`` are the folders, for ``fedvl.open_run``."""
        kept = ("row", "column", "measure", "mean", "deviation", "n", "best", "significant", "chosen", "values")
        return [
            {
                **{name: getattr(cell, name) for name in kept},
                "runs": [str(self.folder / "runs" / run) for run in cell.runs],
            }
            for cell in self.summary.cells
        ]

    def to_pandas(self) -> Any:
        """Return the table as a pandas DataFrame."""
        table = frame(self.rows)
        if isinstance(table, list):
            raise FedVLError("A DataFrame needs pandas; install it with pip install pandas, or use .rows.")
        return table

    def report(self) -> Path:
        """Write report.html again and return its path."""
        from fedvl.report.page import write_report

        return write_report(self.folder)

    def __repr__(self) -> str:
        from fedvl.display import Console
        from fedvl.report.comparison_tables import footnote, terminal_tables

        text = io.StringIO()
        console = Console(file=text, width=120, color_system=None, force_jupyter=False)
        for table in terminal_tables(self.summary, console.width):
            console.print(table)
        return text.getvalue() + footnote(self.summary)

    def _repr_html_(self) -> str:
        from fedvl.report.comparison_tables import cell_text, footnote

        cells = self.summary.places
        body = []
        for row in self.summary.rows:
            found = [cells.get((row, column)) for column in self.summary.columns]
            texts = [(escape(cell_text(cell)), cell is not None and cell.best) for cell in found]
            body.append([escape(row), *(f"<b>{text}</b>" if best else text for text, best in texts)])
        return html_table(["", *self.summary.columns], body, note=footnote(self.summary))


def with_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """List the settings that have a flag as keyword arguments, in signature and docstring."""
    signature = inspect.signature(function)
    fields = {name: setting_field(setting) for name, setting in FLAGS.items()}
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=keyword_type(field))
        for name, field in fields.items()
    ]
    *own, settings = signature.parameters.values()
    function.__signature__ = signature.replace(parameters=[*own, *keywords, settings])  # type: ignore[attr-defined]
    entries = [f"- ``{name}``: {field_help(field)}" for name, field in fields.items()]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", *entries])
    return function


def keyword_type(field: "FieldInfo") -> Any:
    """Return the type of a keyword argument; a section such as ``privacy`` is one text."""
    kind = field_type(field)
    return (str if isinstance(kind, type) and issubclass(kind, BaseModel) else kind) | None


@with_keywords
def run(
    experiment: Given = None,
    *,
    out: Given = None,
    quiet: Given = False,
    on_round: Given = None,
    **settings: Any,
) -> RunResult:
    """Run one experiment; the same settings give the same bits as ``fedvl run``.

    ``experiment`` is a TOML file of settings, which the keyword arguments below override. Pass any
    other setting as ``**{"training.learning_rate": 0.1}``. The run is written to the folder
    ``out``, or to runs/METHOD-DATASET.

    ``method`` may be a subclass of ``Method``. ``dataset`` may be ``(images, labels)`` or
    ``(images, labels, test_images, test_labels)``: arrays of uint8, PIL images or files, or a row
    of floats for each image, made by ``model``; labels are class names. ``partition`` may have the
    rows of each client. After each round ``on_round(record, shared, private)`` gets its record,
    copies of the shared tensors, and of the private ones of the clients that took part. It changes
    no bit.
    """
    from fedvl.runs.settings import new_experiment

    given = gather_settings(Path(experiment) if experiment else None, {})
    overlay(given, settings_of(_named(settings, given), FLAGS, ("out", "quiet", "on_round")))
    with RunFolder.create(Path(out) if out else None, new_experiment(given)) as folder:
        return _finished(folder, quiet, on_round)


def resume(
    folder: str | Path,
    *,
    quiet: bool = False,
    trust_method: bool = False,
    method: type | None = None,
    on_round: "OnRound | None" = None,
) -> RunResult:
    """Continue an interrupted run from its last committed round, to the same bits.

    ``method`` is the class of a run that was given one in another process.
    """
    if method is not None:
        register(method)
    found = RunFolder(Path(folder), trust_method)
    if not found.exists:
        raise FedVLError(f"There is no run in {folder}; start one with fedvl.run.")
    if found.federation is not None:
        raise FedVLError(f"The run in {folder} is one between machines; continue it by fedvl resume {folder}.")
    with found.lock():
        return _finished(found, quiet, on_round)


def open_run(folder: str | Path, *, trust_method: bool = False, method: type | None = None) -> RunResult:
    """Open a finished run, or a party's newest; ``trust_method`` runs a method's file in it.

    ``method`` is the class of a run that was given one in another process.
    """
    if method is not None:
        register(method)
    return RunResult(RunFolder.open(Path(folder), trust_method))


def compare(
    methods: Given = (),
    *,
    grid: Given = None,
    dataset: Given = (),
    partition: Given = (),
    seeds: Given = None,
    tune: Given = None,
    validation: Given = None,
    references: Given = True,
    against: Given = None,
    style: Given = "mean-std",
    jobs: Given = 1,
    out: Given = "comparisons/comparison",
    quiet: Given = False,
    **settings: Any,
) -> Comparison:
    """Compare methods over datasets, partitions and seeds; reuse finished runs.

    ``grid`` is a TOML file of rows and columns instead of methods. Each cell is run with
    ``seeds`` seeds, 3 by default. ``tune`` has the values of each setting to choose from, for each
    cell, on the share ``validation`` of the training images (0.2 by default). ``references`` adds
    rows of zero-shot and ridge. ``against`` names a row to compare all others with: p-values by
    column, with Holm's correction. ``style`` is that of table.tex, "mean-std" or "interval".
    ``jobs`` runs at once, in processes of their own. Methods may be classes. Further arguments are
    those of :func:`run`, for every run.
    """
    from fedvl.comparisons.contents import table_style
    from fedvl.comparisons.grid import Variant, read_grid
    from fedvl.comparisons.jobs import perform_side_by_side
    from fedvl.comparisons.references import with_references, without_refused
    from fedvl.comparisons.run import flags_grid, portable, summarise
    from fedvl.comparisons.tuning import trials_of, write_grid
    from fedvl.data.sources import Opener
    from fedvl.display import GridDisplay
    from fedvl.report.page import write_comparison
    from fedvl.runs.settings import resolve_experiment

    own = [
        "methods",
        "dataset",
        "partition",
        "seeds",
        "tune",
        "validation",
        "references",
        "against",
        "style",
        "jobs",
        "out",
        "quiet",
    ]
    style = table_style(_plain(style))
    objects = _named({**settings, "dataset": dataset, "partition": partition}, {})
    dataset, partition = objects.pop("dataset"), objects.pop("partition")
    base = settings_of(objects, [flag for flag in FLAGS if flag not in ("method", "seed", *own)], own)
    rows, datasets, partitions = _listed(_registered(methods)), _listed(dataset), _listed(partition)
    if not (isinstance(jobs := _plain(jobs), int) and jobs >= 1):
        raise FedVLError(f"jobs is how many runs are at work at once, at least one, and not {SHORTENED.repr(jobs)}.")
    if jobs > 1 and (classes := [name for name in rows if "@" in name and not name.endswith(".py")]):
        raise FedVLError(
            f"{classes[0].partition('@')[0]} was given as a class, which other processes do not know; write it to a file, or "
            "leave out jobs."
        )
    if (grid is None) == (not rows):
        raise FedVLError('Name the methods (["linear", "fst-cbdg"]), or give a TOML file of rows and columns as grid.')
    if grid is not None and (datasets or partitions):
        raise FedVLError(f"The datasets and partitions of {grid} are its columns; leave out dataset and partition.")
    if seeds is not None and not (isinstance(seeds := _plain(seeds), int) and seeds >= 1):
        raise FedVLError(f"seeds is how often each method is run, at least once, and not {seeds!r}.")
    if grid is None:
        wanted = flags_grid(rows, datasets, partitions, seeds or 3, base)
    else:
        wanted = read_grid(Path(grid)).under(Variant(settings=base, seeds=seeds))
    axes = {key: [_plain(value) for value in values] for key, values in (tune or {}).items()}
    wanted = wanted.tuned_by(axes, _plain(validation))
    wanted = portable(with_references(wanted, given=bool(references))).compared_with(_plain(against))
    # all of them, so that a mistake in the last shows before the first is run
    experiments = [resolve_experiment(case.settings) for case in (*wanted.cases(), *trials_of(wanted).cases())]
    folder = Path(out)
    with torch_as_new(experiments[0].federation.threads), display_here(quiet) as display:
        opener = Opener.once()
        outcome = without_refused(perform_side_by_side(wanted, folder / "runs", jobs, GridDisplay(display), opener))
    words = ["fedvl", "compare", *([str(grid)] if grid is not None else [])]
    for flag, names in (("--methods", rows), ("--dataset", datasets), ("--partition", partitions)):
        words += [flag, ",".join(names)] if names else []
    for key, values in axes.items():
        words += ["--tune", f"{key}={','.join(map(toml_value, values))}"]
    words += ["--validation", str(validation)] if validation is not None else []
    words += [] if references else ["--no-references"]
    words += ["--against", str(against)] if against is not None else []
    words += ["--style", style] if style != "mean-std" else []
    words += ["--seeds", str(wanted.seeds), *_assignments(base), "--out", str(folder)]
    summary = summarise(outcome, shlex.join(words), wanted).model_copy(update={"style": style})
    write_comparison(summary, folder)
    if outcome.tuned:
        write_grid(outcome.grid, folder / "tuned.toml")
    if summary.failures:
        failed = summary.failures[0]
        raise FedVLError(
            f"{len(summary.failures)} of {len(experiments)} runs failed; the first is {failed.row}, seed {failed.seed}: "
            f"{failed.error}"
        )
    return Comparison(summary, folder)


@with_keywords
def sweep(
    experiment: Given = None,
    *,
    tune: Given = None,
    random: Given = None,
    validation: Given = 0.2,
    seeds: Given = 1,
    out: Given = "comparisons/sweep",
    quiet: Given = False,
    **settings: Any,
) -> Comparison:
    """Choose settings on validation images; look at the test once, for the chosen one.

    ``tune`` has the values of each setting to choose from, or a text "LOW..HIGH" or
    "LOW..HIGH:log" of which ``random`` settings are drawn. Each is tried with ``seeds`` seeds on
    the share ``validation`` of the training images. Further arguments are those of :func:`run`.
    """
    from fedvl.comparisons.sweep import chosen_grid, perform_sweep, read_axes, sweep_grid
    from fedvl.comparisons.tuning import write_grid
    from fedvl.data.sources import Opener
    from fedvl.display import GridDisplay
    from fedvl.report.page import write_comparison
    from fedvl.runs.settings import new_experiment

    base = gather_settings(Path(experiment) if experiment else None, {})
    own = ("tune", "random", "validation", "seeds", "out", "quiet")
    overlay(base, settings_of(_named(settings, base), FLAGS, own))
    written = [f"{key}={_values(values)}" for key, values in (tune or {}).items()]
    grid = sweep_grid(base, read_axes(written), _plain(random), _plain(validation), _plain(seeds))
    experiments = [new_experiment(case.settings) for case in grid.cases()]
    words = ["fedvl", "sweep", *_assignments(base), *(word for each in written for word in ("--set", each))]
    words += ["--random", str(random)] if random is not None else []
    words += ["--validation", str(validation), "--seeds", str(seeds), "--out", str(out)]
    folder = Path(out)
    with torch_as_new(experiments[0].federation.threads), display_here(quiet) as display:
        summary = perform_sweep(grid, folder / "runs", GridDisplay(display), Opener.once(), shlex.join(words))
    write_comparison(summary, folder)
    if chosen := chosen_grid(grid, summary):
        write_grid(chosen, folder / "chosen.toml")
    if not chosen:
        raise FedVLError(f"No setting was tried with every seed; the first failed: {summary.failures[0].error}")
    return Comparison(summary, folder)


def open_comparison(folder: str | Path) -> Comparison:
    """Open what ``fedvl compare``, ``fedvl sweep`` or ``fedvl reproduce`` wrote to a folder."""
    from fedvl.comparisons.contents import Comparison as Summary
    from fedvl.files import no_link, read_json, validated
    from fedvl.report.page import COMPARISON

    path = no_link(Path(folder) / COMPARISON)
    found = read_json(path)
    if found is None:
        raise FedVLError(f"There is no comparison in {folder}; give the folder that fedvl compare wrote.")
    return Comparison(validated(Summary, found, path), Path(folder))


def _values(values: Any) -> str:
    """Return the values of a setting as the command line has them; a text may be a range."""
    return values if isinstance(values, str) else ",".join(toml_value(_plain(value)) for value in values)


def _named(settings: Mapping[str, Any], given: Row) -> Row:
    """Replace Python objects among keyword arguments by names and files."""
    model = settings.get("model") or given.get("model", {}).get("name", Experiment().model.name)
    return settings_of_objects(settings, str(model))


def _registered(methods: Any) -> Any:
    """Replace classes among methods by the names that this process loads them by."""
    if isinstance(methods, str | Path):
        return methods
    several = [methods] if isinstance(methods, type) else methods
    return [register(method) if isinstance(method, type) else method for method in several]


def settings_of(given: Mapping[str, Any], flags: Iterable[str], own: Sequence[str]) -> Row:
    """Nest keyword arguments: flags by their names, then settings as section.key; None is absent.

    ``own`` are further arguments of the function, named where one is mistaken.
    """
    settings: Row = {}
    for name in sorted(given, key=lambda name: "." in name):  # as --set wins over flags
        if "." not in name and name not in flags:
            raise FedVLError(f"There is no argument '{name}'; {_meant(name, [*flags, *own])}")
        if given[name] is not None:
            overlay(settings, nested(FLAGS.get(name, name), _plain(given[name])))
    return settings


def _meant(name: str, known: Sequence[str]) -> str:
    """Say which argument or setting a wrong name is close to, or else which there are."""
    for setting in setting_names(Experiment):
        if setting.endswith(f".{name}"):
            return f'it is a setting: give it as **{{"{setting}": ...}}.'
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.5):
        return f"did you mean '{close[0]}'?"
    return f'arguments are {", ".join(known)}, and settings such as **{{"training.learning_rate": 0.1}}.'


def _plain(value: Any) -> Any:
    """Return a path as text, and NumPy's numbers as Python's."""
    if isinstance(value, Path):
        return str(value)
    return value.item() if hasattr(value, "item") else value


def _assignments(settings: Row) -> list[str]:
    """Return nested settings as words of the command line."""
    pairs: list[tuple[str, Any]] = []
    for section, value in settings.items():
        named = value.items() if isinstance(value, dict) else [("", value)]
        pairs += [(f"{section}.{key}".rstrip("."), each) for key, each in named]
    return [word for key, value in pairs for word in ("--set", f"{key}={toml_value(value)}")]


def _finished(folder: RunFolder, quiet: bool, on_round: "OnRound | None") -> RunResult:
    from fedvl.report.ending import no_better
    from fedvl.report.page import write_report
    from fedvl.runs.experiment import complete

    with torch_as_new(folder.experiment.federation.threads), display_here(quiet) as display:
        complete(folder, display, on_round=on_round)
    write_report(folder.path)
    if not quiet:
        for sentence in no_better(folder.result):
            warnings.warn(sentence, stacklevel=3)
    return RunResult(folder)


@contextmanager
def torch_as_new(threads: int | None = None) -> Iterator[None]:
    """Set torch for a while as the command line finds it, so that the bits are the same.

    ``threads`` are those of the run: text features, made before its first round, depend on them.
    """
    import torch

    before, kind, precision = (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
    )
    torch.set_num_threads(threads or before)
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(before)
        torch.set_default_dtype(kind)
        torch.set_float32_matmul_precision(precision)


def _prediction(line: "Line") -> Row:
    """Flatten one prediction: the likeliest name first, all of the ranked names beside it."""
    from fedvl.serve.model import answer_of

    ranked, zero_shot = line.get("ranked", []), line.get("zero_shot", [])
    return {
        "image": line["image"],
        "answer": answer_of(line),
        "name": ranked[0]["name"] if ranked else None,
        "score": ranked[0]["score"] if ranked else None,
        "ranked": [(each["name"], each["score"]) for each in ranked],
        "zero_shot": zero_shot[0]["name"] if zero_shot else None,
        "refused": line.get("refused"),
    }


def _listed(names: str | Path | Sequence[str | Path]) -> list[str]:
    """Return names as a list; text has commas between them, as on the command line."""
    if isinstance(names, Path):
        return [str(names)]
    if isinstance(names, str):
        return [name.strip() for name in names.split(",") if name.strip()]
    return [str(name) for name in names]
