"""Test faults that a federation must survive: 24 kinds of invalid update and 200 server kills.

    python -m benchmarks.faults [updates|kills] [--kills 200] [--json]

Invalid updates are also given to Flower's FedAvg, which needs ``pip install "fedvl[flower]"``. The
same faults, and those of disks, caches and races, are in tests/reliability.
"""

import argparse
import json
import os
import time
from typing import Any

import torch

from fedvl.config import FederationConfig
from fedvl.federation.checks import sort_out
from fedvl.methods.base import Method, Options, Update
from fedvl.tensors import Tensors, digest, weighted_mean
from tests.helpers.bad_updates import KINDS, bad_message, honest, received
from tests.helpers.kills import AT_RANDOM, PLACES, Campaign, kill_runs
from tests.helpers.small import PAPERS, small_task

BAD = 2  # the client that sends an invalid update


def trial_updates() -> tuple[Tensors, list[Update]]:
    """Return a linear head, and four clients' honest updates of it."""
    generator = torch.Generator().manual_seed(0)
    shared = {"bias": torch.zeros(4), "weight": torch.randn(4, 6, generator=generator)}
    updates = [
        Update(
            client,
            {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in shared.items()},
            10.0 + client,
        )
        for client in range(4)
    ]
    return shared, updates


def without_bad(updates: list[Update]) -> Tensors:
    good = [update for update in updates if update.client != BAD]
    return weighted_mean([update.tensors for update in good], [update.weight for update in good])


def ours(kind: str) -> str:
    """Return how FedVL handles four messages of which one is invalid."""
    shared, updates = trial_updates()
    messages = [bad_message(kind, u) if u.client == BAD else honest(u.tensors, u.client, u.weight) for u in updates]
    readable, unreadable = received(messages)
    method = Method(Options(), small_task())
    good, refused = sort_out(readable, dict.fromkeys(range(4), 20), shared, method, FederationConfig())
    merged = weighted_mean([update.tensors for update in good], [update.weight for update in good])
    [refusal] = unreadable + refused
    same = digest(merged) == digest(without_bad(updates)) and refusal.client == BAD
    return f"refused: {refusal.reason}" if same else "MERGED"


def bad_update_rows() -> list[dict[str, str]]:
    try:
        from benchmarks.flower_faults import theirs
    except ImportError:
        return [{"kind": kind, "fedvl": ours(kind)} for kind in KINDS]
    return [{"kind": kind, "fedvl": ours(kind), "flower": theirs(kind)} for kind in KINDS]


def show_updates(rows: list[dict[str, str]]) -> None:
    refused = sum(row["fedvl"].startswith("refused") for row in rows)
    print(
        f"One bad client of four: FedVL refuses {refused} of {len(rows)} kinds, and merges the other three clients.\n"
    )
    print("| the bad client sends | Flower's FedAvg | FedVL |\n|---|---|---|")
    for row in rows:
        print(f"| {row['kind']} | {row.get('flower', 'not installed')} | {row['fedvl']} |")


def show_kills(outcomes: dict[str, Campaign], seconds: float) -> None:
    total, same = sum(o.total for o in outcomes.values()), sum(o.same for o in outcomes.values())
    runs, redone = sum(o.runs for o in outcomes.values()), sum(o.redone for o in outcomes.values())
    print(
        f"\n{total} kills in {seconds:.0f} s; {same} of {runs} runs ended with the same bits as the uninterrupted one;"
    )
    print(f"{redone} rounds were repeated, at most one for each kill.\n")
    print("| method | kills | " + " | ".join((AT_RANDOM, *PLACES)) + " | same bits |\n|---|" + "---|" * 7)
    for method, outcome in outcomes.items():
        places = " | ".join(str(outcome.kills[place]) for place in (AT_RANDOM, *PLACES))
        print(f"| {method} | {outcome.total} | {places} | {outcome.same} of {outcome.runs} runs |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("updates", "kills"), help="both if absent")
    parser.add_argument("--kills", type=int, default=200, help="split among the methods")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    outcome: dict[str, Any] = {}
    if arguments.part != "updates":  # first, because forks must not inherit what Flower starts
        began = time.perf_counter()
        campaigns = kill_runs(PAPERS, arguments.kills)
        outcome["kills"] = {method: vars(campaign) for method, campaign in campaigns.items()}
        seconds = time.perf_counter() - began
    if arguments.part != "kills":
        outcome["updates"] = bad_update_rows()
    if arguments.json:
        print(json.dumps(outcome))
        return
    if "updates" in outcome:
        show_updates(outcome["updates"])
    if "kills" in outcome:
        show_kills(campaigns, seconds)


if __name__ == "__main__":
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    main()
