"""Execute a finished run again and compare every figure that its files state.

A run that was made here, by the same versions on the same kind of machine, is expected to have the
same bits. Elsewhere the last bits of sums differ, and figures may differ by a small share.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from fedvl.config import Experiment
from fedvl.data.sources import Opener
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.files import MAX_JSON, SHORTENED, Content, file_sha256, read_file, read_json
from fedvl.runs.answers import ANSWERS
from fedvl.runs.contents import Result
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder

Verdict = Literal["same bits", "within rounding", "different"]

MACHINE_ROUNDING = 0.005  # share by which figures of another machine may differ
MAX_DIFFERENCES = 3  # differences of one file

WHERE = ("fedvl_version", "torch_version", "machine", "device", "precision")
# What is of one execution, and not of the experiment.
OF_EXECUTION = {
    *WHERE,
    *("seconds", "seconds_per_image", "seconds_to_target", "finished", "started", "evaluated", "run"),
    *("peak_memory_bytes", "peak_gpu_memory_bytes", "memory_bytes_to_target", "gpu_memory_bytes_to_target"),
    *("skipped_images", "notes", "chunk", "command"),
}
HASHES = ("state_sha256", "files_sha256")  # another hash says nothing of how far apart the tensors are
EVALUATION = "evaluation.json"


class Difference(Content):
    """A figure of a file, and what it is when the run is executed again."""

    file: str
    figure: str
    claimed: str
    repeated: str
    share: float
    """How far apart the two are: 0 is the same to a reader, 1 or more has nothing in common."""

    def __str__(self) -> str:
        return f"{self.file} has {self.figure} {self.claimed}; executed again: {self.repeated}"


class Repeated(Content):
    """A run that was executed again."""

    run: str
    verdict: Verdict
    differences: list[Difference] = []
    elsewhere: list[str] = []
    """Versions and machine in which the two executions differ."""


def repeat(
    folder: RunFolder, scratch: Path, display: Display, opener: Opener, experiment: Experiment | None = None
) -> Repeated:
    """Execute a run again below ``scratch``, and compare the two.

    ``experiment`` is that of its settings, if its method's file is elsewhere than in the folder.
    """
    if folder.federation is not None:
        raise FedVLError(
            f"{folder.path} is a run between machines, whose data are elsewhere; only its parties can repeat it."
        )
    claimed = folder.result
    again = RunFolder(scratch / folder.path.name)
    again.experiment = experiment or folder.experiment
    again.path.mkdir(parents=True)
    again.describe(again.experiment)
    try:
        complete(again, display, opener)
    except FedVLError as error:
        told = Difference(
            file="config.toml", figure="settings", claimed="of a run", repeated=str(error), share=math.inf
        )
        return Repeated(run=folder.path.name, verdict="different", differences=[told])
    elsewhere = [
        f"{name} {there} there and {here} here"
        for name, there, here in ((name, getattr(claimed, name), getattr(again.result, name)) for name in WHERE)
        if there != here
    ]
    found = [*changed_files(folder), *run_differences(folder, again)]
    far = any(each.share > MACHINE_ROUNDING for each in found)
    verdict: Verdict = "same bits" if not found else "within rounding" if elsewhere and not far else "different"
    return Repeated(run=folder.path.name, verdict=verdict, differences=found, elsewhere=elsewhere)


def changed_files(folder: RunFolder) -> Iterator[Difference]:
    """Yield the files of tensors whose hash is not the one that the result names."""
    for name, sha256 in folder.result.files_sha256.items():
        path = folder.file(name)
        if path.is_file() and (found := file_sha256(path)) != sha256:
            yield Difference(file=name, figure="SHA-256", claimed=sha256, repeated=found, share=math.inf)


def run_differences(folder: RunFolder, again: RunFolder) -> Iterator[Difference]:
    """Yield the differences of two executions of a run, file by file."""
    claimed, repeated = result_values(folder.result, folder), result_values(again.result, again)
    for key in dict.fromkeys([*claimed, *repeated]):
        theirs, ours = claimed.get(key), repeated.get(key)
        if key not in OF_EXECUTION and not equal_contents(theirs, ours):
            share = 0.0 if key in HASHES and theirs and ours else relative_gap(theirs, ours)
            yield stated_difference("result.json", key, theirs, ours, share)
    theirs, ours = ([record.to_dict() for record in run.rounds] for run in (folder, again))
    yield from content_differences("metrics.jsonl", theirs, ours)
    if all(run.file(EVALUATION).is_file() for run in (folder, again)):
        yield from content_differences(
            EVALUATION, read_json(folder.file(EVALUATION)), read_json(again.file(EVALUATION))
        )
    if all(run.file(ANSWERS).is_file() for run in (folder, again)):
        yield from compared_answers(*(answers_by_image(run.file(ANSWERS)) for run in (folder, again)))


def result_values(result: Result, folder: RunFolder) -> dict[str, Any]:
    """Return a result without the place of its method's file, which is elsewhere in a copy."""
    found = result.to_dict()
    name = str(result.setting("method", "name"))
    if name.endswith(".py"):
        found = json.loads(json.dumps(found).replace(json.dumps(name)[1:-1], Path(name).name))
    return found


def answers_by_image(path: Path) -> dict[str, list[str]]:
    """Return truth, prediction, share and entropy of each test image, by its name."""
    lines = csv.reader(read_file(path, MAX_JSON).decode(errors="replace").splitlines())
    return {row[0]: row[1:5] for row in lines if row}


def compared_answers(claimed: dict[str, list[str]], repeated: dict[str, list[str]]) -> Iterator[Difference]:
    """Yield the first image with another answer; how far apart is the share of such images."""
    changed = [name for name in {**claimed, **repeated} if claimed.get(name) != repeated.get(name)]
    if changed:
        answers = [[found.get(name, [])[:2] for name in changed] for found in (claimed, repeated)]
        others = sum(theirs != ours for theirs, ours in zip(*answers, strict=True))
        theirs, ours = claimed.get(changed[0]), repeated.get(changed[0])
        yield stated_difference(ANSWERS, changed[0], theirs, ours, others / max(len(claimed), 1))


def content_differences(file: str, claimed: Any, repeated: Any, most: float = 0.0) -> list[Difference]:
    """Return the largest differences of two contents, of at least a share of their numbers."""
    found = [
        stated_difference(file, name, theirs, ours, relative_gap(theirs, ours))
        for name, theirs, ours in paired_values(claimed, repeated)
        if not equal_contents(theirs, ours) and relative_gap(theirs, ours) >= most
    ]
    return sorted(found, key=lambda each: -each.share)[:MAX_DIFFERENCES]


def paired_values(claimed: Any, repeated: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield what is at each place of two contents; None where one of them has nothing."""
    if isinstance(claimed, Mapping) and isinstance(repeated, Mapping):
        for key in dict.fromkeys([*claimed, *repeated]):
            if key not in OF_EXECUTION:
                yield from paired_values(claimed.get(key), repeated.get(key), f"{name}.{key}".lstrip("."))
    elif isinstance(claimed, list) and isinstance(repeated, list) and len(claimed) == len(repeated):
        for number, (theirs, ours) in enumerate(zip(claimed, repeated, strict=True), 1):
            yield from paired_values(theirs, ours, f"{name} {number}".strip())
    else:
        yield name, claimed, repeated


def stated_difference(file: str, figure: str, claimed: Any, repeated: Any, share: float) -> Difference:
    theirs, ours = SHORTENED.repr(claimed), SHORTENED.repr(repeated)
    return Difference(file=file, figure=figure, claimed=theirs, repeated=ours, share=share)


def equal_contents(claimed: Any, repeated: Any) -> bool:
    """Return whether two contents are the same; a number that is not one is the same as another."""
    return json.dumps(claimed) == json.dumps(repeated)


def relative_gap(claimed: Any, repeated: Any) -> float:
    """Return how far apart two contents are, as a share of their numbers; infinite if not alike."""
    (theirs, others), (ours, further) = numbers_and_rest(claimed), numbers_and_rest(repeated)
    if others != further or len(theirs) != len(ours) or not all(map(math.isfinite, [*theirs, *ours])):
        return math.inf
    moved = math.fsum(abs(one - other) for one, other in zip(theirs, ours, strict=True))
    whole = math.fsum(max(abs(one), abs(other)) for one, other in zip(theirs, ours, strict=True))
    return moved / whole if whole else 0.0


def numbers_and_rest(content: Any) -> tuple[list[float], list[Any]]:
    """Return the numbers of a content, with those of letters of answers, and the rest."""
    if isinstance(content, Mapping):
        content = [part for key in sorted(content) for part in (key, content[key])]
    elif isinstance(content, str) and content and not content.strip("01-"):
        content = [int(letter) if letter != "-" else None for letter in content]
    if isinstance(content, list):
        parts = [numbers_and_rest(part) for part in content]
        return [number for numbers, _ in parts for number in numbers], [rest for _, rest in parts]
    if isinstance(content, int | float) and not isinstance(content, bool):
        return [float(content)], []
    return [], [content]
