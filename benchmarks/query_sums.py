"""Compare Fed-MP's weights of eq. 9 with those that sums over clients give (`method.merging=summed`).

    python -m benchmarks.query_sums [--datasets cifar10-mini FILE ...] [--clients 3 4] [--directions 2 4 8]

A round is trained twice from the same draws: once every client's gate is kept, once sums alone. For the
run's query, the table has the largest difference of a client's weight from 1 / K, in shares of 1 / K, by
eq. 9 and of the sums' weights from it, and the cosine of what both change in the mean gate.
"""

import argparse
from itertools import product
from typing import Any

import torch

from fedvl.data.sources import Opener
from fedvl.display import Silent
from fedvl.federation.round import Federation
from fedvl.methods.fed_mp import GATE
from fedvl.methods.parts.query_sums import tailored_to_query
from fedvl.runs.experiment import local_engine
from fedvl.runs.preparation import Prepared, prepare
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

OPENER = Opener.once()


def after_a_round(dataset: str, clients: int, **options: Any) -> tuple[Prepared, Federation]:
    settings = {"method": {"name": "fed-mp", **options}, "data": {"dataset": dataset, "clients": clients}}
    experiment = resolve_experiment({**settings, "federation": {"rounds": 1, "threads": 1}})
    prepared = prepare(experiment, Silent(), OPENER)
    start = prepared.method.start(torch_generator(experiment.seed, "start"))
    run = Federation(prepared.method, local_engine(prepared), experiment.federation, experiment.seed, start)
    run.run()
    return prepared, run


def difference(tensors: Tensors, other: Tensors) -> torch.Tensor:
    return torch.cat([(tensors[name].double() - other[name].double()).flatten() for name in GATE])


def compare(dataset: str, clients: int, directions: int) -> tuple[float, float, float]:
    """Return how far weights are from equal ones, how far those of sums are from them, and the cosine."""
    prepared, kept = after_a_round(dataset, clients)
    _, sums = after_a_round(dataset, clients, merging="summed", query_directions=directions)
    user = prepared.queried
    weights = torch.tensor(list(user.client_weights(kept.last).values()), dtype=torch.float64) * clients
    merged = tailored_to_query(sums.shared, user.task.text_features.mean(0))
    start = prepared.method.start(torch_generator(0, "start"))
    moves = torch.stack([difference(gate, start) for gate in kept.last.values()], 1)
    implied = torch.linalg.lstsq(moves, difference(merged, start)[:, None]).solution[:, 0] * clients
    exact = difference(user.tailor(kept.shared, kept.last), kept.shared)
    cosine = torch.cosine_similarity(exact, difference(merged, kept.shared), dim=0)
    return float((weights - 1).abs().max()), float((implied - weights).abs().max()), float(cosine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=["cifar10-mini", "emoji-mini"])
    parser.add_argument("--clients", nargs="+", type=int, default=[3, 4])
    parser.add_argument("--directions", nargs="+", type=int, default=[2, 4, 8])
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| dataset | clients | directions | weights by eq. 9 | difference | cosine |\n|---|---|---|---|---|---|")
    for dataset, clients, directions in product(given.datasets, given.clients, given.directions):
        far, apart, cosine = compare(dataset, clients, directions)
        print(f"| {dataset} | {clients} | {directions} | {far:.3f} | {apart:.3f} | {cosine:.3f} |", flush=True)


if __name__ == "__main__":
    main()
