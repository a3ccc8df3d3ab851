"""Measure FedPP's tables with given models and datasets.

They are accuracies (tables 1 and 2), labels (7), CPS for PromptFL (3) and ablations (5).

    python -m benchmarks.fedpp cifar10-mini --device cpu --rounds 2 --local-epochs 1
    python -m benchmarks.fedpp cifar10-mini DATA/eurosat_rgb.parquet DATA/dtd10.parquet \\
        --device cuda --minutes 20 --out rows.jsonl

All methods train with FedPP's settings (rate, decay, batch, schedule, rounds, epochs), so that they
differ only in what they train and by which labels; every client is tested on its own test images.
With ``--draws`` a partition is repeated with several draws of what clients draw for themselves: their
contexts and the order of their images.
Rows are printed as they finish, the main table before the ablations; when the minutes are over, no
further run starts, and the number of runs left out is printed.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import fedvl.runs.preparation as preparation
from fedvl.config import MAX_ROUNDS, overlay
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.federation.records import Record, RoundFigures
from fedvl.federation.round import Federation
from fedvl.methods.fedpp import SETTING
from fedvl.methods.parts.pseudo_labels import label_figures
from fedvl.runs.experiment import local_engine, make_judge
from fedvl.runs.result import pseudo_label_figures
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import derived_seed, torch_generator

PARTITIONS = ("dirichlet:0.1", "quantity:0.2")
PROMPTFL = {"method": {"name": "promptfl"}, "training": SETTING["training"]}
MAIN: dict[str, dict[str, Any]] = {
    "zero-shot": {"method": {"name": "zero-shot"}},
    "fedpp": {"method": {"name": "fedpp"}},
    "promptfl fpl": {**PROMPTFL, "data": {"labels": "fpl"}},
    "promptfl cpl": {**PROMPTFL, "data": {"labels": "cpl"}},
    "promptfl cps": {**PROMPTFL, "data": {"labels": "cps"}},  # CPS without partial aggregation
}
ABLATIONS: dict[str, dict[str, Any]] = {
    "no visual prompts": {"method": {"name": "fedpp", "visual_prompts": False}},
    "no text prompts": {"method": {"name": "fedpp", "text_prompts": False}},
    "fpl labels": {"method": {"name": "fedpp", "selection": "fpl"}},
    "no filters": {"method": {"name": "fedpp", "filters": "none"}},
    "entropy filter": {"method": {"name": "fedpp", "filters": "entropy"}},
    "confidence filter": {"method": {"name": "fedpp", "filters": "confidence"}},
    "labels made once": {"method": {"name": "fedpp", "interval": 1000}},
    "one context for all": {"method": {"name": "fedpp", "contexts": "same"}},
    "contexts averaged": {"method": {"name": "fedpp", "contexts": "averaged"}},
    "begun as words": {"method": {"name": "fedpp", "words": "a photo of a"}},
    "visual rate 0.01": {"method": {"name": "fedpp", "visual_rate": 0.1}},
}
ROWS = ["labels", *MAIN, *ABLATIONS]
LABELLERS = ("zero-shot", "upl", "fpl", "cpl", "cps")
Row = dict[str, Any]
OPENER = preparation.Opener.once()


def settings(arguments: argparse.Namespace, dataset: str, partition: str, seed: int, own: Row) -> Row:
    """Return the settings of the table on top of the method's own."""
    layered: Row = {}
    overlay(layered, own)
    common: Row = {
        "seed": seed,
        "device": arguments.device,
        "data": {"dataset": dataset, "partition": partition, "clients": arguments.clients, "shots": arguments.shots},
        "model": {"name": arguments.model},
        "evaluation": {"protocol": "personal", "batch_size": 256, "every": MAX_ROUNDS},
        "federation": {"rounds": arguments.rounds, "chunk": arguments.chunk, "per_round": arguments.per_round},
        "training": {"local_epochs": arguments.local_epochs, "precision": arguments.precision},
    }
    overlay(layered, common)
    return layered


def prepared_for(arguments: argparse.Namespace, *where: Any) -> preparation.Prepared:
    return preparation.prepare(resolve_experiment(settings(arguments, *where)), Silent(), OPENER)


def measure(arguments: argparse.Namespace, dataset: str, partition: str, seed: int, draw: int, own: Row) -> Row:
    """Run once; return final accuracies, labels, and how far prompts moved apart in each round."""
    prepared = prepared_for(arguments, dataset, partition, seed, own)
    experiment, method = prepared.experiment, prepared.method
    shared = method.start(torch_generator(seed, "start"))
    engine = local_engine(prepared)
    engine.private_seed = derived_seed(seed, "draw", draw) if draw else seed
    judge = make_judge(prepared, engine)
    federation = Federation(method, engine, experiment.federation, seed, shared)
    by_round: list[Record] = []

    def evaluate(shared: Any, last: Any, number: int) -> RoundFigures:
        due = arguments.every and number % arguments.every == 0
        found = RoundFigures(accuracy=judge.judge(shared, last).figures["accuracy"]) if due else RoundFigures()
        return found.joined(pseudo_label_figures(prepared, federation))

    if shared or method.role.trained_private:
        federation.run(evaluate, by_round.append)
    found = judge.judge(federation.shared, federation.last).figures
    kept_of_round = ("accuracy", "pseudo_label_accuracy", "drift_diversity", "cosine_distance", "seconds")
    return {
        "accuracy": found["accuracy"],
        "weighted_accuracy": found["weighted_accuracy"],
        **pseudo_label_figures(prepared, federation).to_dict(),
        "rounds": [{k: v for k, v in record.to_dict().items() if k.startswith(kept_of_round)} for record in by_round],
    }


def label_rows(arguments: argparse.Namespace, dataset: str, partition: str, seed: int) -> Row:
    """Return the percentage of zero-shot pseudo-labels that are true, by labeller (table 7)."""
    found = {}
    for labeller in LABELLERS:
        own = {"method": {"name": "linear"}, "data": {"labels": labeller}}
        training = prepared_for(arguments, dataset, partition, seed, own).training
        labels = [training.samples.labels[rows] for rows in training.rows]
        truths = [training.true_labels[rows] for rows in training.rows]
        found[labeller] = label_figures(labels, truths)["pseudo_label_accuracy"]
    return found


def run(arguments: argparse.Namespace) -> list[Row]:
    began, rows, left_out = time.perf_counter(), [], 0
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    cases = [(d, p, s) for d in arguments.datasets for p in arguments.partitions for s in seeds]
    contests = [
        (case, draw, *item)
        for table in ({"labels": Row()}, MAIN, ABLATIONS)
        for case in cases
        for draw in range(arguments.draws)
        for item in table.items()
    ]
    for (dataset, partition, seed), draw, name, own in contests:
        if name not in arguments.rows:
            continue
        if time.perf_counter() - began > 60 * arguments.minutes:
            left_out += 1
            continue
        started = time.perf_counter()
        try:
            where = (arguments, dataset, partition, seed)
            found = label_rows(*where) if name == "labels" else measure(*where, draw, own)
        except FedVLError as error:
            found = {"failed": str(error)}
        row = {"dataset": Path(dataset).stem, "partition": partition, "seed": seed, "draw": draw, "row": name, **found}
        row["seconds"] = time.perf_counter() - started
        rows.append(row)
        print(one_line(row), flush=True)
        if arguments.out:
            with open(arguments.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    if left_out:
        print(f"{left_out} runs were left out: the {arguments.minutes:g} minutes were over.", flush=True)
    return rows


def one_line(row: Row) -> str:
    shown = {name: value for name, value in row.items() if name != "rounds"}
    return "  ".join(
        f"{name}={value:.2f}" if isinstance(value, float) else f"{name}={value}" for name, value in shown.items()
    )


def show(rows: list[Row]) -> None:
    """Print mean and standard deviation over seeds and draws."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if "failed" not in row:
            groups[row["dataset"], row["partition"]].append(row)
    for (dataset, partition), found in groups.items():
        print(f"\n{dataset}, {partition}")
        labelled = [row for row in found if row["row"] == "labels"]
        for labeller in LABELLERS if labelled else ():
            print(f"  labels {labeller:<18}{mean([row[labeller] for row in labelled])} percent true")
        for name in dict.fromkeys(row["row"] for row in found if row["row"] != "labels"):
            mine = [row for row in found if row["row"] == name]
            true = [row["pseudo_label_accuracy"] for row in mine if row.get("pseudo_label_accuracy") is not None]
            print(
                f"  {name:<25}{mean([row['accuracy'] for row in mine])}   by images"
                f" {mean([row['weighted_accuracy'] for row in mine])}" + (f"   labels {mean(true)}" if true else "")
            )


def mean(values: list[float]) -> str:
    return f"{statistics.mean(values):5.1f} ± {statistics.pstdev(values):.1f} ({len(values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", default=["cifar10-mini"])
    parser.add_argument("--partitions", nargs="+", default=list(PARTITIONS))
    parser.add_argument(
        "--rows", nargs="+", default=ROWS, choices=ROWS, metavar="ROW", help=f"some of {', '.join(ROWS)}"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=1, help="draws of contexts and of the order of images, per seed")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--local-epochs", type=int, default=10)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--per-round", type=int, help="clients that train in a round (default: all)")
    parser.add_argument("--shots", type=int, help="training images per class (default: all)")
    parser.add_argument("--model", default="fedvl-tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--chunk", type=int, default=10, help="clients trained in one kernel")
    parser.add_argument("--every", type=int, default=0, help="rounds between accuracies in --out; 0: only the last")
    parser.add_argument("--minutes", type=float, default=1e9, help="minutes after which no further run starts")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--out", type=Path, help="file to which each row is appended as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    show(run(arguments))


if __name__ == "__main__":
    main()
