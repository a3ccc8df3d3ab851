"""Show an evaluation: lines for a terminal, and a page with figures of all sites and of each."""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from fedvl.evaluation.figures import ClassFigures, Estimate, Evaluation, Figures, PairedModels
from fedvl.report.charts.lines import Series, line_chart
from fedvl.report.page import write_page
from fedvl.report.tables import Values, moment, p_value

NOT_KNOWN = "withheld"
OVERALL = (
    ("accuracy", "Accuracy, %", 1),
    ("balanced_accuracy", "Balanced accuracy, %", 1),
    ("auroc", "AUROC, mean over classes", 3),
    ("average_precision", "Average precision, mean over classes", 3),
    ("ece", "Calibration error (ECE), points", 1),
)
BY_CLASS = (
    ("auroc", "AUROC", 3),
    ("average_precision", "average precision", 3),
    ("sensitivity", "sensitivity, %", 1),
    ("specificity", "specificity, %", 1),
    ("ppv", "PPV, %", 1),
    ("npv", "NPV, %", 1),
)
MAX_CURVES = 5
WIDTHS = ((640.0, 300.0), (340.0, 260.0))  # of a chart on a desk and on a phone


def written(estimate: Estimate | None, digits: int, absent: str = NOT_KNOWN) -> str:
    """Return a figure with its interval."""
    if estimate is None:
        return absent
    value, low, high = (f"{number:.{digits}f}" for number in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"


def binned(estimate: Estimate | None, digits: int) -> str:
    """Return by how much binning and noise may have moved a figure; nothing if hardly."""
    known = [] if estimate is None else [(estimate.binning, "binning"), (estimate.noise, "noise")]
    return ", ".join(f"±{size:.{digits}f} by {cause}" for size, cause in known if size >= 0.5 * 10**-digits)


def evaluation_lines(found: Evaluation) -> list[str]:
    """Return the evaluation as a terminal shows it."""
    pooled = found.pooled
    lines = [f"{found.method} on {pooled.images:,} labelled images ({found.images_from})."]
    if found.sites:
        lines.append(f"Sites: {', '.join(found.sites)}{' (one secure sum)' if found.secure_sum else ''}.")
    if found.missing:
        lines.append(f"Missing: {', '.join(found.missing)}.")
    lines += found.refused
    if found.epsilon is not None:
        lines.append(f"Noise hides each image in the counts: epsilon {found.epsilon:g} at delta {found.delta:g}.")
    lines += [
        f"{label}: {written(getattr(pooled, key), digits)} {binned(getattr(pooled, key), digits)}".rstrip()
        for key, label, digits in OVERALL
    ]
    lines += paired_lines(found.against) if found.against else []
    return [*lines, f"Intervals are of 95 %. Thresholds of classes: {found.thresholds_from}."]


def headline(found: Evaluation) -> str:
    """Return the figures that do not depend on a threshold, in one sentence."""
    parts = [
        f"{label.partition(',')[0]} {written(estimate, digits)}"
        for key, label, digits in OVERALL
        if key in ("auroc", "average_precision", "balanced_accuracy") and (estimate := getattr(found.pooled, key))
    ]
    return f"{', '.join(parts)}; of each class in evaluation.html."


def paired_lines(found: PairedModels) -> list[str]:
    """Say by how much two models differ on the same images, with intervals and p values."""
    first = f"{found.gained:,} images are right with this model only, {found.lost:,} with {found.other} only"
    lines = [
        f"Against {found.other} on the same {found.images:,} images: {first}; difference in accuracy "
        f"{written(found.difference, 1)} points, McNemar's exact test {p_value(found.p)}."
    ]
    if not found.classes:
        lines.append("DeLong's test of areas needs the scores of single images, which do not leave sites.")
    return lines + [
        f"AUROC of {each.name}: {each.second:.3f}, with {found.other} {each.first:.3f}; difference "
        f"{written(each.difference, 3)}, DeLong's test {p_value(each.p)}."
        for each in found.classes
    ]


def write_evaluation_page(found: Evaluation, path: Path) -> Path:
    """Write the page: one HTML file that loads nothing from elsewhere."""
    return write_page(path, "evaluation.html.j2", describe(found))


def describe(found: Evaluation) -> Values:
    """Return the template values of the page."""
    pooled, benefits = found.pooled, rarest(found.pooled)
    return {
        "found": found,
        "when": moment(found.evaluated),
        "cards": [
            (label, written(getattr(pooled, key), digits), binned(getattr(pooled, key), digits))
            for key, label, digits in OVERALL
        ],
        "heads": [head for _, head, _ in BY_CLASS],
        "classes": [class_row(each) for each in pooled.classes],
        "sites": [site_row(name, each) for name, each in found.by_site.items()],
        "site_heads": [label for _, label, _ in OVERALL],
        "calibration": charts(calibration_series(pooled), "right, %", "mean share, %"),
        "roc": charts(roc_series(pooled), "hits, %", "false alarms, %"),
        "benefit": charts(benefit_series(pooled), "net benefit per 100 images", "threshold, %"),
        "paired": paired_lines(found.against) if found.against else [],
        "benefit_of": benefits.name if benefits else "",
    }


def class_row(each: ClassFigures) -> Values:
    threshold = NOT_KNOWN if each.threshold is None else f"{100 * each.threshold:.1f}"
    cells = [written(getattr(each, key), digits, "none") for key, _, digits in BY_CLASS]
    return {"name": each.name, "images": f"{each.images:,}", "threshold": threshold, "cells": cells}


def site_row(name: str, found: Figures) -> Values:
    return {
        "name": name,
        "images": f"{found.images:,}",
        "cells": [written(getattr(found, key), digits) for key, _, digits in OVERALL],
    }


def calibration_series(found: Figures) -> list[Series]:
    points = [(100 * each.share, each.right) for each in found.calibration]
    diagonal = [(0.0, 0.0), (100.0, 100.0)]
    return [Series("measured", points), Series("ideal", diagonal)] if points else []


def roc_series(found: Figures) -> list[Series]:
    """Return the ROC curves of the classes whose area is smallest: those that need a look."""
    areas = [(each.auroc.value, number) for number, each in enumerate(found.classes) if each.roc and each.auroc]
    known = [found.classes[number] for _, number in sorted(areas)]
    curves = [Series(each.name, [(point.alarms, point.hits) for point in each.roc]) for each in known[:MAX_CURVES]]
    return [*curves, Series("chance", [(0.0, 0.0), (100.0, 100.0)])] if curves else []


def rarest(found: Figures) -> ClassFigures | None:
    """Return the rarest class that has figures: the one whose net benefit is shown."""
    known = [each for each in found.classes if each.net_benefit]
    return min(known, key=lambda each: each.images, default=None)


def benefit_series(found: Figures) -> list[Series]:
    each = rarest(found)
    if each is None:
        return []
    model, everyone = (
        [(100 * point.threshold, max(100 * getattr(point, key), -5.0)) for point in each.net_benefit]
        for key in ("model", "all")
    )
    return [Series("model", model), Series("act for all", everyone)]


def charts(series: Sequence[Series], y_label: str, x_label: str) -> list[Markup]:
    """Return a chart for a desk and one for a phone; nothing without points."""
    if not series:
        return []
    return [Markup(line_chart(series, None, *size, y_label, x_label, form=".1f")) for size in WIDTHS]
