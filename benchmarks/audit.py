"""Audit the methods of the papers before and after remedies.

    python -m benchmarks.audit [--dataset NAME|FILE] [--text-dataset FILE] [--methods cachefl ...]
        [--remedies 0123] [--rounds 2] [--seed 0] [--json FILE]

Each method runs with CASES' settings, first as it is and then with each remedy that it takes; where it
refuses one, its sentence is printed. 10 clients are attacked (`fedvl audit` with the same settings gives
the same figures). The tables have a row for each attack and view and a column for each remedy: the
value, its 95 % interval and, first, the chance level. Fed-PRIME needs images with texts: --text-dataset
replaces its embedded ones. The last table compares the attacks of the server's view over the methods.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from fedvl.audit.finding import SERVER, written
from fedvl.audit.perform import NAMES, audit
from fedvl.audit.show import figure, interval
from fedvl.config import overlay
from fedvl.data.opener import Opener
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.settings import resolve_experiment

Settings = dict[str, Any]

MANY: Settings = {"data": {"partition": "dirichlet:0.1", "clients": 100, "shots": 200, "minimum": 5}}
CASES: dict[str, Settings] = {
    "fed-mp": {"data": {"clients": 3}},
    "fst-cbdg": MANY,
    "cachefl": MANY,
    "fedpp": {"data": {"partition": "dirichlet:0.5", "shots": 20, "minimum": 5}},
    "fed-prime": {},
}
SLOW = ("fedpp", "fed-prime")  # run an encoder in each step: one round is audited
CLIPS = {"fst-cbdg": 0.003, "cachefl": 0.0007, "fedpp": 0.1}  # of these settings, about the median norm of an update


REMEDIES = ("nothing", "--secure-sum", "--secure-sum --privacy client:eps=8", "--privacy record:eps=8")


def remedies(method: str, clients: int) -> dict[str, Settings]:
    """Return settings for each remedy, by what the user types."""
    clip = CLIPS.get(method, 1.0)
    summed = {"secure_sum": True, "least_clients": max(3, clients * 9 // 10), "drift": False}
    noise = {"unit": "client", "epsilon": 8.0, "clip": clip}
    options = {"method": {"selection": "fpl"}} if method == "fedpp" else {}
    settings: list[Settings] = [
        {},
        {"federation": {"secure_sum": True}},
        {"federation": summed, "privacy": noise, **options},
        {"privacy": {"unit": "record", "epsilon": 8.0}},
    ]
    return dict(zip(REMEDIES, settings, strict=True))


def layered(*layers: Settings) -> Settings:
    found: Settings = {}
    for layer in layers:
        overlay(found, layer)
    return found


def audit_method(method: str, given: argparse.Namespace, opener: Opener) -> dict[str, Any]:
    """Return the audit under each remedy, or why the method refuses it."""
    dataset = given.text_dataset if method == "fed-prime" else given.dataset
    base = layered({"method": {"name": method}, "seed": given.seed, "federation": {"threads": 1}}, CASES[method])
    overlay(base, {"data": {"dataset": dataset}} if dataset else {})
    clients = resolve_experiment(base).data.clients
    found: dict[str, Any] = {}
    for remedy, settings in remedies(method, clients).items():
        if given.remedies and str(REMEDIES.index(remedy)) not in given.remedies:
            continue
        try:
            experiment = resolve_experiment(layered(base, settings))
            rounds = 1 if method in SLOW else given.rounds
            found[remedy] = audit(experiment, Silent(), rounds=rounds, opener=opener)
        except FedVLError as error:
            found[remedy] = str(error)
        print(f"{method}, {remedy}: {found[remedy] if isinstance(found[remedy], str) else 'audited'}", flush=True)
    return found


def show(method: str, found: dict[str, Any]) -> None:
    """Print the values as a table, bold where a leak is shown."""
    audits = {remedy: one for remedy, one in found.items() if not isinstance(one, str)}
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for remedy, one in audits.items():
        for each in one["findings"]:
            cells = lines.setdefault((each["name"], each["view"]), {"chance": written(each["chance"], each["unit"])})
            cells[remedy] = cell(each)
    print(f"\n{method}\n\n| attack | seen by | chance level | {' | '.join(f'`{remedy}`' for remedy in audits)} |")
    print(f"|{'---|' * (3 + len(audits))}")
    for (name, view), cells in lines.items():
        print(f"| {name} | {view} | {cells['chance']} | {' | '.join(cells.get(remedy, '-') for remedy in audits)} |")
    print("", *(f"- `{remedy}`: {one}" for remedy, one in found.items() if isinstance(one, str)), sep="\n", flush=True)


def summarise(found: dict[str, dict[str, Any]]) -> None:
    """Print what the server learns without a remedy, a row for each method and a column for each attack."""
    plain = {method: audits["nothing"] for method, audits in found.items() if isinstance(audits.get("nothing"), dict)}
    values = {
        method: {each["name"]: each for each in one["findings"] if each["view"] == SERVER}
        for method, one in plain.items()
    }
    names = [name for name in NAMES if any(name in own for own in values.values())]
    print(f"\nBy the server, without remedies\n\n| method | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}")
    for method, own in values.items():
        cells = [cell(own[name]) if name in own else "-" for name in names]
        print(f"| {method} | {' | '.join(cells)} |")


def cell(each: dict[str, Any]) -> str:
    text = f"{figure(each)} ({interval(each)})"
    return f"**{text}**" if each["leaks"] else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset")
    parser.add_argument("--text-dataset")
    parser.add_argument("--methods", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--remedies", help="numbers of some of them, from 0 for nothing, such as 01")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    opener, found = Opener.once(), {}
    for method in given.methods:
        found[method] = audit_method(method, given, opener)
        show(method, found[method])
    summarise(found)
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
