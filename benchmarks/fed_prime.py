"""Compare Fed-PRIME with its baselines: test accuracy under seven conditions of missing modalities.

    python -m benchmarks.fed_prime emoji-mini [emoji FILE.parquet]
        [--patterns both --seeds 3 --rounds 100 --out rows.jsonl]

All methods train with the same rate, batch, rounds and epochs; 20 clients, 70 % of the training
samples miss a modality. Rows are printed as they finish; ``--show FILE...`` prints the tables of
rows that were written before.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from fedvl.seeding import torch_generator
from tests.helpers.runs import run

METHODS = ("fedavg-p", "fedprox-p", "fedmsplit-p", "fed-inter", "fed-intra", "fed-prime")
PATTERNS = ("text", "image", "both")
Row = dict[str, Any]


def measure(arguments: argparse.Namespace, dataset: str, pattern: str, method: str, seed: int) -> Row:
    settings = {
        "seed": seed,
        "device": arguments.device,
        "method": {"name": method},
        "data": {
            "dataset": dataset,
            "partition": arguments.partition,
            "clients": arguments.clients,
            "missing": f"{pattern}:{arguments.rate}",
        },
        "model": {"name": arguments.model},
        "training": {
            "learning_rate": arguments.learning_rate,
            "local_epochs": arguments.local_epochs,
            "batch_size": arguments.batch_size,
        },
        "federation": {"rounds": arguments.rounds, "chunk": arguments.clients, "threads": arguments.threads},
    }
    finished = run(settings)
    federation = finished.federation
    start = finished.prepared.method.start(torch_generator(seed, "start"))
    return {
        "dataset": Path(dataset).stem,
        "partition": arguments.partition,
        "pattern": pattern,
        "method": method,
        "seed": seed,
        "rounds": arguments.rounds,
        "conditions": finished.judge.judge_conditions(federation.shared, federation.last),
        "loss": [record["loss"] for record in federation.records][:: max(1, arguments.rounds // 10)],
        "pool": len(federation.shared.get("inter", ())),
        "moved": {
            name: float((tensor - start[name]).norm() / start[name].norm())
            for name, tensor in federation.shared.items()
            if tensor.shape == start[name].shape and start[name].any()  # an aligned pool has different prompts
        },
        "seconds": finished.seconds,
    }


def show(rows: list[Row], figure: str) -> None:
    """Print a table for each dataset, partition and training pattern.

    It shows methods x conditions, with mean and standard deviation over seeds.
    """
    tables: dict[tuple[str, ...], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        tables[row["dataset"], row["partition"], row["pattern"]][row["method"]].append(row)
    for (dataset, partition, pattern), methods in tables.items():
        conditions = [c["condition"] for c in next(iter(methods.values()))[0]["conditions"]]
        print(f"\n{dataset}, {partition}, trained with missing {pattern}: {figure}, %\n")
        print(f"| | {' | '.join(conditions)} | seeds |\n|{'---|' * (len(conditions) + 2)}")
        for method in (name for name in METHODS if name in methods):
            found = methods[method]
            cells = []
            for index in range(len(conditions)):
                values = [row["conditions"][index][figure] for row in found]
                cells.append(
                    f"{statistics.mean(values):.1f} ± {statistics.stdev(values) if len(values) > 1 else 0:.1f}"
                )
            print(f"| {method} | {' | '.join(cells)} | {len(found)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", default=["emoji-mini"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS))
    parser.add_argument("--partition", default="iid")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rate", type=float, default=0.7, help="share of samples that miss a modality")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--local-epochs", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--model", default="fedvl-tiny-vilt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e9, help="minutes after which no further run starts")
    parser.add_argument("--out", type=Path, help="file to which each row is appended as JSON")
    parser.add_argument("--show", type=Path, nargs="+", help="print the tables of these files of rows, and run nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    began, rows = time.perf_counter(), []
    if arguments.show:
        rows = [json.loads(line) for file in arguments.show for line in file.read_text("utf-8").splitlines()]
    else:
        for case in (
            (dataset, pattern, method, seed)
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
            for dataset in arguments.datasets
            for pattern in arguments.patterns
            for method in arguments.methods
        ):
            if time.perf_counter() - began > 60 * arguments.minutes:
                print(f"Left out: {case}", flush=True)
                continue
            row = measure(arguments, *case)
            rows.append(row)
            accuracies = "  ".join(f"{c['condition']} {c['accuracy']:.1f}" for c in row["conditions"])
            print(*case, f"{accuracies}  loss {row['loss'][-1]:.3f}  {row['seconds']:.1f} s", flush=True)
            print(
                "moved, share of length:", {name: round(share, 4) for name, share in row["moved"].items()}, flush=True
            )
            if arguments.out:
                with open(arguments.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    for figure in ("accuracy", "macro_f1"):
        show(rows, figure)


if __name__ == "__main__":
    main()
