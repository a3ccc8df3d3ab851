"""Measure what each rule of --robust is worth against each attack, on cifar10-mini.

    python -m benchmarks.robust [--methods linear cachefl fst-cbdg] [--partitions dirichlet:0.1 iid]
        [--rules mean root ...] [--shares 0.1 0.2 0.3] [--clients 20] [--rounds 20] [--seeds 3]
        [--one-hostile] [--json FILE]

For each method and partition, a table of rules by attacks: the accuracy after 20 rounds of 20
clients, as a mean over seeds, for each share of hostile clients; for a backdoor also how many of 100
images of other classes its trigger turns. 100 training images are the server's under "root" (without
their labels for FST-CBDG). Settings beside the presets are in METHODS; an attack that a method has
no labels for is left out.

With --one-hostile, a table by numbers of clients (3, 5 and 10): each rule's accuracy without an
attacker, and with one hostile client the lowest over the attacks.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fedvl.data.sources import Opener
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.federation.attacks import ATTACK_KINDS
from fedvl.federation.robust import RULES
from fedvl.federation.round import Federation
from fedvl.methods import load_method
from fedvl.runs.experiment import local_engine, make_judge, root_engine
from fedvl.runs.preparation import prepare
from fedvl.runs.result import backdoor_figures
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator

METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "cachefl": {"data": {"shots": 200}, "training": {"learning_rate": 3.0}},
    "fst-cbdg": {"training": {"learning_rate": 0.1}},
}
ONE_HOSTILE = {3: 0.34, 5: 0.2, 10: 0.1}  # clients, and the share that makes one of them hostile
OPENER = Opener.once()

Size = tuple[int, int]  # clients, rounds
Cell = dict[str, list[float]]  # by seed: "accuracy" and, of a backdoor, "backdoor"


def measure(method: str, partition: str, rule: str, attack: str | None, seed: int, size: Size) -> dict[str, float]:
    """Return the accuracy of one run, and the success of its backdoor."""
    settings, (clients, rounds) = METHODS[method], size
    federation = {"rounds": rounds, "robust": rule, "threads": 1, **({"attack": attack} if attack else {})}
    experiment = resolve_experiment(
        {
            "seed": seed,
            "method": {"name": method},
            "data": {"partition": partition, "clients": clients, **settings.get("data", {})},
            "training": settings.get("training", {}),
            "federation": federation,
        }
    )
    prepared = prepare(experiment, Silent(), OPENER)
    engine, start = local_engine(prepared), prepared.method.start(torch_generator(seed, "start"))
    root = root_engine(experiment, prepared.method, prepared.training)
    run = Federation(prepared.method, engine, experiment.federation, seed, start, root=root)
    with suppress(FedVLError):  # no sound update is left: the model of the rounds before is the last
        run.run()
    judge = make_judge(prepared, engine)
    success = backdoor_figures(prepared, judge, run).backdoor_success
    found = {"accuracy": float(judge.judge(run.shared, run.last).figures["accuracy"])}
    return found | ({} if success is None else {"backdoor": success})


def cell(method: str, partition: str, rule: str, attack: str | None, seeds: int, size: Size) -> Cell:
    """Return the figures of all seeds; nothing where the attack does not apply."""
    if attack and attack.startswith(("label-flip", "backdoor")) and load_method(method).labels == "none":
        return {}
    found = [measure(method, partition, rule, attack, seed, size) for seed in range(seeds)]
    return {name: [one[name] for one in found] for name in found[0]}


def shown(figures: Cell) -> str:
    if not figures:
        return "-"
    text = f"{statistics.mean(figures['accuracy']):.1f}"
    return f"{text} ({statistics.mean(figures['backdoor']):.0f})" if "backdoor" in figures else text


def table(
    method: str, partition: str, rules: Sequence[str], shares: Sequence[float], seeds: int, size: Size
) -> dict[str, dict[str, Cell]]:
    """Measure and print one table: rules x attacks, with the shares in each cell."""
    found: dict[str, dict[str, Cell]] = {}
    print(f"\n{method}, {partition}, attackers {', '.join(f'{share:g}' for share in shares)}\n")
    print(f"| rule | none | {' | '.join(ATTACK_KINDS)} |\n|{'---|' * (len(ATTACK_KINDS) + 2)}", flush=True)
    for rule in rules:
        clean = cell(method, partition, rule, None, seeds, size)
        found[rule], cells = {"none": clean}, [shown(clean)]
        for kind in ATTACK_KINDS:
            parts = {share: cell(method, partition, rule, f"{kind}:{share:g}", seeds, size) for share in shares}
            found[rule] |= {f"{kind}:{share:g}": part for share, part in parts.items()}
            cells.append(" / ".join(shown(part) for part in parts.values()) if any(parts.values()) else "-")
        print(f"| {rule} | {' | '.join(cells)} |", flush=True)
    return found


def one_hostile(
    method: str, partitions: Sequence[str], rules: Sequence[str], seeds: int, rounds: int
) -> dict[str, dict[str, Cell]]:
    """Measure and print rules by numbers of clients: clean, and the lowest under one hostile client."""
    found: dict[str, dict[str, Cell]] = {}
    print(f"\n{method}: without an attacker; lowest with one hostile client (under which attack)\n")
    print(f"| clients | partition | {' | '.join(rules)} |\n|{'---|' * (len(rules) + 2)}", flush=True)
    for clients, share in ONE_HOSTILE.items():
        for partition in partitions:
            cells = []
            for rule in rules:
                tried = {
                    attack: cell(method, partition, rule, attack and f"{attack}:{share}", seeds, (clients, rounds))
                    for attack in (None, "sign-flip", "scaled", "adaptive", "overstated")
                }
                found[f"{clients} {partition} {rule}"] = {attack or "none": part for attack, part in tried.items()}
                clean = shown(tried.pop(None))
                worst = min(tried, key=lambda attack: statistics.mean(tried[attack]["accuracy"]))
                cells.append(f"{clean}; {shown(tried[worst])} ({worst})")
            print(f"| {clients} | {partition} | {' | '.join(cells)} |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--partitions", nargs="+", default=["dirichlet:0.1", "iid"])
    parser.add_argument("--rules", nargs="+", default=[*RULES, "root"], choices=[*RULES, "root"])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.2, 0.3])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--one-hostile", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.one_hostile:
        found = {
            method: one_hostile(method, given.partitions, given.rules, given.seeds, given.rounds)
            for method in given.methods
        }
    else:
        found = {
            f"{method}, {partition}": table(
                method, partition, given.rules, given.shares, given.seeds, (given.clients, given.rounds)
            )
            for method in given.methods
            for partition in given.partitions
        }
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
