"""A partition from a file: which training images each client holds, by number or by name."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedvl.config import MAX_CLIENTS
from fedvl.data.partition import Partition
from fedvl.errors import FedVLError
from fedvl.files import SHORTENED, parse_json, read_file
from fedvl.tensors import IntArray

MAX_PARTITION_FILE = 2**30  # bytes
FORMAT = "give a list of row numbers for each client as .json, or a .csv with the columns client and row (or file)"


class TrainingImages(NamedTuple):
    """The images of a training split that can be used."""

    kept: IntArray  # row of each in the split
    describe: Callable[[int], str]  # name of a row

    def rows(self) -> dict[int, int]:
        return {int(row): place for place, row in enumerate(self.kept)}

    def names(self) -> dict[str, int]:
        return {self.describe(int(row)): place for place, row in enumerate(self.kept)}


Rows = list[list[int | str]]


def read_partition(path: Path) -> Rows:
    """Return the row numbers, or the names, of each client."""
    try:
        text = read_file(path, MAX_PARTITION_FILE).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise FedVLError(f"There is no partition file {path}; check the path.") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not in UTF-8"
        raise FedVLError(f"The partition file {path} cannot be read ({reason}).") from error
    return of_json(path, text) if path.suffix.lower() == ".json" else of_csv(path, text)


def of_json(path: Path, text: str) -> Rows:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise FedVLError(f"The partition file {path} is not JSON ({error}); {FORMAT}.") from error
    if not isinstance(found, list) or not found or not all(isinstance(rows, list) for rows in found):
        raise FedVLError(f"The partition file {path} is not a list of lists; {FORMAT}.")
    for kind in (int, str):
        if all(type(row) is kind for rows in found for row in rows):
            return found
    odd = next(row for rows in found for row in rows if type(row) is not int)
    raise FedVLError(f"The partition file {path} has {SHORTENED.repr(odd)}, which is not a row number; {FORMAT}.")


def of_csv(path: Path, text: str) -> Rows:
    header, clients = text.partition("\n")[0], dict[int, list[str]]()
    reader = csv.DictReader(text.splitlines(), delimiter=max(",;\t", key=header.count), strict=True)
    columns = [name.strip().lower() for name in reader.fieldnames or ()]
    reader.fieldnames = columns
    key = next((name for name in ("row", "file") if name in columns), None)
    if key is None or "client" not in columns:
        raise FedVLError(f"The partition file {path} has the columns {', '.join(columns) or 'none'}; {FORMAT}.")
    try:
        for line in reader:
            client = (line["client"] or "").strip()
            if not client.isdecimal() or int(client) >= MAX_CLIENTS:
                raise FedVLError(
                    f"Line {reader.line_num} of the partition file {path} has the client {SHORTENED.repr(client)}; number "
                    "clients from 0."
                )
            clients.setdefault(int(client), []).append((line[key] or "").strip())
    except csv.Error as error:
        raise FedVLError(f"Line {reader.line_num} of the partition file {path} is not CSV ({error}).") from error
    if not clients:
        raise FedVLError(f"The partition file {path} assigns no image; {FORMAT}.")
    listed = [clients.get(client, []) for client in range(max(clients) + 1)]
    if key == "row" and (odd := [row for rows in listed for row in rows if not row.isdecimal()]):
        raise FedVLError(f"The partition file {path} has the row {SHORTENED.repr(odd[0])}; number rows from 0.")
    return [[int(row) if key == "row" else row for row in rows] for rows in listed]


def clients_of(spec: str) -> int:
    """Return the number of clients of a partition file."""
    return len(read_partition(Path(spec)))


def partition_from_file(
    spec: str, images: TrainingImages, labels: IntArray, chosen: IntArray, clients: int, seed: int
) -> Partition:
    """Assign the ``chosen`` of the images; of the partition, indices are places among these."""
    path = Path(spec)
    found = read_partition(path)
    if len(found) != clients:
        raise FedVLError(
            f"The partition file {path} has {len(found)} clients, and data.clients is {clients}; leave --clients out."
        )
    by_name = any(isinstance(row, str) for rows in found for row in rows)
    known: dict[Any, int] = dict(images.names()) if by_name else dict(images.rows())
    owner = np.full(len(images.kept), -1, np.int64)
    for client, rows in enumerate(found):
        for row in rows:
            place = known.get(row)
            if place is None:
                raise FedVLError(absent(path, client, row, images))
            if owner[place] >= 0:
                who = f"client {client} twice" if owner[place] == client else f"clients {owner[place]} and {client}"
                raise FedVLError(f"The partition file {path} gives {SHORTENED.repr(row)} to {who}; give it once.")
            owner[place] = client
    owner = owner[chosen]
    parts = [np.flatnonzero(owner == client) for client in range(clients)]
    own = labels[chosen]
    counts = np.zeros((clients, max(int(own.max(initial=0)) + 1, 1)), np.int64)
    held = (owner >= 0) & (own >= 0)
    np.add.at(counts, (owner[held], own[held]), 1)
    empty = sum(not len(part) for part in parts)
    note = f"{path.name}: {int((owner >= 0).sum()):,} of {len(chosen):,} training images were assigned to {clients} clients"
    note += f", and {empty} clients hold no samples." if empty else "."
    return Partition(parts, counts, note, spec, seed)


def absent(path: Path, client: int, row: int | str, images: TrainingImages) -> str:
    named = f"The partition file {path} gives client {client} the image {SHORTENED.repr(row)}"
    if isinstance(row, str):
        return f"{named}, which is not among the training images; write names as the dataset has them."
    last = int(images.kept.max(initial=-1))
    unread = 0 <= row <= last
    return f"{named}, which cannot be read; remove it." if unread else f"{named}; rows go from 0 to {last}."
