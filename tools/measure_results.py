"""Measure what docs/results holds: run the grids of benchmarks/results and the timed benchmarks.

python -m tools.measure_results                                  what two processor cores measure in minutes
python -m tools.measure_results --all --data FOLDER --jobs 8     everything; FOLDER has the parquet files
python -m tools.measure_results --only labels clients

Each result file gets the commit, so the tree must be clean but for docs/results. An interrupted measurement
goes on: finished runs in --work are kept for the same commit. Afterwards run python -m tools.results_page.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedvl.version import __version__
from tools.results_page import GRIDS, RESULTS, ROOT, Cell, Result, settings_sha256

LARGE = ("missing", "datasets")  # grids that two cores do not measure in minutes
Line = dict[str, Any]  # a line of JSON that a benchmark prints


def rounds(lines: list[Line]) -> list[Cell]:
    names = {"bare": "matrix products alone", "ours": "FedVL", "loop": "PyTorch loop", "flower": "Flower simulation"}
    seconds = lines[0]["seconds_per_round"]
    return [
        cell
        for key, row in names.items()
        if key in seconds
        for cell in (
            Cell(row=row, column="ms a round", mean=1000 * seconds[key]),
            Cell(row=row, column="relative to FedVL", mean=seconds[key] / seconds["ours"]),
        )
    ]


def scale(lines: list[Line]) -> list[Cell]:
    cells = []
    for line in lines:
        row = f"{line['method']}, {line['clients']:,} clients, {line['cohort']:,} a round"
        cells += [
            Cell(row=row, column="seconds a round", mean=line["round_s"]),
            Cell(row=row, column="µs a client", mean=line["us_per_client"]),
            Cell(row=row, column="memory, MB, after the first round", mean=line["rss_mb_after_first"]),
            Cell(row=row, column="memory, MB, after the last round", mean=line["rss_mb"]),
        ]
    return cells


def flute(lines: list[Line]) -> list[Cell]:
    cells = []
    for line in lines:
        row = f"{line['per_round']:,} clients a round"
        cells += [
            Cell(row=row, column="FedVL, seconds", mean=line["seconds"]["ours"]),
            Cell(row=row, column="bare loop, seconds", mean=line["seconds"]["bare"]),
            Cell(row=row, column="ratio", mean=line["ours_over_bare"]),
        ]
    return cells


def memory(lines: list[Line]) -> list[Cell]:
    cells = []
    for line in lines:
        row = f"{line['rows']:,} rows"
        cells += [
            Cell(row=row, column="file, MB", mean=line["file_mb"]),
            Cell(row=row, column="resident before, MB", mean=line["rss_before_mb"]),
            Cell(row=row, column="resident after the last round, MB", mean=line["rss_rounds_mb"][-1]),
            Cell(row=row, column="seconds a round", mean=line["round_s"][-1]),
        ]
    return cells


def prompts(lines: list[Line]) -> list[Cell]:
    cells = []
    for line in lines[1:]:  # the first line has the settings
        cells += [
            Cell(row=line["method"], column="one client after another, seconds", mean=line["plain_seconds_a_round"]),
            Cell(row=line["method"], column="FedVL, seconds", mean=line["ours_seconds_a_round"]),
            Cell(row=line["method"], column="ratio", mean=line["ratio"]),
        ]
    return cells


def precision(lines: list[Line]) -> list[Cell]:
    cells = []
    for line in lines:
        for kind, found in line["differences"].items():
            half, mean = found["half_width"], found["difference"]
            cells.append(
                Cell(
                    row=line["method"],
                    column=f"{kind} less float32, points",
                    mean=mean,
                    interval=(mean - half, mean + half),
                    n=len(line["accuracies"]["float32"]),
                )
            )
    return cells


class Benchmark(NamedTuple):
    """A timed benchmark: its arguments, and how its JSON becomes a table."""

    arguments: str
    cells: Callable[[list[Line]], list[Cell]]
    large: bool = False
    gpu: bool = False


BENCHMARKS = {
    "rounds": Benchmark("benchmarks.rounds --json --without-flower", rounds),
    "flute": Benchmark("benchmarks.flute --json", flute),
    "memory": Benchmark("benchmarks.memory --rows 100000 1000000", memory),
    "scale": Benchmark("benchmarks.scale --json --rounds 3 --grid 10000:1000 100000:10000 --most-rows 100000", scale),
    "scale-gpu": Benchmark(
        "benchmarks.scale --json --device cuda --threads 4 --rounds 5 --most-rows 100000 --grid 100000:10000 1000000:100000",
        scale,
        large=True,
        gpu=True,
    ),
    "prompts-gpu": Benchmark("benchmarks.prompts --precision bfloat16", prompts, large=True, gpu=True),
    "precision-gpu": Benchmark(
        "benchmarks.precision --json --methods linear cachefl promptfl", precision, large=True, gpu=True
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also what needs many minutes, a GPU or --data")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these results alone")
    parser.add_argument("--data", type=Path, help="folder of the parquet files that datasets.toml names")
    parser.add_argument("--jobs", type=int, default=1, help="runs of a grid at once")
    parser.add_argument("--work", type=Path, default=Path("comparisons/results"), help="folder of the runs")
    arguments = parser.parse_args()
    commit = clean_commit()
    machine = this_machine()
    for name in wanted(arguments):
        load, began = os.getloadavg()[0], time.perf_counter()
        measured = benchmark(name) if name in BENCHMARKS else grid(name, arguments, commit)
        result = Result.model_validate(
            {
                **measured,
                "name": name,
                "commit": commit,
                "version": __version__,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": machine,
                "load": round(load, 1),
                "seconds": round(time.perf_counter() - began, 1),
            }
        )
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
        print(f"docs/results/{name}.json ({result.seconds:.0f} s)", flush=True)
    return 0


def wanted(arguments: argparse.Namespace) -> list[str]:
    """Return the names to measure; exit if one is unknown or lacks what it needs."""
    grids = [path.stem for path in sorted(GRIDS.glob("*.toml"))]
    if strange := [name for name in arguments.only if name not in (*grids, *BENCHMARKS)]:
        sys.exit(f"Unknown result '{strange[0]}'; known: {', '.join((*grids, *BENCHMARKS))}.")
    if arguments.only:
        names = arguments.only
    elif arguments.all:
        names = [*grids, *BENCHMARKS]
        if not torch.cuda.is_available():
            names = [name for name in names if name not in BENCHMARKS or not BENCHMARKS[name].gpu]
    else:
        names = [name for name in grids if name not in LARGE]
        names += [name for name, one in BENCHMARKS.items() if not one.large]
    if "datasets" in names and arguments.data is None:
        sys.exit("datasets.toml needs --data FOLDER, the folder of its parquet files.")
    return names


def clean_commit() -> str:
    """Return the commit; exit if a file other than the results differs from it."""
    changed = git("status", "--porcelain", "--", ".", ":!docs", ":!README.md", ":!tools/results_page.py")
    if changed:
        sys.exit(f"Commit these files first, so that the results belong to a commit:\n{changed}")
    return git("rev-parse", "HEAD")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def this_machine() -> str:
    """Return processor cores, GPU and torch's version."""
    cores = os.cpu_count()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{cores} cores ({platform.machine()}){gpu}, torch {torch.__version__}"


def grid(name: str, arguments: argparse.Namespace, commit: str) -> dict[str, Any]:
    """Run a grid by fedvl compare, and return its figures."""
    path = GRIDS / f"{name}.toml"
    out = arguments.work / commit[:9] / name
    shown = ["fedvl", "compare", path.relative_to(ROOT).as_posix()]
    with tempfile.TemporaryDirectory() as folder:
        file = path
        if "DATA/" in path.read_text(encoding="utf-8"):
            file = Path(folder) / path.name
            file.write_text(path.read_text("utf-8").replace("DATA/", f"{arguments.data.resolve()}/"), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "fedvl",
            "compare",
            str(file),
            "--out",
            str(out),
            "--jobs",
            str(arguments.jobs),
            "--no-references",  # a grid of results names all of its rows
        ]
        done = subprocess.run([*command, "--quiet"], stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"{name} was not measured: fedvl compare ended with exit code {done.returncode}.")
    found = json.loads((out / "comparison.json").read_bytes())
    kept = ("row", "column", "mean", "deviation", "interval", "n", "near_chance")
    return {
        "kind": "grid",
        "command": shlex.join(shown),
        "seeds": found["seeds"],
        "dataset": ", ".join(Path(dataset).stem for dataset in found["facts"]["dataset"]),
        "model": ", ".join(found["facts"]["model"]),
        "settings_sha256": settings_sha256(path),
        "rows": found["rows"],
        "columns": found["columns"],
        "cells": [{key: cell[key] for key in kept} for cell in found["cells"]],
    }


def benchmark(name: str) -> dict[str, Any]:
    """Run a benchmark, and return its figures."""
    one = BENCHMARKS[name]
    done = subprocess.run(
        [sys.executable, "-m", *one.arguments.split()], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    cells = one.cells([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")])
    return {
        "kind": "benchmark",
        "command": f"python -m {one.arguments}",
        "seeds": 1,
        "dataset": "",
        "model": "",
        "rows": list(dict.fromkeys(cell.row for cell in cells)),
        "columns": list(dict.fromkeys(cell.column for cell in cells)),
        "cells": cells,
    }


if __name__ == "__main__":
    sys.exit(main())
