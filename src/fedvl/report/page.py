"""The page that a person opens after a run: one file, nothing fetched from anywhere."""

import base64
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedvl.report import charts
from fedvl.report.reading import Run, count_of, difference, flatten, number, read_run, series
from fedvl.report.tables import MISSING, Row, accuracy_rows, cost_rows, human_bytes, human_seconds, percent, points

WIDE, NARROW = 760, 340
ENDS = 12  # rows shown of each end of a long recall table; the rest unfolds
LONG_RECALL_TABLE = 30
PAIRS = 15
CHANGED = 0.05  # points; less than this is shown as 0.0


def write_report(run_folder: Path) -> Path:
    """Write report.html beside the result.json of a finished run; the same run gives the same bytes."""
    run = read_run(run_folder)
    path = run_folder / "report.html"
    aside = path.with_suffix(".html.tmp")
    # A class name may hold half of a surrogate pair, which UTF-8 has no bytes for.
    aside.write_bytes(render(run).encode("utf-8", errors="replace"))
    os.replace(aside, path)
    return path


def render(run: Run) -> str:
    environment = Environment(
        loader=PackageLoader("fedvl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    script = environment.get_template("report.js").render()
    return environment.get_template("report.html.j2").render(
        script=Markup(script),
        # Only this very script may run: should a name ever slip through the escaping, the browser still refuses it.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **_headline(run.result),
        **_curves(run),
        **_classes(run.result),
        **_troubles(run),
        costs=cost_rows(run.result, run.rounds),
        rounds=[_round_cells(entry) for entry in run.rounds],
        facts=_facts(run.result),
        config=list(flatten(run.result.get("config") or {})),
        command=str(run.result.get("command") or ""),
        notes=_notes(run),
    )


def _drawn(svg: str) -> Markup:
    """Charts escape every name that they draw."""
    return Markup(svg)


def _headline(result: dict[str, Any]) -> dict[str, Any]:
    change = difference(result)
    setting = [
        _several(result.get("clients"), "client"),
        _several(result.get("rounds"), "round"),
        result.get("partition"),
        f"{result['protocol']} protocol" if result.get("protocol") else None,
        f"{result['preset']} preset" if result.get("preset") else None,
        f"seed {result['seed']}" if result.get("seed") is not None else None,
    ]
    confusion = result.get("confusion")
    return {
        "method": str(result["method"]),
        "dataset": str(result.get("dataset", MISSING)),
        "model": str(result.get("model", MISSING)),
        "setting": [str(part) for part in setting if part],
        "accuracy": percent(result.get("accuracy")),
        "zero_shot": percent(result.get("zero_shot_accuracy")),
        "is_zero_shot": result["method"] == "zero-shot",
        "change": None if change is None else points(change),
        "change_kind": _kind(change),
        "scores": accuracy_rows(result),
        "test_images": f"{int(np.sum(confusion)):,}" if confusion else None,
    }


def _several(value: object, noun: str) -> str | None:
    known = number(value)
    return None if known is None else f"{known:,.0f} {noun}{'' if known == 1 else 's'}"


def _kind(change: float | None) -> str:
    """Which colour a difference has; one that is shown as 0.0 has none."""
    if change is None or abs(change) < CHANGED:
        return "same"
    return "gain" if change > 0 else "loss"


def _curves(run: Run) -> dict[str, Any]:
    accuracy = series(run, "per_round", "accuracy")
    loss = series(run, "per_round_loss", "loss")
    reference = number(run.result.get("zero_shot_accuracy"))
    return {
        "accuracy_charts": [
            _drawn(charts.line_chart(accuracy, reference, width, height, "accuracy, %", " %"))
            for width, height in ((WIDE, 300), (NARROW, 250))
            if accuracy
        ],
        "loss_charts": [
            _drawn(charts.line_chart(loss, None, width, height, "training loss", form=".3g"))
            for width, height in ((WIDE, 200), (NARROW, 190))
            if len(loss) > 1
        ],
        "has_reference": reference is not None,
    }


def _classes(result: dict[str, Any]) -> dict[str, Any]:
    """Everything that is shown class by class."""
    counts, confusion = result.get("partition_counts"), result.get("confusion")
    per_class: list[Any] = confusion or result.get("per_class_recall") or (counts or [[]])[0]
    names = [str(name) for name in result.get("class_names") or range(len(per_class))]
    held_names = [
        str(name) for name in result.get("partition_class_names") or names
    ]  # others than asked in an open set
    recalls = _recalls(result, names)
    held = counts and any(map(any, counts))  # where no sample has a label there is nothing to draw
    found: dict[str, Any] = {
        "partition": _drawn(charts.partition_chart(np.asarray(counts, dtype=np.int64), held_names)) if held else None,
        "partition_captions": _partition_captions(len(counts or ()), len(held_names), result.get("partition_note")),
        "recalls": recalls,
        "recall_ends": [],
        "compared": any(row["kind"] is not None for row in recalls),
        "tally": {kind: sum(row["kind"] == kind for row in recalls) for kind in ("gain", "loss", "same")},
        "confusion": None,
        "pairs": None,
    }
    if len(recalls) > LONG_RECALL_TABLE:
        found["recall_ends"] = [recalls[:ENDS], recalls[-ENDS:]]
    if confusion and len(confusion) <= charts.LARGEST_MATRIX:
        found["confusion"] = _drawn(charts.confusion_chart(np.asarray(confusion, dtype=np.int64), names))
    elif confusion:
        found["pairs"] = [
            {
                "true": names[row],
                "predicted": names[column],
                "count": f"{count:,}",
                "of": f"{of:,}",
                "share": percent(100 * count / of),
            }
            for row, column, count, of in charts.confused_pairs(np.asarray(confusion, dtype=np.int64), PAIRS)
        ]
    return found


def _partition_captions(clients: int, classes: int, note: object) -> list[str]:
    captions = ["The area of a bubble is the number of training samples."]
    if max(clients, classes) > charts.LARGEST_BUBBLES:
        captions = ["The stronger the colour, the more training samples."]
        if (group := charts.group_size(clients)) > 1:
            captions.append(f"Each column adds up {group} neighbouring clients.")
        if (group := charts.group_size(classes)) > 1:
            captions.append(f"Each row adds up {group} neighbouring classes and bears the name of the first.")
    return [*captions, str(note)] if note else captions


def _recalls(result: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """Rows of the recall table, largest gain first; without zero-shot figures, highest recall first."""
    recalls = result.get("per_class_recall") or []
    references = result.get("zero_shot_per_class_recall") or []
    if result["method"] == "zero-shot" or len(references) != len(recalls):
        references = [None] * len(recalls)
    rows = []
    for name, value, against in zip(names, recalls, references, strict=False):
        recall, reference = number(value), number(against)
        if recall is None:  # a class without test images
            continue
        change = None if reference is None else recall - reference
        row = {
            "name": name,
            "recall": f"{recall:.1f}",
            "reference": MISSING if reference is None else f"{reference:.1f}",
            "change": points(change, 1),
            "kind": None if change is None else _kind(change),
            "bar": _drawn(charts.recall_bar(recall, reference)),
        }
        rows.append(((-(change or 0.0), -recall, name), row))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _troubles(run: Run) -> dict[str, Any]:
    """Updates refused, clients dropped, images skipped: how many, and which."""
    skipped = run.result.get("skipped_images") or []
    return {
        "refused_count": count_of(run.result.get("refused_updates")),
        "refusals": [
            (entry["round"], refusal["client"], refusal["reason"])
            for entry in run.rounds
            for refusal in entry.get("refused") or []
        ],
        "dropped_count": sum(count_of(entry.get("dropped")) for entry in run.rounds),
        "drops": [
            (entry["round"], ", ".join(str(client) for client in entry["dropped"]))
            for entry in run.rounds
            if entry.get("dropped")
        ],
        "skipped_count": len(skipped),
        "skipped": [(image["image"], image.get("split", MISSING), image["reason"]) for image in skipped],
    }


def _round_cells(entry: dict[str, Any]) -> list[str]:
    loss, seconds = number(entry.get("loss")), number(entry.get("seconds"))
    up, down = number(entry.get("bytes_up")), number(entry.get("bytes_down"))
    return [
        str(entry["round"]),
        percent(entry.get("accuracy")),
        MISSING if loss is None else f"{loss:.4f}",
        str(count_of(entry.get("cohort"))) if "cohort" in entry else MISSING,
        str(count_of(entry.get("dropped"))),
        str(count_of(entry.get("refused"))),
        MISSING if up is None else human_bytes(up),
        MISSING if down is None else human_bytes(down),
        MISSING if seconds is None else human_seconds(seconds),
    ]


def _facts(result: dict[str, Any]) -> list[Row]:
    keys = {
        "started": "Started",
        "finished": "Finished",
        "device": "Device",
        "fedvl_version": "FedVL version",
        "schema": "Schema of result.json",
        "state_sha256": "SHA-256 of the shared tensors",
    }
    return [Row(label, str(result[key]), "") for key, label in keys.items() if result.get(key) is not None]


def _notes(run: Run) -> list[str]:
    notes = [str(note) for note in run.result.get("notes") or []]
    if run.unreadable_lines:
        lines = "1 line" if run.unreadable_lines == 1 else f"{run.unreadable_lines} lines"
        notes.append(f"{lines} of metrics.jsonl could not be read and were left out.")
    return notes
