"""Reading the raw data: public git repositories, labelled image sets, and the Flickr8k text files.

A labelled set NAME under the data folder is either NAME/split.csv beside its images (columns path, class, split and
perhaps more, such as wnid or coarse) or NAME.parquet (columns image, label, split and perhaps text).
"""

import csv
import re
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

FLICKR_IMAGES = "Flicker8k_Dataset"
FLICKR_TEST_LIST = "Flicker8k_text/Flickr_8k.testImages.txt"
FLICKR_CAPTIONS = "Flicker8k_text/Flickr8k.token.txt"
CALTECH_BACKGROUND = "BACKGROUND_Google"
CALTECH_HELD_EVERY = 5  # every 5th row of Caltech-101 is held back from training

Tag = TypeVar("Tag")


@dataclass(frozen=True)
class Row:
    """One image of a labelled set; `source` is a path or the file's bytes."""

    source: str | bytes
    label: str
    split: str
    fields: dict[str, str] = field(default_factory=dict)


def read_rows(root: Path, name: str) -> list[Row]:
    folder, parquet = root / name, root / f"{name}.parquet"
    if (folder / "split.csv").exists():
        with (folder / "split.csv").open(newline="") as file:
            return [Row(str(folder / row["path"]), row["class"], row["split"], row) for row in csv.DictReader(file)]
    if not parquet.exists():
        raise SystemExit(f"no set {name} in {root}: neither {name}/split.csv nor {name}.parquet is there")
    from pyarrow.parquet import read_table

    columns = read_table(parquet).to_pylist()
    return [
        Row(row.pop("image"), row["label"], row["split"], {key: str(value) for key, value in row.items()})
        for row in columns
    ]


def _git(repository: str, *arguments: str) -> str:
    command = ["git", "-C", repository, "-c", "core.quotepath=off", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def git_text(repository: str, path: str) -> str:
    return _git(repository, "show", f"HEAD:{path}")


def git_files(repository: str, folder: str) -> Iterator[tuple[str, str]]:
    """(object id, path) of every file under a folder, without checking the repository out."""
    for line in _git(repository, "ls-tree", "-r", "HEAD", folder).splitlines():
        description, path = line.split("\t", 1)
        yield description.split()[2], path


def git_contents(repository: str, items: Sequence[tuple[str, Tag]]) -> Iterator[tuple[Tag, bytes]]:
    """Stream the contents of (object id, tag) pairs as (tag, bytes); an object that is missing is left out."""
    process = subprocess.Popen(
        ["git", "-C", repository, "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def ask() -> None:
        for identity, _ in items:
            requests.write(f"{identity}\n".encode())
        requests.close()

    # A thread, because git stops reading while its answers are not taken.
    threading.Thread(target=ask, daemon=True).start()
    for _, tag in items:
        header = answers.readline().split()
        if len(header) < 3:  # "<id> missing"
            continue
        content = answers.read(int(header[2]))
        answers.read(1)  # the newline after each object
        yield tag, content
    answers.close()
    process.wait()


def flickr_test_names(repository: str) -> set[str]:
    """File names of Flickr8k's test list: never trained on."""
    return set(git_text(repository, FLICKR_TEST_LIST).split())


def flickr_captions(repository: str) -> dict[str, list[str]]:
    """Captions of each image, by file name, in the order of the file."""
    captions = defaultdict(list)
    for line in git_text(repository, FLICKR_CAPTIONS).splitlines():
        name, _, caption = line.partition("\t")
        captions[name.split("#")[0]].append(re.sub(r"\s+", " ", caption).strip(" ."))
    return dict(captions)
