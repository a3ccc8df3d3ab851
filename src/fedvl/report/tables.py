"""Human-readable numbers, and the table that the terminal shows after a run."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from fedvl.config import BY_CLIENT
from fedvl.evaluation.contents import Condition
from fedvl.evaluation.statistics import Interval, mean_of_shares, wilson
from fedvl.federation.records import Record
from fedvl.report.privacy import statement
from fedvl.report.reading import difference, gain, images_tested, intervals, number
from fedvl.runs.contents import Result, Seconds

Values = dict[str, Any]  # of a template

MISSING = "—"
MINUS = "\N{MINUS SIGN}"


class Row(NamedTuple):
    """One line of a table: `text` is rounded for display, `exact` is the full value."""

    label: str
    text: str
    exact: str


class Cell(NamedTuple):
    """One cell of a sortable table: its text, and the value it is sorted by ("" if unknown)."""

    text: str
    value: float | str


def cell_of(value: object, human: Callable[[float], str]) -> Cell:
    known = number(value)
    return Cell(MISSING, "") if known is None else Cell(human(known), known)


def _scaled(value: float, units: Sequence[str]) -> str:
    """Format with three significant digits in the largest unit with a value of at least 1."""
    sign, value = (MINUS, -value) if value < 0 else ("", value)
    index = 0
    # 999.5 would round to 1000, so it belongs to the next unit.
    while value >= 999.5 and index < len(units) - 1:
        value, index = value / 1000, index + 1
    digits = 0 if value >= 99.95 or (index == 0 and value == int(value)) else 1 if value >= 9.995 else 2
    return f"{sign}{value:.{digits}f} {units[index]}".rstrip()


def human_bytes(value: float) -> str:
    """Format in decimal units, as networks are billed: 1 kB is 1000 bytes."""
    return _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def human_count(value: float) -> str:
    return _scaled(value, ("", "k", "M", "G", "T", "P", "E"))


def human_seconds(value: float) -> str:
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 59.95:
        return f"{value:.1f} s"
    seconds = round(value)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    minutes = round(value / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def percent(value: object) -> str:
    known = number(value)
    return MISSING if known is None else f"{known:.2f} %"


def spread(interval: Interval | None, digits: int = 1) -> str:
    """Format an interval as ``70.0 to 77.7``; nothing where it is not known."""
    return "" if interval is None else f"{signed(interval.low, digits)} to {signed(interval.high, digits)}"


def signed(value: float, digits: int) -> str:
    text = f"{abs(value):.{digits}f}"
    return f"{MINUS}{text}" if value < 0 and float(text) else text


def sure(value: object, count: float) -> str:
    """Format a share of ``count`` images with its interval."""
    known = number(value)
    return percent(value) if known is None or not count else f"{percent(value)} ({spread(wilson(known, count))})"


def moment(text: str) -> str:
    """Return a time as a person writes it, and any other text as it is."""
    return re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)\+00:00$", r"\1 \2 UTC", text)


def p_value(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def points(value: float | None, digits: int = 2) -> str:
    """Format a signed difference of percentages; one that rounds to zero has no sign."""
    if value is None:
        return MISSING
    size = f"{abs(value):.{digits}f}"
    sign = "" if float(size) == 0 else "+" if value > 0 else MINUS
    return f"{sign}{size}"


OTHER_ACCURACIES = {"zero-shot": "Zero-shot accuracy", "centralised": "Centralised accuracy"}


def accuracy_label(method: str, result: Result) -> str:
    """Name a method's accuracy, which some protocols measure as the unweighted mean of clients."""
    label = OTHER_ACCURACIES.get(method, "Federated accuracy")
    return f"{label}, mean over clients" if result.protocol in BY_CLIENT else label


FAIRNESS = {
    "worst_client_accuracy": "Worst client",
    "worst_tenth_accuracy": "Worst tenth of the clients",
    "client_deviation": "Standard deviation over clients",
}


NEWCOMERS = {
    "newcomers_zero_shot_accuracy": "Newcomers, zero-shot",
    "newcomers_accuracy": "Newcomers, as they come",
    "newcomers_trained_accuracy": "Newcomers, after a round of their own",
}


CALIBRATION_ERRORS = {
    "ece": "Calibration error (ECE)",
    "uncalibrated_ece": "Calibration error without temperature",
    "zero_shot_ece": "Calibration error, zero-shot",
}


def accuracy_rows(result: Result) -> list[Row]:
    """Return the accuracies and macro metrics, each with its interval of 95 %."""
    known = intervals(result)

    def rate(label: str, key: str) -> Row:
        text = spread(known.get(key))
        value = getattr(result, key)
        return Row(label, f"{percent(value)} ({text})" if text else percent(value), _exact(value))

    rows = [rate(accuracy_label(result.method, result), "accuracy")]
    if result.method != "zero-shot" and not result.conditions:  # a fused model has no zero-shot accuracy
        rows.insert(0, rate(accuracy_label("zero-shot", result), "zero_shot_accuracy"))
        rows.append(Row("Difference", gain_text(result), _exact(difference(result))))
    for key, label in (("precision", "Macro precision"), ("recall", "Macro recall"), ("f1", "Macro F1")):
        rows.append(rate(label, f"macro_{key}"))
    for key, label in FAIRNESS.items():
        if getattr(result, key) is not None:
            rows.append(rate(label, key))
    for key, label in NEWCOMERS.items():
        if getattr(result, key) is not None:
            rows.append(rate(label, key))
    for key, label in CALIBRATION_ERRORS.items():
        if getattr(result, key) is not None and (key != "zero_shot_ece" or result.method != "zero-shot"):
            rows.append(rate(label, key))
    if result.backdoor_success is not None:
        rows.append(rate("Turned by the backdoor", "backdoor_success"))
    return rows


def gain_text(result: Result) -> str:
    """Return what was gained over zero-shot, how sure, and by which test."""
    change, test = difference(result), gain(result)
    if change is None:
        return MISSING
    sureness = "" if test is None else f" ({spread(test.interval)}; McNemar {p_value(test.p)})"
    return f"{points(change)} points{sureness}"


def sure_rows(result: Result) -> list[Row]:
    """Return how many answers are unsure below some shares, and how many others are right."""
    return [
        Row(
            f"Unsure below {100 * row.least:g} %",
            f"{row.unsure:.1f} % of the answers; right of the others: {sure(row.accuracy, row.images)}",
            f"{_exact(row.unsure)}, {_exact(row.accuracy)}",
        )
        for row in result.sure
    ]


def condition_rows(result: Result) -> list[Row]:
    """Return accuracy and macro F1 under each test condition of the missing-modality protocol."""
    count = images_tested(result)
    return [
        Row(
            f"Test {row.condition}: accuracy, macro F1",
            f"{sure(row.accuracy, count)}, {condition_f1(row)}",
            f"{_exact(row.accuracy)}, {_exact(row.macro_f1)}",
        )
        for row in result.conditions
    ]


def condition_f1(row: Condition) -> str:
    bounds = row.macro_f1_interval
    return known_spread(row.macro_f1, bounds) if bounds else percent(row.macro_f1)


SET_LABELS = {
    "own": "A client's own classes, among these",
    "local": "A client's own classes, among all base classes",
    "base": "Base classes, among all of them",
    "new": "New classes, among all of them",
    "hm3": "Harmonic mean of local, base and new (HM3)",
    "hm2": "Harmonic mean of base and new (HM2)",
    "cm": "Mean of local and HM2 (CM)",
}


def set_rows(result: Result) -> list[Row]:
    """Return the figures of the base-to-new protocol, each beside that of zero-shot."""
    rows = []
    for row in result.base_to_new:
        text = known_spread(row.accuracy, row.interval)
        if row.zero_shot_interval and result.method != "zero-shot":
            text += f"; zero-shot {known_spread(row.zero_shot_accuracy, row.zero_shot_interval)}"
        rows.append(Row(SET_LABELS[row.name], text, _exact(row.accuracy)))
    return rows


def dataset_rows(result: Result) -> list[Row]:
    """Return the accuracy on each of several datasets beside that of zero-shot, and their means."""
    found = [row for row in result.datasets if row.test_images and row.accuracy is not None]
    if len(found) < 2:
        return []
    compared = result.method != "zero-shot" and all(row.zero_shot_accuracy is not None for row in found)
    rows = []
    for row in found:
        text = sure(row.accuracy, row.test_images)
        text += f"; zero-shot {sure(row.zero_shot_accuracy, row.test_images)}" if compared else ""
        label = f"{row.dataset}, {row.test_images:,} images, {len(row.class_names)} classes"
        rows.append(Row(label, text, _exact(row.accuracy)))
    columns = [[row.accuracy or 0.0 for row in found]]
    columns += [[row.zero_shot_accuracy or 0.0 for row in found]] if compared else []
    means = [sum(column) / len(found) for column in columns]
    counts = [row.test_images for row in found]
    known = [mean_of_shares(column, counts) for column in columns]
    texts = [known_spread(mean, bounds) for mean, bounds in zip(means, known, strict=True)]
    return [*rows, Row(f"Mean of the {len(found)} datasets", "; zero-shot ".join(texts), _exact(means[0]))]


def tail_rows(result: Result) -> list[Row]:
    """Return the accuracy on classes with many, medium and few training images of a long tail."""
    rows = []
    for row in result.long_tail.groups if result.long_tail else []:
        if row.accuracy is None:
            continue
        text = sure(row.accuracy, row.test_images)
        if row.zero_shot_accuracy is not None and result.method != "zero-shot":
            text += f"; zero-shot {sure(row.zero_shot_accuracy, row.test_images)}"
        count = len(row.classes)
        label = f"{row.name.capitalize()}: {count} class{'' if count == 1 else 'es'}, {row.training_images:,} images"
        rows.append(Row(label, text, _exact(row.accuracy)))
    return rows


def known_spread(value: float | None, bounds: Sequence[float]) -> str:
    return f"{percent(value)} ({spread(Interval(*bounds))})"


def privacy_rows(result: Result) -> list[Row]:
    """Return what was spent of a privacy budget, of which unit and under what sampling."""
    spent = result.privacy
    return [Row("Differential privacy", statement(result), f"epsilon {spent.epsilon!r}")] if spent else []


def cost_rows(result: Result, rounds: Sequence[Record] = ()) -> list[Row]:
    """Return the costs; totals need metrics.jsonl, because cohorts differ between rounds."""
    kept = result.private_parameters
    private = [_cost_row("Private parameters per client", kept, human_count, "parameters")] if kept else []
    rows = [
        _cost_row("Trainable parameters", result.trainable_parameters, human_count, "parameters"),
        *private,
        _cost_row("Up, per client and round", result.bytes_up_per_client_round, human_bytes, "bytes"),
        _cost_row("Down, per client and round", result.bytes_down_per_client_round, human_bytes, "bytes"),
    ]
    up, down = _total(rounds, "bytes_up"), _total(rounds, "bytes_down")
    if up is not None and down is not None:
        rows.append(_cost_row("Up, whole run", up, human_bytes, "bytes"))
        rows.append(_cost_row("Down, whole run", down, human_bytes, "bytes"))
        rows.append(_cost_row("Up and down, whole run", up + down, human_bytes, "bytes"))
    if not result.parties:  # which train on machines and images of their own
        whose = "Local training, per round" if result.party else "Local training, largest client, per round"
        rows.append(_cost_row(whose, result.local_flops, _human_flops, "FLOPs"))
    rows += target_rows(result)
    seconds = result.seconds or Seconds()
    rows += [
        _cost_row("Encoding images", seconds.encode, human_seconds, "seconds"),
        _cost_row("Training", seconds.train, human_seconds, "seconds"),
        _cost_row("Evaluation", seconds.evaluate, human_seconds, "seconds"),
    ]
    if result.peak_memory_bytes is not None:
        rows.append(_cost_row("Peak memory", result.peak_memory_bytes, human_bytes, "bytes"))
    if result.peak_gpu_memory_bytes is not None:
        rows.append(_cost_row("Peak memory of the GPU", result.peak_gpu_memory_bytes, human_bytes, "bytes"))
    if result.seconds_per_image is not None:
        rows.append(_cost_row("Prediction for one image", result.seconds_per_image, human_seconds, "seconds"))
    return rows


MEMORY_TO_TARGET = {
    "memory_bytes_to_target": "peak memory",
    "gpu_memory_bytes_to_target": "peak memory of the GPU",
}


def target_rows(result: Result) -> list[Row]:
    """Return what it took until a round reached the target accuracy, where there is one."""
    target = number(result.setting("evaluation", "target_accuracy"))
    if target is None:
        return []
    if result.round_to_target is None:
        return [Row(f"To reach {target:g} %", "not reached", "not reached")]
    return [
        _cost_row(f"To reach {target:g} %: rounds", result.round_to_target, human_count, "rounds"),
        _cost_row(f"To reach {target:g} %: up and down", result.bytes_to_target, human_bytes, "bytes"),
        _cost_row(
            f"To reach {target:g} %: training of the largest client", result.flops_to_target, _human_flops, "FLOPs"
        ),
        _cost_row(f"To reach {target:g} %: training time", result.seconds_to_target, human_seconds, "seconds"),
        *(
            _cost_row(f"To reach {target:g} %: {label}", getattr(result, key), human_bytes, "bytes")
            for key, label in MEMORY_TO_TARGET.items()
            if getattr(result, key) is not None
        ),
    ]


def result_table(result: Result) -> Table:
    """Return the terminal's table: accuracy against zero-shot, then costs."""
    title = f"{result.method} on {result.dataset or MISSING}, {result.model or MISSING}"
    # Text, not markup: a dataset may be a path with square brackets in it.
    table = Table(title=Text(title), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in accuracy_rows(result):
        style = "bold" if row.label in ("Difference", accuracy_label(result.method, result)) else ""
        table.add_row(Text(row.label), Text(row.text), style=style)
    table.add_section()
    for row in (*condition_rows(result), *set_rows(result), *dataset_rows(result), *tail_rows(result)):
        table.add_row(Text(row.label), Text(row.text))
    table.add_section()
    for row in (*privacy_rows(result), *cost_rows(result)):
        table.add_row(Text(row.label), Text(row.text))
    return table


def _exact(value: object) -> str:
    known = number(value)
    if known is None:
        return "not recorded"
    return f"{value:,}" if isinstance(value, int) else repr(known)


def _human_flops(value: float) -> str:
    scaled = human_count(value)
    return f"{scaled}FLOPs" if scaled[-1].isalpha() else f"{scaled} FLOPs"


def _cost_row(label: str, value: object, human: Callable[[float], str], unit: str) -> Row:
    known = number(value)
    return Row(label, MISSING, "not recorded") if known is None else Row(label, human(known), f"{_exact(value)} {unit}")


def _total(rounds: Sequence[Record], key: str) -> int | None:
    """Return the sum over rounds, or None if a round lacks it: a partial total would mislead."""
    if not rounds or any(key not in record.model_fields_set for record in rounds):
        return None
    total: int = sum(getattr(record, key) for record in rounds)
    return total
