"""Measure a comparison of small runs, one after another and with ``--jobs``.

    python -m benchmarks.side_by_side [--jobs 2] [--seeds 2] [--json]

``linear``, ``fedprox`` and ``zero-shot`` on the embedded images, each with two seeds: six runs.
CPU seconds are those of the command and its workers, start and import of torch included; ``ratio``
is with ``--jobs`` over without. The results are the same.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

METHODS = "linear,fedprox,zero-shot"


def measure(jobs: int, seeds: int, out: Path) -> dict[str, float]:
    """Return CPU and wall seconds of a comparison."""
    words = ["compare", "--methods", METHODS, "--seeds", str(seeds), "--no-references", "--quiet"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "fedvl", *words, "--jobs", str(jobs), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_seconds": cpu, "wall_seconds": time.perf_counter() - began}


def values_of(out: Path) -> list[list[float]]:
    return [cell["values"] for cell in json.loads((out / "comparison.json").read_text())["cells"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        alone, beside = Path(folder) / "alone", Path(folder) / "beside"
        found = {"one after another": measure(1, given.seeds, alone)}
        found[f"--jobs {given.jobs}"] = measure(given.jobs, given.seeds, beside)
        if values_of(alone) != values_of(beside):
            raise SystemExit("The accuracies differ.")
    first, second = found.values()
    ratio = second["cpu_seconds"] / first["cpu_seconds"]
    if given.json:
        print(json.dumps({**found, "ratio": ratio}))
        return
    for name, seconds in found.items():
        print(f"{name:<18} {seconds['cpu_seconds']:6.1f} s CPU {seconds['wall_seconds']:6.1f} s wall")
    print(f"ratio of CPU seconds {ratio:.2f}")


if __name__ == "__main__":
    main()
