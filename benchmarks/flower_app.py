"""The linear probe of ``benchmarks.rounds`` as a Flower app, run by Flower's own simulation."""

import os
import time
from functools import cache

for switch in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"):
    os.environ[switch] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.rounds import CLIENTS, PER_ROUND, ROUNDS, SAMPLES, order, problem, train_one
from fedvl.methods.base import Samples
from fedvl.tensors import Tensors


@cache
def data() -> Samples:
    """Return the samples, created once in each worker process, as a user's own data would be."""
    torch.set_num_threads(1)
    return problem()[0]


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    client = int(context.node_config["partition-id"])
    shared = message.content["arrays"].to_torch_state_dict()
    rows = client * SAMPLES + order(int(message.content["config"]["server-round"]) - 1, client)
    trained = train_one(data().inputs["features"], data().labels, shared, rows)
    content = RecordDict({"arrays": ArrayRecord(trained), "metrics": MetricRecord({"num-examples": SAMPLES})})
    return Message(content=content, reply_to=message)


def simulate(start: Tensors) -> tuple[list[float], Tensors]:
    """Return the clock after each round, and the final classifier."""
    times: list[float] = []
    final: Tensors = {}

    class Timed(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):  # type: ignore[no-untyped-def]
            if not times:
                times.append(time.perf_counter())
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
            result = super().aggregate_train(server_round, replies)
            times.append(time.perf_counter())
            return result

    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = Timed(
            fraction_train=PER_ROUND / CLIENTS,
            min_train_nodes=PER_ROUND,
            min_available_nodes=CLIENTS,
            fraction_evaluate=0.0,
        )
        result = strategy.start(grid=grid, initial_arrays=ArrayRecord(start), num_rounds=ROUNDS)
        final.update(result.arrays.to_torch_state_dict())

    run_simulation(server_app=server_app, client_app=client_app, num_supernodes=CLIENTS)
    return times, final
