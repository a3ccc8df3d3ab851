"""Test faults that a federation must survive: invalid updates, 200 kills, and a cut connection.

    python -m benchmarks.faults [updates|kills|partition] [--kills 200] [--json]

24 kinds of invalid update are also given to Flower's FedAvg. Of the kills, 7 in 10 are of runs in
one process, also inside the writing of a file; the others are of the server, the SuperLink, parties
and SuperNodes of a federation of real processes (``machine_faults.py``). ``fedvl status`` is polled
meanwhile. A partition cuts a party off for a minute. Flower is ``pip install -e ".[flower]" -c constraints.txt``. The
same faults, and those of disks, caches and races, are in tests/reliability and tests/end_to_end.
"""

import argparse
import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.machine_faults import cut_for_a_minute, kill_machines, watched
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
    good, refused = sort_out(
        readable, dict.fromkeys(range(4), 20), dict.fromkeys(range(4), shared), method, FederationConfig()
    )
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


def kill_everything(kills: int) -> dict[str, Any]:
    """Kill runs first: they are forked, and must not inherit what machines start."""
    began, outcome = time.perf_counter(), dict[str, Any]()
    for part, share, of in (("run", kills * 7 // 10, kill_locally), ("machines", kills * 3 // 10, kill_machines)):
        with TemporaryDirectory() as name, watched(Path(name)) as polled:
            found = of(share, Path(name))
        outcome[part] = {"by": {key: vars(value) for key, value in found.items()}, "status": polled}
    return {**outcome, "seconds": time.perf_counter() - began}


def kill_locally(kills: int, work: Path) -> dict[str, Campaign]:
    return kill_runs(PAPERS, kills, work)


def show_kills(outcome: dict[str, Any]) -> None:
    runs, machines = outcome["run"]["by"], outcome["machines"]["by"]
    local = {"kills": sum(sum(o["kills"].values()) for o in runs.values()), "dropped": 0}
    local |= {name: sum(o[name] for o in runs.values()) for name in ("runs", "same")}
    rows = {"run": local, **machines}
    total = {name: sum(row[name] for row in rows.values()) for name in ("kills", "runs", "same", "dropped")}
    print(
        f"\n{total['kills']} kills in {outcome['seconds']:.0f} s; of {total['runs']} runs, {total['same']} ended with the"
    )
    print(
        f"bits of the undisturbed run, {total['dropped']} with those of a run without the clients that it recorded as dropped."
    )
    for part in ("run", "machines"):
        polled = outcome[part]["status"]
        print(
            f"fedvl status beside the {part}: {polled['polls']} polls, {polled['failures']} failures {polled['reasons']}"
        )
    print(
        "\n| killed | kills | runs | same bits | drop recorded | server resumed | party restarted |\n|---|" + "---|" * 6
    )
    for name, row in rows.items():
        cells = (row[key] for key in ("kills", "runs", "same", "dropped"))
        print(f"| {name} | {' | '.join(map(str, cells))} | {row.get('resumed', '-')} | {row.get('restarted', '-')} |")
    print("\n| method | kills | " + " | ".join((AT_RANDOM, *PLACES)) + " | same bits |\n|---|" + "---|" * 7)
    for method, row in runs.items():
        places = " | ".join(str(row["kills"][place]) for place in (AT_RANDOM, *PLACES))
        print(f"| {method} | {sum(row['kills'].values())} | {places} | {row['same']} of {row['runs']} runs |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("updates", "kills", "partition"), help="all if absent")
    parser.add_argument("--kills", type=int, default=200, help="split among runs and machines")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    outcome: dict[str, Any] = {}
    if arguments.part in ("kills", None):  # first, because forks must not inherit what Flower starts
        outcome["kills"] = kill_everything(arguments.kills)
    if arguments.part in ("partition", None):
        with TemporaryDirectory() as name:
            outcome["partition"] = cut_for_a_minute(Path(name))
    if arguments.part in ("updates", None):
        outcome["updates"] = bad_update_rows()
    if arguments.json:
        print(json.dumps(outcome))
        return
    if "updates" in outcome:
        show_updates(outcome["updates"])
    if "kills" in outcome:
        show_kills(outcome["kills"])
    if "partition" in outcome:
        print(f"\nA party cut off for a minute: {outcome['partition']}")


if __name__ == "__main__":
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    main()
