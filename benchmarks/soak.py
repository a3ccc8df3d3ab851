"""Run 500 rounds of 100 clients, and see whether anything grows: the last fifth beside the first.

    python -m benchmarks.soak [--rounds 500] [--clients 100] [--method linear] [--json]

One process on cifar10-mini with a journal and a test in every round, as ``fedvl run`` has. Of each
round: seconds, and those of the processor, which other work on the machine does not lengthen;
resident memory, open file descriptors, bytes of the journal's tensors, and bytes that its manifest
and its line in metrics.jsonl add.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedvl.display import Silent
from fedvl.federation.records import Record
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment

UNITS = {"seconds": "ms", "processor": "ms", "memory": "MB", "descriptors": "", "tensors": "kB", "added": "kB"}
SCALE = {"seconds": 1e3, "processor": 1e3, "memory": 1e-6, "descriptors": 1.0, "tensors": 1e-3, "added": 1e-3}


class Measured(Silent):
    """A display that measures the process after each round."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows = folder, list[dict[str, float]]()
        self.last, self.used, self.written = 0.0, 0.0, 0

    def rounds(self, *ignored: Any) -> Callable[[Record], None]:
        self.last, self.used, self.written = time.perf_counter(), time.process_time(), self.bytes_of("metrics.jsonl")
        return self.measure

    def measure(self, record: Record) -> None:
        now, used, written = time.perf_counter(), time.process_time(), self.bytes_of("metrics.jsonl")
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.rows.append(
            {
                "seconds": now - self.last,
                "processor": used - self.used,
                "memory": pages * os.sysconf("SC_PAGE_SIZE"),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "tensors": self.bytes_of("journal/*.safetensors"),
                "added": written - self.written + self.bytes_of(f"journal/{record.round:06d}.json"),
            }
        )
        self.last, self.used, self.written = time.perf_counter(), time.process_time(), written

    def bytes_of(self, pattern: str) -> int:
        return sum(path.stat().st_size for path in self.folder.glob(pattern))


def soak(method: str, rounds: int, clients: int) -> list[dict[str, float]]:
    experiment = resolve_experiment(
        {
            "device": "cpu",
            "method": {"name": method},
            "data": {"clients": clients, "partition": "iid"},
            "federation": {"rounds": rounds, "threads": 1},
        }
    )
    with TemporaryDirectory() as name:
        folder, display = RunFolder(Path(name)), Measured(Path(name))
        folder.describe(experiment)
        complete(folder, display)
    return display.rows


def fifths(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the medians of the first and the last fifth, and their ratio."""
    fifth, found = len(rows) // 5, {}
    for name in UNITS:
        first, last = (statistics.median(row[name] for row in part) for part in (rows[:fifth], rows[-fifth:]))
        found[name] = {"first": first, "last": last, "ratio": last / first}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--method", default="linear")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = soak(arguments.method, arguments.rounds, arguments.clients)
    found = fifths(rows)
    if arguments.json:
        print(json.dumps({**vars(arguments), "load": os.getloadavg(), "fifths": found}))
        return
    print(f"{arguments.method}: {len(rows)} rounds x {arguments.clients} clients, load {os.getloadavg()[0]:.1f}\n")
    print("| a round | first fifth | last fifth | ratio |\n|---|---|---|---|")
    for name, row in found.items():
        first, last = (f"{row[part] * SCALE[name]:,.1f} {UNITS[name]}".strip() for part in ("first", "last"))
        print(f"| {name} | {first} | {last} | {row['ratio']:.3f} |")


if __name__ == "__main__":
    main()
