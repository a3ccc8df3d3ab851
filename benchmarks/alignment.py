"""Compare our server's alignment of prompts with the sequential one of Fed-PRIME's public code.

    python -m benchmarks.alignment [--clients 20] [--prompts 20] [--width 768] [--scale 0.02]
        [--noise 0.3] [--threads 1]

Each client has the same prompts in its own order, with noise. "sequential" is our reimplementation
of the public code: it visits one client after the other, 5 times; at each visit it evaluates two
small networks on every centroid, one at a time, for the costs, solves the Hungarian assignment,
evaluates all again for the likelihood of that assignment, and makes one Adam step of networks and
centroids. "same" is the share of pairs of clients' copies of a prompt that end in one cluster,
"other" that of pairs of different prompts.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedvl.methods.parts.matching import HIDDEN, RATE, SWEEPS, align

SEED = 0


def planted(clients: int, prompts: int, width: int, scale: float, noise: float) -> tuple[list[Tensor], list[Tensor]]:
    """Return each client's prompts, and the index of the true prompt of each."""
    generator = torch.Generator().manual_seed(SEED)
    truth = scale * torch.randn(prompts, width, generator=generator)
    orders = [torch.randperm(prompts, generator=generator) for _ in range(clients)]
    noisy = [truth[order] + scale * noise * torch.randn(prompts, width, generator=generator) for order in orders]
    return noisy, orders


def sequential(pools: list[Tensor]) -> list[Tensor]:
    """Return the centroid of each prompt, client by client."""
    torch.manual_seed(SEED)
    clients, width = len(pools), pools[0].shape[1]
    centroids = nn.ParameterList([nn.Parameter(prompt.clone()) for pool in pools for prompt in pool])
    spread = nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, width), nn.Sigmoid())
    popularity = nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1), nn.Sigmoid())
    parameters = [*centroids, *spread.parameters(), *popularity.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=RATE)
    assigned = list(torch.arange(len(centroids)).split(len(pools[0])))

    def log_likelihood(prompts: Tensor, centroid: Tensor, users: int) -> Tensor:
        density = torch.distributions.Normal(centroid, spread(centroid)).log_prob(prompts).sum(-1)
        share, chance = users / clients, popularity(centroid)
        return density + share * torch.log(chance) + (1 - share) * torch.log(1 - chance)

    for _ in range(SWEEPS):
        for client, pool in enumerate(pools):
            users = torch.bincount(torch.cat(assigned), minlength=len(centroids)).tolist()
            with torch.no_grad():
                columns = [log_likelihood(pool, centroid, users[i]) for i, centroid in enumerate(centroids)]
            assigned[client] = torch.from_numpy(linear_sum_assignment(torch.stack(columns, 1), maximize=True)[1])
            optimiser.zero_grad()
            rows = [log_likelihood(pool, centroid, users[i]) for i, centroid in enumerate(centroids)]
            chosen = torch.stack(rows, 1).gather(1, assigned[client][:, None])
            torch.autograd.backward(-chosen.sum())
            optimiser.step()
    return assigned


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
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    pools, orders = planted(settings.clients, settings.prompts, settings.width, settings.scale, settings.noise)
    print(json.dumps(vars(settings)), flush=True)
    ours = measure(lambda: align(pools, torch.Generator().manual_seed(SEED)).clusters, orders)
    print(json.dumps({"form": "ours", **ours}), flush=True)
    theirs = measure(lambda: sequential(pools), orders)
    print(json.dumps({"form": "sequential", **theirs, "ratio": round(theirs["seconds"] / ours["seconds"], 1)}))


if __name__ == "__main__":
    main()
