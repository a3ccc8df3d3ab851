"""Measure what secure aggregation costs, and what the difference of two sums still tells.

    python -m benchmarks.secure_sum [--clients 3 10 30 100] [--numbers 2573] [--lost 0] [--json]
    python -m benchmarks.secure_sum --difference [--clients 5 10 100]

All clients and the server run in this process, one after the other, with real keys and no network.
``--numbers`` is the length of an update (2,573: `linear` on ten classes and 256 features). ``--lost``
is the share of clients that are lost before the sum, and as many again before it is opened.

``--difference``: the server sends one model in two rounds, and in the second it says that one client
was lost. The table has the cosine of the difference of both sums with that client's update.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

import torch

from fedvl.deployment.keys import make_key, public_key_of, sign, signed_by, write_private
from fedvl.deployment.messages import pack_tensors
from fedvl.deployment.secure_sum import ROSTER, Credentials, Entry, SumId, SumMember, read_items
from fedvl.deployment.sum_server import Collected
from fedvl.errors import FedVLError
from fedvl.federation.fixed_point import SUMMED_FIGURES
from fedvl.tensors import Tensors

RUN, STEP = "a" * 32, SumId("b" * 64, "train", 0, 1)
Result = TypeVar("Result")


class Cost(NamedTuple):
    """Of one sum; bytes and seconds are of one client, the largest of all."""

    clients: int
    exchanges: int
    client_up: int
    client_down: int
    client_seconds: float
    server_seconds: float


class Meter:
    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.up: dict[int, int] = {}
        self.down: dict[int, int] = {}

    def ask(self, client: int, request: Tensors, answer: Callable[[], Tensors]) -> Tensors:
        began = time.perf_counter()
        given = answer()
        self.seconds[client] = self.seconds.get(client, 0.0) + time.perf_counter() - began
        self.up[client] = self.up.get(client, 0) + len(pack_tensors(given))
        self.down[client] = self.down.get(client, 0) + len(pack_tensors(request))
        return given


def members_in(folder: Path, clients: int) -> list[SumMember]:
    """Return clients with keys of their own, each of which verifies the others' signatures."""
    places = [folder / str(client) for client in range(clients)]
    for place in places:
        place.mkdir()
        write_private(place / "key", make_key())
    public = [public_key_of(place / "key") for place in places]

    def check(entry: Entry, content: bytes) -> None:
        if not signed_by(public[entry.client], content, entry.signature):
            raise FedVLError(f"The key of client {entry.client} is not its party's.")

    return [
        SumMember(RUN, client, place, Credentials(partial(sign, place / "key"), check), 2)
        for client, place in enumerate(places)
    ]


def measure(clients: int, numbers: int, lost: int) -> Cost:
    """Return the cost of one sum; the exchange of run keys, once a run, is not counted."""
    model, server = {"weight": torch.zeros(numbers)}, 0.0
    values = torch.randint(-(2**40), 2**40, (clients, numbers))
    with TemporaryDirectory() as folder:
        members, meter = members_in(Path(folder), clients), Meter()
        entries = [entry for member in members for entry in read_items(member.entry()[ROSTER], Entry)]

        def timed(work: Callable[[], Result]) -> Result:
            nonlocal server
            began = time.perf_counter()
            result = work()
            server += time.perf_counter() - began
            return result

        collected = timed(lambda: Collected(RUN, STEP, entries, 2 / 3))
        request = timed(collected.share_request)
        offers = {
            m.client: meter.ask(m.client, request, lambda m=m: m.offer(STEP, request[ROSTER], "")) for m in members
        }
        timed(lambda: collected.take_offers(offers))
        work = timed(lambda: collected.work_request(model))
        answers = {
            m.client: meter.ask(m.client, work, lambda m=m: m.mask(STEP, work, partial(values.__getitem__, m.client)))
            for m in members[: clients - lost]
        }
        timed(lambda: collected.take_masked(answers, numbers))
        confirm = timed(collected.confirm_request)
        signed = {
            m.client: meter.ask(m.client, confirm, lambda m=m: m.confirm(STEP, confirm))
            for m in members[: clients - lost]
        }
        timed(lambda: collected.take_signatures(signed))
        requests = timed(collected.reveal_requests)
        reveals = {
            client: meter.ask(client, asked, lambda c=client, asked=asked: members[c].reveal(STEP, asked))
            for client, asked in list(requests.items())[: clients - 2 * lost]
        }
        opened = timed(lambda: collected.open(reveals))
    assert torch.equal(opened.total, values[: clients - lost].sum(0))
    return Cost(clients, 4, max(meter.up.values()), max(meter.down.values()), max(meter.seconds.values()), server)


def difference(clients: int) -> tuple[float, float, float]:
    """Return the mean, smallest and largest cosine over the first 20 clients (linear, cifar10-mini)."""
    from fedvl.display import Silent
    from fedvl.runs.experiment import local_engine
    from fedvl.runs.preparation import prepare
    from fedvl.runs.settings import resolve_experiment
    from fedvl.seeding import torch_generator

    data = {"clients": clients, "partition": "dirichlet:0.5"}
    experiment = resolve_experiment({"method": {"name": "linear"}, "data": data, "federation": {"secure_sum": True}})
    prepared = prepare(experiment, Silent())
    engine, shared = local_engine(prepared), prepared.method.start(torch_generator(experiment.seed, "start"))

    def parts(round_index: int) -> torch.Tensor:
        trained = {found.update.client: found for found in engine.train(round_index, range(clients), shared)}
        numbers = [engine.part_of_sum(round_index, client, shared, trained.get(client)) for client in range(clients)]
        return torch.stack(numbers)[:, :-SUMMED_FIGURES].double()

    first, second = parts(0), parts(1)
    left = [first.sum(0) - (second.sum(0) - second[victim]) for victim in range(min(clients, 20))]
    cosines = [float(torch.cosine_similarity(found, own, dim=0)) for found, own in zip(left, first, strict=False)]
    return sum(cosines) / len(cosines), min(cosines), max(cosines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[3, 5, 10, 30, 100])
    parser.add_argument("--numbers", type=int, default=2573)
    parser.add_argument("--lost", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--difference", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.difference:
        print("| clients | mean cosine | smallest | largest |\n|---|---|---|---|")
        for clients in given.clients:
            print(f"| {clients} | {' | '.join(f'{figure:.2f}' for figure in difference(clients))} |")
        return
    costs = [measure(clients, given.numbers, int(clients * given.lost)) for clients in given.clients]
    if given.json:
        print(json.dumps([cost._asdict() for cost in costs]))
        return
    print("| clients | messages a client | bytes up | bytes down | seconds at a client | seconds at the server |")
    print("|---|---|---|---|---|---|")
    for cost in costs:
        print(
            f"| {cost.clients} | {cost.exchanges} | {cost.client_up:,} | {cost.client_down:,} "
            f"| {cost.client_seconds:.3f} | {cost.server_seconds:.3f} |"
        )


if __name__ == "__main__":
    main()
