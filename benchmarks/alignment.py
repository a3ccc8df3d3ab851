"""Compare our server's alignment of prompts with the sequential one of Fed-PRIME's public code.

    python -m benchmarks.alignment [--clients 20] [--prompts 20] [--width 768] [--scale 0.02]
        [--noise 0.3] [--threads 1] [--ours-alone]

Each client has the same prompts in its own order, with noise. "sequential" is our reimplementation
of the public code: a random first assignment; then 5 times, one client after the other, two small
networks are evaluated on every centroid, one at a time, networks and centroids make one Adam step on
the likelihood of the client's last assignment, and the Hungarian method assigns the client anew by
the values from before that step. What other clients use has no say. "same" is the share of pairs of
clients' copies of a prompt that end in one cluster, "other" that of pairs of different prompts,
"moved" how far Adam carries the sequential form's centroids, as a share of their length.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedvl.methods.parts.matching import MATCHER_WIDTH, RATE, SWEEPS, align

SEED = 0


def planted(clients: int, prompts: int, width: int, scale: float, noise: float) -> tuple[list[Tensor], list[Tensor]]:
    """Return each client's prompts, and the index of the true prompt of each."""
    generator = torch.Generator().manual_seed(SEED)
    truth = scale * torch.randn(prompts, width, generator=generator)
    orders = [torch.randperm(prompts, generator=generator) for _ in range(clients)]
    noisy = [truth[order] + scale * noise * torch.randn(prompts, width, generator=generator) for order in orders]
    return noisy, orders


def sequential(pools: list[Tensor]) -> tuple[list[Tensor], float]:
    """Return the centroid of each prompt, client by client, and how far centroids moved."""
    generator = torch.manual_seed(SEED)
    count, width = len(pools[0]), pools[0].shape[1]
    founders = torch.cat(pools)
    centroids = nn.ParameterList([nn.Parameter(prompt.clone()) for prompt in founders])
    spread = nn.Sequential(nn.Linear(width, MATCHER_WIDTH), nn.ReLU(), nn.Linear(MATCHER_WIDTH, width), nn.Sigmoid())
    popularity = nn.Sequential(nn.Linear(width, MATCHER_WIDTH), nn.ReLU(), nn.Linear(MATCHER_WIDTH, 1), nn.Sigmoid())
    optimiser = torch.optim.Adam([*centroids, *spread.parameters(), *popularity.parameters()], lr=RATE)
    assigned = [torch.randperm(len(founders), generator=generator)[:count] for _ in pools]

    def log_likelihood(prompts: Tensor, centroid: Tensor, used: bool) -> Tensor:
        density = torch.distributions.Normal(centroid, spread(centroid)).log_prob(prompts).sum(-1)
        chance = popularity(centroid)
        return density + torch.log(chance if used else 1 - chance)

    for _ in range(SWEEPS):
        for client, pool in enumerate(pools):
            used = set(assigned[client].tolist())
            columns = [log_likelihood(pool, centroid, i in used) for i, centroid in enumerate(centroids)]
            table = torch.stack(columns, 1)
            optimiser.zero_grad()
            torch.autograd.backward(-table.gather(1, assigned[client][:, None]).sum())
            optimiser.step()
            assigned[client] = torch.from_numpy(linear_sum_assignment(table.detach(), maximize=True)[1])
    moved = (torch.stack(list(centroids)).detach() - founders).norm(dim=1) / founders.norm(dim=1)
    return assigned, float(moved.mean())


def agreement(clusters: list[Tensor], orders: list[Tensor]) -> tuple[float, float]:
    """Return two shares of pairs that are in one cluster.

    The first is of copies of a prompt in different clients, the second of different prompts.
    """
    found, true = torch.cat(clusters), torch.cat(orders)
    owner = torch.arange(len(orders)).repeat_interleave(len(orders[0]))
    together, copies = found[:, None] == found, true[:, None] == true
    return float(together[copies & (owner[:, None] != owner)].float().mean()), float(together[~copies].float().mean())


def measure(function: Callable[[], list[Tensor]], orders: list[Tensor]) -> dict[str, float]:
    began = time.perf_counter()
    clusters = function()
    seconds = time.perf_counter() - began
    same, other = agreement(clusters, orders)
    count = len(torch.cat(clusters).unique())
    return {"seconds": round(seconds, 3), "clusters": count, "same": round(same, 3), "other": round(other, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("clients", 20), ("prompts", 20), ("width", 768), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--scale", type=float, default=0.02, help="standard deviation of the prompts' values")
    parser.add_argument(
        "--noise", type=float, default=0.3, help="noise of the copies, relative to the prompts' deviation"
    )
    parser.add_argument("--ours-alone", action="store_true", help="leave the slow sequential form out")
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    pools, orders = planted(settings.clients, settings.prompts, settings.width, settings.scale, settings.noise)
    print(json.dumps(vars(settings)), flush=True)
    ours = measure(lambda: align(pools, torch.Generator().manual_seed(SEED)).clusters, orders)
    print(json.dumps({"form": "ours", **ours}), flush=True)
    if settings.ours_alone:
        return
    moved: list[float] = []

    def by_public_code() -> list[Tensor]:
        clusters, share = sequential(pools)
        moved.append(share)
        return clusters

    theirs = measure(by_public_code, orders)
    ratio = round(theirs["seconds"] / ours["seconds"], 1)
    print(json.dumps({"form": "sequential", **theirs, "moved": round(moved[0], 3), "ratio": ratio}))


if __name__ == "__main__":
    main()
