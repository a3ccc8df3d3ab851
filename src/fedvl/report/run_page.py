"""Template values for the page of one run."""

import re
from collections.abc import Sequence
from itertools import compress

import numpy as np
from markupsafe import Markup

from fedvl.evaluation.statistics import SIGNIFICANT, Paired, wilson
from fedvl.federation.records import Record
from fedvl.report import privacy
from fedvl.report.charts import classes, partition
from fedvl.report.charts.comparing import Bar, bar_chart, signed_bars
from fedvl.report.charts.lines import Series, line_chart
from fedvl.report.charts.scatter import MODALITIES, Point, key_of, map_chart
from fedvl.report.ending import contribution_lines, no_better, withdrawal_sentences
from fedvl.report.federation import describe_federation, name_of, own_classes, unheld
from fedvl.report.reading import difference, flatten, gain, images_tested, intervals, number, series
from fedvl.report.svg import COLOURS, colour
from fedvl.report.tables import (
    MISSING,
    Cell,
    Row,
    Values,
    accuracy_rows,
    cell_of,
    condition_f1,
    cost_rows,
    dataset_rows,
    human_bytes,
    human_seconds,
    moment,
    p_value,
    percent,
    points,
    privacy_rows,
    set_rows,
    spread,
    sure,
    sure_rows,
    tail_rows,
)
from fedvl.runs.contents import Embedding, Example, Examples, Result
from fedvl.runs.folder import RunFolder

IMAGES_PAGE = "images.html"  # the page of the test images, if it was written
SIZES = WIDE, NARROW = 848, 356
MODALITY_LABELS = {"both": "text and image", "text": "text only", "image": "image only"}
IMAGE_DATA = re.compile(r"data:image/(webp|png|jpeg);base64,[A-Za-z0-9+/=]+")
ENDS = 12  # rows shown at each end of a long recall table; the rest is folded
LONG_RECALL_TABLE = 30
PAIRS = 15
NAMED = 10  # parties, whose names stand below the title
ROUND_HEADS = ("round", "accuracy", "loss", "clients", "dropped", "refused", "up", "down", "time")
MAX_EXPECTED = 40  # clients whose expected accuracy is drawn; result.json has all
CHANGED = 0.05  # points; smaller changes are shown as 0.0


def describe_run(run: RunFolder) -> Values:
    """Return the template values of a run's page."""
    return {
        **_headline(run.result),
        **_curves(run),
        **_classes(run.result, run.file(IMAGES_PAGE).is_file()),
        **_protocol(run.result),
        **_trust(run),
        **_troubles(run),
        **describe_federation(run),
        "withdrawals": [" ".join(withdrawal_sentences(each)) for each in run.withdrawals],
        **_contributions(run),
        "examples": _examples(run.examples),
        "privacy": privacy.sentences(run.result),
        "beside": privacy.beside(run.result),
        "costs": [*privacy_rows(run.result), *cost_rows(run.result, run.rounds)],
        **_rounds(run),
        "facts": _facts(run.result),
        "config": [(key, value) for key, value in flatten(run.result.config) if key not in unheld(run.result)],
        "command": run.result.command or "",
        "notes": _notes(run),
    }


def drawn(svg: str) -> Markup:
    """Mark a chart as safe HTML: charts escape every name they draw."""
    return Markup(svg)


def _contributions(run: RunFolder) -> Values:
    """Return the chart of what clients contribute, and how it was measured."""
    found = run.contributions
    if found is None:
        return {"contributions": [], "contributed": ""}
    names = [name_of(run.result, client) for client in found.players]
    bounds: list[tuple[float, float] | None] = [(low, high) for low, high in found.intervals] or [None] * len(names)
    bars = [
        Bar(f"client {name}", value, 0, error=error)
        for name, value, error in zip(names, found.shapley, bounds, strict=True)
    ]
    charts = [drawn(signed_bars(bars, width, lambda value: f"{value:+.2f}")) for width in SIZES]
    return {"contributions": charts, "contributed": contribution_lines(found, names)[-1]}


def _headline(result: Result) -> Values:
    change = difference(result)
    setting = [
        who(result),
        _several(result.rounds, "round"),
        result.partition,
        f"{result.protocol} protocol" if result.protocol else None,
        f"{result.preset} preset" if result.preset else None,
        f"seed {result.seed}" if result.seed is not None else None,
    ]
    count, known, test = images_tested(result), intervals(result), gain(result)
    return {
        "method": result.method,
        "dataset": (result.dataset or MISSING).rstrip("/").rpartition("/")[2],  # without its folders
        "model": result.model or MISSING,
        "setting": [part for part in setting if part],
        "accuracy": percent(result.accuracy),
        "accuracy_interval": spread(known.get("accuracy")),
        "zero_shot": None if change is None else percent(result.zero_shot_accuracy),
        "zero_shot_interval": spread(known.get("zero_shot_accuracy")),
        "change": None if change is None else points(change),
        "change_interval": "" if test is None else f"{spread(test.interval)}, {p_value(test.p)}",
        "paired": None if test is None else paired_text(test),
        "change_kind": kind_of(change),
        "opening": opening(result),
        "scores": accuracy_rows(result),
        "test_images": f"{count:,}" if count else None,
    }


def who(result: Result) -> str | None:
    """Return who took part: a party among others, parties by name, or a number of clients."""
    if result.party:
        return f"{result.party}, one of {_several(result.clients, 'party', 'parties')}"
    names = [party.name for party in result.parties if party.took_part]
    return ", ".join(names) if 0 < len(names) <= NAMED else _several(result.clients, "client")


def opening(result: Result) -> str:
    """Say what was gained, over what, and how sure that is; "" where it is not known."""
    change, test, count = difference(result), gain(result), images_tested(result)
    if change is None:
        return ""
    where = f" on {_several(count, 'test image')}" if count else ""
    if abs(change) < CHANGED:
        return f"{result.method} neither gains nor loses accuracy over zero-shot{where}."
    verb = "gains" if change > 0 else "loses"
    size = f"{result.method} {verb} {abs(change):.1f} points of accuracy over zero-shot{where}"
    if test is None:
        return f"{size}."
    if test.p < SIGNIFICANT:
        return f"{size} (95 %: {spread(test.interval)})."
    return f"{size}, which may be chance (95 %: {spread(test.interval)}, {p_value(test.p)})."


def best_caption(result: Result, accuracy: list[tuple[int, float]]) -> str:
    """Name the best round, and what is kept."""
    if len(accuracy) < 2:
        return ""
    at, value = max(accuracy, key=lambda pair: (pair[1], -pair[0]))
    kept = "; its model is kept" if result.best_round else ""
    last = ", the last" if at == accuracy[-1][0] else ""
    return f"Best round: {at}{last}, {percent(value)}{kept}."


def paired_text(test: Paired) -> str:
    """Return the images that only one of two models has right."""
    return (
        f"{_several(test.gained, 'image')} right only after training, {_several(test.lost, 'image')} only before, of "
        f"{test.images:,}: McNemar's exact test, {p_value(test.p)}."
    )


def _several(value: object, noun: str, many: str = "") -> str | None:
    known = number(value)
    return None if known is None else f"{known:,.0f} {noun if known == 1 else many or noun + 's'}"


def kind_of(change: float | None) -> str:
    """Return the CSS class of a difference; one shown as 0.0 is "same"."""
    if change is None or abs(change) < CHANGED:
        return "same"
    return "gain" if change > 0 else "loss"


def _curves(run: RunFolder) -> Values:
    accuracy, name = series(run, "per_round", "accuracy"), "accuracy, %"
    reference = number(run.result.zero_shot_accuracy)
    if not accuracy and (accuracy := series(run, "per_round_validation", "validation")):
        name, reference = "accuracy on validation images, %", None
    best = max(accuracy, key=lambda pair: (pair[1], -pair[0]))[0] if len(accuracy) > 1 else None
    curves = [Series(run.result.method, accuracy)]
    if labels := series(run, "per_round_pseudo_label_accuracy", "pseudo_label_accuracy"):
        curves.append(Series("true pseudo-labels", labels))
    loss = series(run, "per_round_loss", "loss")
    return {
        "accuracy_charts": [
            drawn(line_chart(curves, reference, width, height, name, unit=" %", ring=best))
            for width, height in ((WIDE, 300), (NARROW, 250))
            if accuracy
        ],
        "loss_charts": [
            drawn(line_chart([Series("", loss)], None, width, height, "training loss", form=".3g"))
            for width, height in ((WIDE, 200), (NARROW, 190))
            if len(loss) > 1
        ],
        "best_caption": best_caption(run.result, accuracy),
    }


def _classes(result: Result, pictured: bool) -> Values:
    """Return everything shown per class: partition, recalls and confusions.

    Confusions lead to their images if the page of these is ``pictured``.
    """
    counts, confusion = result.partition_counts, result.confusion
    per_class: Sequence[object] = confusion or result.per_class_recall or (counts or [[]])[0]
    names = result.class_names or [str(number) for number in range(len(per_class))]
    # In the open protocol the training classes are not the test classes.
    held_names = result.partition_class_names or names
    recalls = _recalls(result, names)
    # Without labels there is nothing to draw, and a party knows of its own images alone.
    held = counts and any(map(any, counts)) and not result.party
    found: Values = {
        "partition": [
            drawn(partition.partition_chart(np.asarray(counts, dtype=np.int64), held_names, width)) for width in SIZES
        ]
        if held
        else None,
        "partition_captions": partition_captions(len(counts or ()), len(held_names), result.partition_note),
        "own_charts": [drawn(chart) for chart in own_classes(result, SIZES)],
        "own_images": f"{sum(map(sum, counts or ())):,}",
        "recalls": recalls,
        "recall_ends": [],
        "compared": any(row["kind"] is not None for row in recalls),
        "untested": sum(row["count"].value == 0 for row in recalls),
        "precise": bool(confusion),
        "tally": {kind: sum(row["kind"] == kind for row in recalls) for kind in ("gain", "loss", "same")},
        "confusion": None,
        "pairs": None,
        "pictured": pictured,
    }
    if len(recalls) > LONG_RECALL_TABLE:
        found["recall_ends"] = [recalls[:ENDS], recalls[-ENDS:]]
    if confusion and len(confusion) <= classes.MAX_MATRIX:
        link = images_link if pictured else None
        matrix = np.asarray(confusion, dtype=np.int64)
        found["confusion"] = [drawn(classes.confusion_chart(matrix, names, link, width)) for width in SIZES]
    elif confusion:
        found["pairs"] = [
            {
                "true": names[row],
                "predicted": names[column],
                "count": f"{count:,}",
                "of": f"{of:,}",
                "share": sure(100 * count / of, of),
                "link": images_link(row, column) if pictured else "",
            }
            for row, column, count, of in classes.confused_pairs(np.asarray(confusion, dtype=np.int64), PAIRS)
        ]
    return found


def _trust(run: RunFolder) -> Values:
    """Return the reliability diagram, and what happens if unsure answers go to a person."""
    result = run.result
    curves = [
        Series(name, [(each.share, each.right) for each in bins])
        for name, bins in (("measured", result.reliability), ("without temperature", result.uncalibrated_reliability))
        if bins
    ]
    curves += [Series("ideal", [(0.0, 0.0), (100.0, 100.0)])] if curves else []
    return {
        "reliability": [
            drawn(line_chart(curves, None, width, 280, "right, %", "share of the predicted class, %", form=".0f"))
            for width in SIZES
            if curves
        ],
        "sure": sure_rows(result),
        "temperature": f"{result.temperature:.3g}" if result.temperature and result.temperature_from else "",
        "temperature_from": result.temperature_from or "",
        "has_evaluation": run.file("evaluation.json").is_file(),
    }


def images_link(row: int, column: int) -> str:
    """Return the address of the images of a true and a predicted class."""
    return f"{IMAGES_PAGE}#true={row}&predicted={column}"


def partition_captions(clients: int, class_count: int, note: str | None) -> list[str]:
    captions = ["The area of a bubble is the number of training samples."]
    if max(clients, class_count) > partition.MAX_BUBBLES:
        captions = ["A stronger colour means more training samples."]
        if (group := partition.group_size(clients)) > 1:
            captions.append(f"Each column sums {group} neighbouring clients.")
        if (group := partition.group_size(class_count)) > 1:
            captions.append(f"Each row sums {group} neighbouring classes and is named after the first.")
    return [*captions, note] if note else captions


def _recalls(result: Result, names: list[str]) -> list[Values]:
    """Return the rows of the recall table, largest gain (or without zero-shot, recall) first."""
    recalls = result.per_class_recall
    counts = [sum(row) for row in result.confusion] or [0] * len(recalls)
    named = [sum(column) for column in zip(*result.confusion, strict=True)] or [0] * len(recalls)
    hits = [row[number] for number, row in enumerate(result.confusion)] or [0] * len(recalls)
    references = result.zero_shot_per_class_recall
    if result.method == "zero-shot" or len(references) != len(recalls):
        references = [None] * len(recalls)
    rows = []
    columns = zip(names, recalls, references, counts, hits, named, strict=False)
    for name, value, against, count, hit, answers in columns:
        recall, reference = number(value), number(against)
        if recall is None and not result.confusion:
            continue
        change = None if reference is None or recall is None else recall - reference
        row = {
            "name": name,
            "count": cell_of(count if result.confusion else None, "{:.0f}".format),
            "recall": cell_of(recall, "{:.1f}".format),
            "precision": cell_of(100 * hit / answers if answers else None, "{:.1f}".format),
            "interval": spread(wilson(recall, count), 0) if count and recall is not None else "",
            "reference": cell_of(reference, "{:.1f}".format),
            "change": cell_of(change, lambda value: points(value, 1)),
            "kind": None if change is None else kind_of(change),
            "bar": drawn(classes.recall_bar(recall, reference)) if recall is not None else "",
        }
        rows.append(((recall is None, -(change or 0.0), -(recall or 0.0), name), row))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _protocol(result: Result) -> Values:
    """Return what the personal and the missing-modality protocols add to the page."""
    tested = bool(result.per_client_accuracy)
    own, before = (
        (result.per_client_accuracy, result.zero_shot_per_client_accuracy)
        if tested
        else (result.per_client_mix_accuracy, result.zero_shot_per_client_mix_accuracy)
    )
    own, before = own or [], before or []
    if not tested and (result.party or len(own) > MAX_EXPECTED):
        own, before = [], []
    references = before if len(before) == len(own) and result.method != "zero-shot" else [None] * len(own)
    counts = result.per_client_test_images
    counts = counts if len(counts) == len(own) else [0] * len(own)
    bars = [
        Bar(_client_name(client, value, count), value, 0, number(reference))
        for client, (accuracy, reference, count) in enumerate(zip(own, references, counts, strict=True))
        if (value := number(accuracy)) is not None
    ]
    return {
        "client_charts": [drawn(bar_chart([("", bars)], width, percent, "zero-shot")) for width in SIZES if bars],
        "clients_tested": tested,
        "clients_compared": any(bar.mark is not None for bar in bars),
        "conditions": [
            {
                "name": row.condition,
                "bar": drawn(classes.recall_bar(number(row.accuracy) or 0.0, None)),
                "cells": [
                    Cell(text, value if (value := number(rate)) is not None else "")
                    for text, rate in (
                        (sure(row.accuracy, images_tested(result)), row.accuracy),
                        (condition_f1(row), row.macro_f1),
                    )
                ],
            }
            for row in result.conditions
        ],
        "sets": set_rows(result),
        "datasets": dataset_rows(result),
        "tail": tail_rows(result),
        "tail_by": result.long_tail.by if result.long_tail else "",
        "class_lists": [len(own) for own in result.class_lists],
        "set_classes": [
            (name, ", ".join(f"{len(classes)}" for classes in lists)) for name, lists in result.candidate_sets.items()
        ],
        **_map(result),
    }


def _client_name(client: int, accuracy: float, count: int) -> str:
    return f"client {client} (n = {count}, {spread(wilson(accuracy, count), 0)})" if count else f"client {client}"


def _map(result: Result) -> Values:
    """Return the t-SNE map of test samples, if there is one, and its legend."""
    found, names = result.embedding or Embedding(), result.class_names
    labels = found.label
    if not labels or max(labels) >= len(names):
        return {"map_charts": [], "map_classes": [], "map_shapes": []}
    present = found.present or ["both"] * len(labels)
    shapes = [MODALITIES[modality] for modality in present]
    samples = [Point(*values) for values in zip(found.x, found.y, labels, shapes, strict=True)]
    shown = sorted(set(labels))
    return {
        "map_charts": [drawn(map_chart(samples, names, width, 0.62 * width)) for width in SIZES],
        "map_classes": [(colour(label), names[label]) for label in shown] if len(shown) <= COLOURS else [],
        "map_shapes": [
            (drawn(key_of(MODALITIES[kind])), MODALITY_LABELS[kind]) for kind in MODALITIES if kind in set(present)
        ],
    }


def _examples(examples: Examples) -> dict[str, list[Example]]:
    """Return test images whose prediction changed; anything but an embedded image is dropped."""
    kinds = {"gained": examples.gained, "lost": examples.lost}
    return {kind: [each for each in found if IMAGE_DATA.fullmatch(each.image)] for kind, found in kinds.items()}


def _troubles(run: RunFolder) -> Values:
    """Return refused updates, dropped clients and skipped images: counts and details."""
    skipped = run.result.skipped_images
    return {
        "refused_count": run.result.refused_updates or 0,
        "refusals": [
            (record.round, name_of(run.result, refusal.client), refusal.reason)
            for record in run.rounds
            for refusal in record.refused
        ],
        "dropped_count": sum(len(record.dropped) for record in run.rounds),
        "drops": [
            (record.round, ", ".join(name_of(run.result, client) for client in record.dropped))
            for record in run.rounds
            if record.dropped
        ],
        "skipped_count": len(skipped),
        "skipped": [(image.image, image.split or MISSING, image.reason) for image in skipped],
    }


def _rounds(run: RunFolder) -> Values:
    """Return the table of all rounds, without columns that nothing is known of."""
    rows = [_round_cells(record, _round_images(run.result)) for record in run.rounds]
    known = [any(row[column].text != MISSING for row in rows) for column in range(len(ROUND_HEADS))]
    if run.result.party:  # it knows of no other client
        known[ROUND_HEADS.index("clients")] = False
    return {"round_heads": list(compress(ROUND_HEADS, known)), "rounds": [list(compress(row, known)) for row in rows]}


def _round_images(result: Result) -> int:
    """Return the test images of a round; 0 where its accuracy is a mean over clients."""
    return 0 if result.per_client_accuracy else images_tested(result)


def _round_cells(record: Record, images: int) -> list[Cell]:
    known = record.model_fields_set
    return [
        cell_of(record.round, "{:.0f}".format),
        cell_of(record.accuracy, lambda value: sure(value, images)),
        cell_of(record.loss, "{:.4f}".format),
        cell_of(len(record.cohort) if "cohort" in known else None, "{:.0f}".format),
        cell_of(len(record.dropped), "{:.0f}".format),
        cell_of(len(record.refused), "{:.0f}".format),
        cell_of(record.bytes_up if "bytes_up" in known else None, human_bytes),
        cell_of(record.bytes_down if "bytes_down" in known else None, human_bytes),
        cell_of(record.seconds if "seconds" in known else None, human_seconds),
    ]


def _facts(result: Result) -> list[Row]:
    facts = {
        "Started": result.started,
        "Finished": result.finished,
        "Device": result.device,
        "Precision of training": result.precision,
        "FedVL version": result.fedvl_version,
        "Schema of result.json": result.schema_version,
        "SHA-256 of what was trained": result.state_sha256,
    }
    return [Row(label, moment(str(fact)), "") for label, fact in facts.items() if fact is not None]


def _notes(run: RunFolder) -> list[str]:
    notes = [*no_better(run.result), *run.result.notes]
    notes += [f"Round {record.round} has no update. {record.void}" for record in run.rounds if record.void]
    if run.unreadable_lines:
        lines = "1 line" if run.unreadable_lines == 1 else f"{run.unreadable_lines} lines"
        notes.append(f"{lines} of metrics.jsonl could not be read and were left out.")
    return notes
