"""The page of a run's test images: probable label errors and near-duplicates first."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedvl.data.similar import MAX_COMPARED, groups_alike, small_copy
from fedvl.display import Display, csv_cell
from fedvl.errors import FedVLError
from fedvl.evaluation.examples import thumbnail
from fedvl.report.page import write_page, write_report
from fedvl.report.run_page import IMAGES_PAGE
from fedvl.report.tables import MISSING, Values, cell_of
from fedvl.runs.answers import AnswerRow, read_answers
from fedvl.runs.evaluation import without_validation
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import prepare

MAX_SHOWN = 2_000  # images on the page, of about 3 kB each


class ShownImage(NamedTuple):
    """An image of the page, with numbers of its classes."""

    file: str
    truth: str
    prediction: str
    true: int
    predicted: int
    share: str
    entropy: str
    marks: list[str]
    kinds: str  # of the marks, for the page's choice
    image: str


def write_images_page(folder: RunFolder, display: Display) -> Path:
    """Write images.html of a run, with the images in it, and link the report to it."""
    result = folder.result
    if result.party:
        raise FedVLError("The test images of a client are at the client: only they can show them.")
    rows = read_answers(folder)
    prepared = prepare(without_validation(folder.experiment), display, splits=("test",))
    if prepared.test.sha256 != result.test_sha256:
        raise FedVLError(
            f"The test images or labels of {result.dataset} have changed since the run in {folder.path}; run it again."
        )
    place = {str(csv_cell(prepared.test.describe(row))): row for row in range(len(prepared.test.samples))}
    rows = [row for row in rows if row.file in place][:MAX_COMPARED]
    errors = probable_errors(rows)
    progress, pictures, copies = display.stage("Reading images"), [], []
    for done, row in enumerate(rows, 1):
        image = prepared.test.read(place[row.file])
        pictures.append(thumbnail(image))
        copies.append(small_copy(image))
        progress(done, len(rows))
    twins = near_duplicates(rows, groups_alike(np.stack(copies)) if copies else [])
    order = sorted(
        range(len(rows)),
        key=lambda at: (
            at not in errors,
            -rows[at].share if at in errors else 0.0,
            at not in twins,
            rows[at].truth == rows[at].prediction,
            at,
        ),
    )
    numbers = {name: index for index, name in enumerate(result.class_names)}
    shown = [shown_image(rows[at], numbers, at in errors, twins.get(at, ""), pictures[at]) for at in order[:MAX_SHOWN]]
    wrong = sum(row.truth != row.prediction for row in rows if row.truth)
    values: Values = {
        "method": result.method,
        "dataset": (result.dataset or MISSING).rstrip("/").rpartition("/")[2],
        "names": result.class_names,
        "images": shown,
        "tested": len(rows),
        "wrong": wrong,
        "errors": len(errors),
        "twins": len(twins),
    }
    path = write_page(folder.file(IMAGES_PAGE), "images.html.j2", values, "images.js")
    write_report(folder.path)
    return path


def probable_errors(rows: Sequence[AnswerRow]) -> set[int]:
    """Return the rows whose label is probably wrong.

    The model takes them for another class, and is as sure of it as of images of that class that it
    has right, in the mean (confident learning: Northcutt et al., 2021).
    """
    sure: dict[str, list[float]] = {}
    for row in rows:
        if row.truth == row.prediction:
            sure.setdefault(row.prediction, []).append(row.share)
    least = {name: float(np.mean(shares)) for name, shares in sure.items()}
    return {
        at
        for at, row in enumerate(rows)
        if row.truth and row.truth != row.prediction and row.share >= least.get(row.prediction, 2.0)
    }


def near_duplicates(rows: Sequence[AnswerRow], groups: Sequence[Sequence[int]]) -> dict[int, str]:
    """Say of each row in a group of near-duplicates which other it is like."""
    told = {}
    for group in groups:
        for at in group:
            other = rows[next(each for each in group if each != at)]
            differs = f", which is labelled {other.truth}" if other.truth != rows[at].truth else ""
            told[at] = f"near-duplicate of {other.file}{differs}"
    return told


def shown_image(row: AnswerRow, numbers: dict[str, int], error: bool, twin: str, image: str) -> ShownImage:
    wrong = bool(row.truth) and row.truth != row.prediction
    kinds = {"wrong": wrong, "error": error, "twin": bool(twin)}
    return ShownImage(
        file=row.file,
        truth=row.truth or "no label",
        prediction=row.prediction,
        true=numbers.get(row.truth, -1),
        predicted=numbers.get(row.prediction, -1),
        share=cell_of(100 * row.share, "{:.0f} %".format).text,
        entropy=cell_of(row.entropy, "{:.2f}".format).text,
        marks=[mark for mark in ("probable label error" if error else "", twin) if mark],
        kinds=" ".join(kind for kind, holds in kinds.items() if holds),
        image=image,
    )
