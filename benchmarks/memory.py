"""Measure the resident memory of rounds on features that stay on disk, as their number grows.

    python -m benchmarks.memory [--rows 100000 1000000] [--width 512] [--cohort 100] [--rounds 5] [--folder /tmp] [--device cpu]

For each number of rows a file of random features is written as the feature cache has them, opened as
a run opens what does not fit into memory, and trained on: a linear classifier, 128 rows a client, a
new cohort each round. Each size has a process of its own. The lines say how much memory that process
holds (MB) before the file is opened, after it is, and after each round, and the seconds of a round.
What remains to grow are a label and a number of each row: 16 bytes, of 2,048 of its features.
"""

import argparse
import json
import math
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedvl.config import FederationConfig, TrainingConfig
from fedvl.data.stored import DiskRows, StoredRows, table_in
from fedvl.federation.local import LocalEngine
from fedvl.federation.round import Federation
from fedvl.methods import load_method
from fedvl.methods.base import Samples, Task
from fedvl.models.clip import DualEncoder
from fedvl.seeding import torch_generator

EACH, CLASSES, AT_ONCE = 128, 10, 8192


def write(path: Path, rows: int, width: int) -> None:
    """Write random features, the same block of rows again and again."""
    described = {"features": {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, 4 * rows * width]}}
    header = json.dumps(described).encode().ljust(248)
    block = torch.randn(min(AT_ONCE, rows), width, generator=torch.Generator().manual_seed(0)).numpy()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for first in range(0, rows, AT_ONCE):
            file.write(block[: rows - first].data)


def resident() -> int:
    """Return the megabytes that this process holds, of files too."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return round(int(status["VmRSS"].split()[0]) / 1024)


def measure(path: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """Train on the file and return what it took."""
    method_type = load_method("linear")
    before = resident()
    table = table_in(path, "features")
    features = StoredRows(DiskRows(table, "features", np.arange(len(table))), arguments.device, unit=True)
    rows = len(features)
    labels = torch.randint(CLASSES, (rows,), generator=torch.Generator().manual_seed(1)).to(arguments.device)
    samples = Samples({"features": cast("Tensor", features)}, labels)
    clients = torch.arange(rows, device=arguments.device).split(EACH)
    names = tuple(f"class {number}" for number in range(CLASSES))
    texts = torch.randn(CLASSES, features.shape[1], generator=torch.Generator().manual_seed(2)).to(arguments.device)
    task = Task(names, texts, cast("DualEncoder", SimpleNamespace(logit_scale=100.0)), len(clients))
    method = method_type(method_type.options_type(), task)
    config = FederationConfig(
        rounds=arguments.rounds, per_round=min(arguments.cohort, len(clients)), chunk=arguments.cohort
    )
    engine = LocalEngine(method, samples, clients, TrainingConfig(batch_size=32), config, 0)
    start = method.start(torch_generator(0, "start"))
    federation = Federation(method, engine, config, 0, start, device=torch.device(arguments.device))
    opened, after, seconds = resident(), list[int](), list[float]()
    began = time.perf_counter()

    def noted(record: object) -> None:
        nonlocal began
        after.append(resident())
        seconds.append(round(time.perf_counter() - began, 3))
        began = time.perf_counter()

    federation.run(after_round=noted)
    size = round(math.prod(features.shape) * 4 / 2**20)
    found = {
        "rows": rows,
        "file_mb": size,
        "clients": len(clients),
        "cohort": config.per_round,
        "device": arguments.device,
    }
    return {**found, "rss_before_mb": before, "rss_opened_mb": opened, "rss_rounds_mb": after, "round_s": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[100_000, 1_000_000])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the files are made; deleted afterwards")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)  # of the process that measures
    arguments = parser.parse_args()
    if arguments.file:
        print(json.dumps(measure(arguments.file, arguments)), flush=True)
        return
    passed = [f"--{name}={getattr(arguments, name)}" for name in ("cohort", "rounds", "device")]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for rows in arguments.rows:
            path = Path(folder) / f"{rows}.safetensors"
            write(path, rows, arguments.width)
            subprocess.run([sys.executable, "-m", "benchmarks.memory", "--file", str(path), *passed], check=True)
            path.unlink()


if __name__ == "__main__":
    main()
