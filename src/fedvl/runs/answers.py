"""test.csv of a run: each test image with truth, prediction, share, entropy and content hash."""

import csv
import io
import math
from typing import TYPE_CHECKING, NamedTuple

from fedvl.data.catalogue import is_own
from fedvl.display import csv_cell
from fedvl.errors import FedVLError
from fedvl.files import read_file, write_whole
from fedvl.runs.folder import RunFolder

if TYPE_CHECKING:
    from fedvl.evaluation.judge import Judged
    from fedvl.runs.preparation import Prepared

ANSWERS = "test.csv"
ANSWER_COLUMNS = ("file", "truth", "prediction", "share", "entropy", "sha256")
MAX_ANSWERS = 2**30  # bytes


class AnswerRow(NamedTuple):
    """A test image as test.csv has it."""

    file: str
    truth: str
    prediction: str
    share: float  # not a number where there is none
    entropy: float
    sha256: str  # of the image's content; blank for a dataset of the catalogue, whose test does not change


def write_answers(folder: RunFolder, prepared: "Prepared", judged: "Judged") -> None:
    """Write the images that were asked about, most unsure first."""
    names, labels = prepared.queried.task.class_names, prepared.test.samples.labels.tolist()
    hashed = prepared.test.content_sha256 if is_own(prepared.experiment.data.dataset) else lambda row: ""
    rows = [
        AnswerRow(
            prepared.test.describe(row), names[label] if label >= 0 else "", names[answer], share, entropy, hashed(row)
        )
        for row, (label, answer, share, entropy) in enumerate(
            zip(labels, judged.answers.tolist(), judged.shares.tolist(), judged.entropies.tolist(), strict=True)
        )
        if answer >= 0
    ]
    rows.sort(key=lambda row: -row.entropy if math.isfinite(row.entropy) else 0.0)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(ANSWER_COLUMNS)
    for *words, share, entropy, sha256 in rows:
        figures = (f"{x:.4f}" if math.isfinite(x) else "" for x in (share, entropy))
        writer.writerow([*map(csv_cell, words), *figures, sha256])
    write_whole(folder.file(ANSWERS), text.getvalue().encode())


def read_answers(folder: RunFolder) -> list[AnswerRow]:
    """Return the test images of a run, most unsure first."""
    path = folder.file(ANSWERS)
    try:
        lines = read_file(path, MAX_ANSWERS).decode().splitlines()
        head, *rows = csv.reader(lines)
        if tuple(head) != ANSWER_COLUMNS:
            raise ValueError(f"its columns are not {', '.join(ANSWER_COLUMNS)}")
        return [
            AnswerRow(file, truth, prediction, float(share or "nan"), float(entropy or "nan"), sha256)
            for file, truth, prediction, share, entropy, sha256 in rows
        ]
    except FileNotFoundError:
        raise FedVLError(f"The run in {folder.path} has no {ANSWERS}: run the experiment again to write it.") from None
    except (ValueError, csv.Error) as error:
        raise FedVLError(f"{path} cannot be read ({error}): run the experiment again to write it.") from None
