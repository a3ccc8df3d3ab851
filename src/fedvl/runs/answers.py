"""test.csv of a run: each test image with truth, prediction, share and entropy."""

import csv
import io
import math

from fedvl.display import csv_cell
from fedvl.evaluation.judge import Judged
from fedvl.files import write_whole
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import Prepared

FILE = "test.csv"
COLUMNS = ("file", "truth", "prediction", "share", "entropy")


def write_answers(folder: RunFolder, prepared: Prepared, judged: Judged) -> None:
    """Write the images that were asked about, most unsure first."""
    names, labels = prepared.queried.task.class_names, prepared.test.samples.labels.tolist()
    rows = [
        (prepared.test.describe(row), names[label] if label >= 0 else "", names[answer], share, entropy)
        for row, (label, answer, share, entropy) in enumerate(
            zip(labels, judged.answers.tolist(), judged.shares.tolist(), judged.entropies.tolist(), strict=True)
        )
        if answer >= 0
    ]
    rows.sort(key=lambda row: -row[4] if math.isfinite(row[4]) else 0.0)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for *words, share, entropy in rows:
        writer.writerow([*map(csv_cell, words), *(f"{x:.4f}" if math.isfinite(x) else "" for x in (share, entropy))])
    write_whole(folder.file(FILE), text.getvalue().encode())
