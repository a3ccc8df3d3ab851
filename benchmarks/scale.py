"""How the cost of a round grows with registered clients and with the cohort.

python -m benchmarks.scale --json [--device cpu|cuda] [--methods linear fst-cbdg] [--grid CLIENTS:COHORT ...]
python -m benchmarks.scale --json --methods promptfl --dim 256 --one-step   # through the embedded model's text tower

Features are made up (unit vectors), of which each client holds a few. One line a case: the median time of a round,
what that is for each client of the cohort, and the memory of the process after its first round and after its last.
"""

import argparse
import json
import resource
import statistics
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fedvl.config import FederationConfig, TrainingConfig
from fedvl.federation.local import LocalEngine
from fedvl.federation.round import Federation
from fedvl.federation.stacks import SampleRows
from fedvl.methods import load_method
from fedvl.methods.base import Samples, Task
from fedvl.models.checkpoint import load_model
from fedvl.seeding import torch_generator

GRID = ("1000:100", "10000:1000", "100000:10000", "1000000:100000")


def resident_mb() -> int:
    """Return the memory that the process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 2**20


def unit(rows: int, width: int, generator: torch.Generator, device: str) -> torch.Tensor:
    """Draw unit vectors in pieces, so that no second copy of all is held."""
    drawn = torch.empty(rows, width, device=device)
    for first in range(0, rows, 100_000):
        part = torch.randn(min(100_000, rows - first), width, generator=generator)
        drawn[first : first + len(part)] = torch.nn.functional.normalize(part, dim=-1).to(device)
    return drawn


def measure(name: str, clients: int, cohort: int, settings: argparse.Namespace) -> dict[str, Any]:
    """Run a few rounds of one method; return what they took."""
    device, count = settings.device, clients * settings.samples
    generator = torch.Generator().manual_seed(0)
    # no more different vectors than memory has room for: further clients hold the same ones again
    features = unit(min(count, settings.most_rows), settings.dim, generator, device)
    labels = torch.randint(settings.classes, (len(features),), generator=generator).to(device)
    texts = unit(settings.classes, settings.dim, generator, device)
    began = time.perf_counter()
    kind = load_method(name)
    if kind.through_encoder:
        encoder: Any = load_model("fedvl-tiny", device)
        assert encoder.dim == settings.dim, (
            f"the embedded model has features of {encoder.dim} numbers: --dim {encoder.dim}"
        )
    else:
        encoder = SimpleNamespace(logit_scale=20.0, name="made up")
    method = kind(kind.options_type(), Task(tuple(map(str, range(settings.classes))), texts, encoder, clients))
    rows = SampleRows(
        torch.arange(count, device=device) % len(features), torch.full((clients,), settings.samples, device=device)
    )
    config = FederationConfig(
        rounds=settings.rounds, per_round=cohort, chunk=settings.chunk, one_step=settings.one_step
    )
    training = TrainingConfig(batch_size=50, learning_rate=0.01, momentum=0.9)
    engine = LocalEngine(method, Samples({"features": features}, labels), rows, training, config, 0)
    start = {key: tensor.to(device) for key, tensor in method.start(torch_generator(0, "start")).items()}
    federation = Federation(method, engine, config, 0, start)
    times, held = [time.perf_counter()], [resident_mb()]

    def after_round(record: object) -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        held.append(resident_mb())

    federation.run(after_round=after_round)
    rounds = [later - earlier for earlier, later in pairwise(times)]
    typical = statistics.median(rounds)
    return {
        "method": name,
        "clients": clients,
        "cohort": cohort,
        "round_s": round(typical, 4),
        "us_per_client": round(1e6 * typical / cohort, 1),
        "rss_mb": held[-1],
        "rss_mb_after_first": held[1],
        "rounds_s": [round(each, 4) for each in rounds],
        "setup_s": round(times[0] - began, 3),
        "chunk": None if settings.one_step else engine.chunk,
        "one_step": settings.one_step,
        "device": device,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON a case")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", default=["linear", "fst-cbdg"])
    parser.add_argument("--grid", nargs="+", default=GRID, metavar="CLIENTS:COHORT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=10, help="of each client")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--chunk", type=int, help="clients in one kernel; by memory if absent")
    parser.add_argument("--one-step", action="store_true", help="one backward pass for all clients")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--most-rows", type=int, default=1_000_000, help="different feature vectors")
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    if not settings.json:
        print(f"{'method':10} {'clients':>9} {'cohort':>8} {'round, s':>9} {'us/client':>10} {'memory, MB':>11}")
    for name in settings.methods:
        for cell in settings.grid:
            clients, cohort = map(int, cell.split(":"))
            found = measure(name, clients, cohort, settings)
            if settings.json:
                print(json.dumps(found), flush=True)
            else:
                print(
                    f"{name:10} {clients:9,} {cohort:8,} {found['round_s']:9.4f} {found['us_per_client']:10.1f} "
                    f"{found['rss_mb']:11,}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
