"""Compare Fed-PRIME with its baselines: test accuracy under seven conditions of missing modalities.

    python -m benchmarks.fed_prime emoji-mini [emoji FILE.parquet]
        [--patterns both --seeds 3 --rounds 100 --out rows.jsonl]

All methods train with the same rate, batch, rounds and epochs; 20 clients, 70 % of the training
samples miss a modality. Prompts train at ``--prompt-rates`` times that rate; ``--validate`` tests on
a fifth of the training images, kept out of training, by which a rate can be chosen. Rows are printed
as they finish; ``--show FILE...`` prints the tables of rows that were written before.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedvl.runs.preparation as preparation
from fedvl.data.sources import Opener, open_dataset
from fedvl.data.stores import Dataset, Split
from fedvl.display import Silent
from fedvl.federation.records import RoundFigures
from fedvl.federation.round import Federation
from fedvl.models.checkpoint import load_model
from fedvl.runs.experiment import local_engine, make_judge
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator
from fedvl.tensors import IntArray

ALIGNED = ("fed-inter", "fed-prime")  # the methods that align prompts
METHODS = ("fedavg-p", "fedprox-p", "fedmsplit-p", "fed-inter", "fed-intra", "fed-prime")
PATTERNS = ("text", "image", "both")
Row = dict[str, Any]
VALIDATION_SEED = 1  # not that of a split into training and test


def drawn(rows: IntArray, generator: np.random.Generator) -> IntArray:
    """Return a fifth of some rows."""
    return generator.permutation(rows)[: round(len(rows) / 5)]


def without_test(name: str, root: Path | None) -> Dataset:
    """Open a dataset whose test is a fifth of its training images; its own test is not read."""
    dataset = open_dataset(name, root)
    split = dataset.splits["train"]
    generator = np.random.default_rng(VALIDATION_SEED)
    held_out = np.concatenate([drawn(np.flatnonzero(split.labels == c), generator) for c in np.unique(split.labels)])
    parts = {"train": np.setdiff1d(np.arange(len(split.labels)), held_out), "test": np.sort(held_out)}
    texts = split.texts or ()
    splits = {
        part: Split(split.store, split.rows[rows], split.labels[rows], tuple(texts[row] for row in rows) or None)
        for part, rows in parts.items()
    }
    return Dataset(dataset.name, dataset.class_names, dataset.templates, splits, dataset.notes)


def measure(
    arguments: argparse.Namespace, dataset: str, pattern: str, method: str, prompt_rate: float, seed: int
) -> Row:
    options = {"most_prompts": arguments.most_prompts} if method in ALIGNED and arguments.most_prompts else {}
    settings = {
        "seed": seed,
        "device": arguments.device,
        "method": {"name": method, "prompt_rate": prompt_rate, **options},
        "data": {
            "dataset": dataset,
            "partition": arguments.partition,
            "clients": arguments.clients,
            "shots": arguments.shots,
            "missing": f"{pattern}:{arguments.rate}",
            "missing_by": arguments.missing_by,
        },
        "model": {"name": arguments.model},
        "training": {
            "learning_rate": arguments.learning_rate,
            "local_epochs": arguments.local_epochs,
            "batch_size": arguments.batch_size,
        },
        "federation": {
            "rounds": arguments.rounds,
            "chunk": arguments.chunk or arguments.clients,
            "threads": arguments.threads,
            "sequential": arguments.sequential,
        },
    }
    opener = Opener(without_test if arguments.validate else open_dataset, load_model)
    prepared = preparation.prepare(resolve_experiment(settings), Silent(), opener)
    engine, start = local_engine(prepared), prepared.method.start(torch_generator(seed, "start"))
    federation = Federation(prepared.method, engine, prepared.experiment.federation, seed, start)
    began = time.perf_counter()
    pools = list[int]()

    def count(shared: Any, last: Any, number: int) -> RoundFigures:
        pools.append(len(shared.get("inter", ())))
        return RoundFigures()

    federation.run(count)
    seconds = time.perf_counter() - began
    judge = make_judge(prepared, engine)
    asked = arguments.conditions or list(judge.conditions)
    judge = replace(judge, conditions={name: judge.conditions[name] for name in asked})
    return {
        "dataset": Path(dataset).stem,
        "partition": arguments.partition,
        "pattern": pattern,
        "method": method,
        "prompt_rate": prompt_rate,
        "sequential": arguments.sequential,
        "validate": arguments.validate,
        "missing_by": arguments.missing_by,
        "most_prompts": arguments.most_prompts,
        "seed": seed,
        "rounds": arguments.rounds,
        "conditions": judge.judge_conditions(federation.shared, federation.last),
        "loss": [record.loss for record in federation.records][:: max(1, arguments.rounds // 10)],
        "pool": pools[-1],
        "pools": pools[:: max(1, arguments.rounds // 10)],
        "bytes_up": [record.bytes_up for record in federation.records][:: max(1, arguments.rounds // 10)],
        "moved": {
            name: float((tensor - start[name]).norm() / start[name].norm())
            for name, tensor in federation.shared.items()
            if tensor.shape == start[name].shape and start[name].any()  # an aligned pool has different prompts
        },
        "seconds": seconds,
    }


def show(rows: list[Row], figure: str) -> None:
    """Print a table for each dataset, partition and training pattern.

    It shows methods and prompt rates x conditions, with mean and standard deviation over seeds.
    """
    tables: dict[str, dict[tuple[str, float], list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        kept = f", at most {row['most_prompts']} prompts" if row["most_prompts"] else ""
        title = f"{row['dataset']}, {row['partition']}, trained with missing {row['pattern']} by {row['missing_by']}"
        title += f"{kept}{', sequential' if row['sequential'] else ''}{', validation' if row['validate'] else ''}"
        tables[title][row["method"], row["prompt_rate"]].append(row)
    for title, methods in tables.items():
        conditions = [c["condition"] for c in next(iter(methods.values()))[0]["conditions"]]
        print(f"\n{title}: {figure}, %\n")
        print(
            f"| method | prompts' rate x | {' | '.join(conditions)} | prompts | seeds |\n|{'---|' * (len(conditions) + 4)}"
        )
        for method, rate in sorted(methods, key=lambda item: (METHODS.index(item[0]), item[1])):
            found = methods[method, rate]
            cells = []
            for index in range(len(conditions)):
                values = [row["conditions"][index][figure] for row in found]
                cells.append(
                    f"{statistics.mean(values):.1f} ± {statistics.stdev(values) if len(values) > 1 else 0:.1f}"
                )
            pool = ", ".join(str(row["pool"]) for row in found)
            print(f"| {method} | {rate:g} | {' | '.join(cells)} | {pool} | {len(found)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", default=["emoji-mini"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS))
    parser.add_argument("--partition", default="iid")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--shots", type=int, help="training images of each class (default: all)")
    parser.add_argument("--conditions", nargs="+", help="what to ask, as 'as trained' or text-only (default: all)")
    parser.add_argument("--rate", type=float, default=0.7, help="share of samples that miss a modality")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--local-epochs", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--prompt-rates", type=float, nargs="+", default=[1.0], help="factors on the rate of prompts")
    parser.add_argument("--most-prompts", type=int, help="bound of an aligned pool (default: none)")
    parser.add_argument("--missing-by", default="all", help="data.missing_by")
    parser.add_argument("--sequential", action="store_true", help="clients go on from each other")
    parser.add_argument("--validate", action="store_true", help="test on a fifth of the training images instead")
    parser.add_argument("--tf32", action="store_true", help="matrix products of a GPU in TF32")
    parser.add_argument("--model", default="fedvl-tiny-vilt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--chunk", type=int, help="clients trained at once (default: all; 1 is quicker on a CPU)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e9, help="minutes after which no further run starts")
    parser.add_argument("--out", type=Path, help="file to which each row is appended as JSON")
    parser.add_argument("--show", type=Path, nargs="+", help="print the tables of these files of rows, and run nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_float32_matmul_precision("high" if arguments.tf32 else "highest")
    began, rows = time.perf_counter(), []
    if arguments.show:
        rows = [json.loads(line) for file in arguments.show for line in file.read_text("utf-8").splitlines()]
    else:
        for case in (
            (dataset, pattern, method, rate, seed)
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
            for dataset in arguments.datasets
            for pattern in arguments.patterns
            for method in arguments.methods
            for rate in arguments.prompt_rates
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
