"""Attack the papers' methods without remedies, under secure aggregation, and with epsilon 3 besides.

    python -m benchmarks.remedies [--methods fed-mp cachefl ...] [--remedies 012] [--seeds 0] [--json FILE]
        [--markdown FILE]

Each cell is a run (`fedvl.run`) for the accuracy and an audit (what `fedvl audit` does) for the attacks:
the server's view of membership (AUC), of the label histogram (r), of class names and of features
(share of a client's images that recovered features point to). A column has the largest figure of the attacks that
belong to it; "-" where none applies. With several seeds, figures are means over seeds, in brackets the
lowest and the highest; the JSON has each attack's own. The cost is in points of accuracy. CASES has the
settings, REMEDIES what is switched on; a method that needs its form of sums has it in SUMS. JSON has
commit, command, seeds and machine.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import fedvl
from fedvl.audit.perform import audit
from fedvl.config import overlay
from fedvl.data.sources import Opener
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.runs.settings import resolve_experiment

Settings = dict[str, Any]

MANY: Settings = {
    "data": {"partition": "dirichlet:0.1", "clients": 100, "shots": 200, "minimum": 5},
    "federation": {"rounds": 10},
}
SMALL: Settings = {"evaluation": {"every": 100}, "federation": {"drift": False}}
CASES: dict[str, Settings] = {
    "fed-mp": {"data": {"clients": 3}},
    "fst-cbdg": {**MANY, "training": {"learning_rate": 0.1}},
    "fedpp": {
        "data": {"partition": "dirichlet:0.5", "clients": 20, "shots": 10, "test_shots": 20, "minimum": 2},
        "training": {"local_epochs": 2},
        "federation": {"rounds": 2},
    },
    "cachefl": {**MANY, "training": {"learning_rate": 10.0}},
    "fed-prime": {
        "data": {"clients": 6, "shots": 10, "test_shots": 10},
        "federation": {"rounds": 3},
        "evaluation": {"protocol": "closed"},
    },
    "linear": MANY,
    "ridge": {"data": MANY["data"]},
}
SUMS: dict[str, Settings] = {
    "fed-mp": {"merging": "summed"},
    "fedpp": {"counts": "shares"},
    "fed-prime": {"matching": "client"},
}
CLIPS = {"fed-mp": 0.007, "fst-cbdg": 0.03, "fedpp": 0.1, "cachefl": 3.0, "fed-prime": 0.1, "linear": 0.3}
SLOW = ("fedpp", "fed-prime")  # run an encoder in each step: one round of four clients is audited
REMEDIES = ("none", "secure aggregation", "secure aggregation + eps 3")
ATTACKS = {
    "membership": ("membership", "membership-replay", "membership-leverage"),
    "histogram": ("label-histogram", "label-histogram-of-report"),
    "names": ("class-names",),
    "features": ("feature-linking",),
}
FIGURES = ("name", "value", "interval", "chance")
SERVER = "the server"


def settings_of(method: str, remedy: int, seed: int) -> Settings:
    """Return the settings of one cell."""
    found: Settings = {"seed": seed, "method": {"name": method}, "federation": {"threads": 1}}
    for layer in (SMALL, CASES[method]):
        overlay(found, layer)
    clients = found["data"]["clients"]
    if remedy:
        overlay(found, {"method": SUMS.get(method, {}), "federation": {"secure_sum": True}})
    if remedy == 2:
        least = max(3, clients * 95 // 100)
        if method == "ridge":  # its noise is added once for each image
            overlay(found, {"federation": {"least_clients": least}, "privacy": {"unit": "record", "epsilon": 3.0}})
            return found
        overlay(found, {"federation": {"least_clients": least}})
        overlay(found, {"privacy": {"unit": "client", "epsilon": 3.0, "clip": CLIPS[method]}})
    return found


def accuracy_of(settings: Settings) -> float:
    """Run an experiment in a folder of its own; return its accuracy in percent."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experiment.toml"
        file.write_text(resolve_experiment(settings).to_toml())
        found = fedvl.run(str(file), out=Path(folder) / "run", quiet=True).accuracy
        assert found is not None, "every case has test images"
        return found


def attacked(settings: Settings, slow: bool, opener: Opener) -> dict[str, dict[str, Any]]:
    """Return the figures of each attack from the server's view, by its name."""
    found = audit(
        resolve_experiment(settings), Silent(), clients=4 if slow else 10, rounds=1 if slow else 2, opener=opener
    )
    seen = [each for each in found.findings if each.view == SERVER]
    names = {name for of_kind in ATTACKS.values() for name in of_kind}
    return {each.name: {key: getattr(each, key) for key in FIGURES} for each in seen if each.name in names}


def summarised(kind: str, by_seed: list[dict[str, dict[str, Any]]]) -> dict[str, Any] | None:
    """Return the largest figure of a kind of attack; of several seeds the mean, and its range."""
    largest = [
        max(
            (attacks[name] for name in ATTACKS[kind] if name in attacks),
            key=lambda each: float(each["value"]),
            default=None,
        )
        for attacks in by_seed
    ]
    found = [each for each in largest if each is not None]
    if len(found) < 2:
        return found[0] if found else None
    values = [float(each["value"]) for each in found]
    chance = statistics.mean(float(each["chance"]) for each in found)
    return {"value": statistics.mean(values), "interval": [min(values), max(values)], "chance": chance}


def cell(method: str, remedy: int, seeds: list[int], opener: Opener) -> dict[str, Any]:
    """Measure one cell, or say why the method refuses the remedy."""
    began = time.perf_counter()
    try:
        accuracies = [accuracy_of(settings_of(method, remedy, seed)) for seed in seeds]
        attacks = [attacked(settings_of(method, remedy, seed), method in SLOW, opener) for seed in seeds]
    except FedVLError as error:
        return {"refused": str(error)}
    figures = {kind: summarised(kind, attacks) for kind in ATTACKS}
    return {"accuracies": accuracies, **figures, "attacks": attacks, "seconds": time.perf_counter() - began}


def shown(found: Mapping[str, Any] | None) -> str:
    if not found:
        return "-"
    low, high = found["interval"]
    text = f"{found['value']:.2f} ({low:.2f} to {high:.2f})"
    return f"**{text}**" if low > found["chance"] else text


def row(method: str, remedy: int, found: Mapping[str, Any], clean: float | None) -> str:
    """Return a row of the table."""
    if "refused" in found:
        return f"| {method} | {REMEDIES[remedy]} | refused: {found['refused']} | | | | | |"
    accuracy = statistics.mean(found["accuracies"])
    cost = "" if clean is None or not remedy else f"{clean - accuracy:.1f}"
    figures = " | ".join(shown(found[kind]) for kind in ATTACKS)
    return f"| {method} | {REMEDIES[remedy]} | {accuracy:.1f} | {cost} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--remedies", default="012", help="numbers of some of them, from 0 for none, such as 01")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    opener, cells = Opener.once(), dict[str, dict[str, Any]]()
    lines = ["| method | remedy | accuracy, % | cost | membership, AUC | histogram, r | class names | features |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    print(*lines, sep="\n", flush=True)
    for method in given.methods:
        clean: float | None = None
        for remedy in map(int, given.remedies):
            found = cell(method, remedy, given.seeds, opener)
            cells.setdefault(method, {})[REMEDIES[remedy]] = found
            if remedy == 0 and "accuracies" in found:
                clean = statistics.mean(found["accuracies"])
            lines.append(row(method, remedy, found, clean))
            print(lines[-1], flush=True)
    if given.markdown:
        given.markdown.write_text("\n".join(lines) + "\n")
    if given.json:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
        told = {"commit": commit, "command": " ".join(sys.argv), "seeds": given.seeds, "machine": machine}
        given.json.write_text(json.dumps({**told, "cells": cells}, indent=1))


if __name__ == "__main__":
    main()
