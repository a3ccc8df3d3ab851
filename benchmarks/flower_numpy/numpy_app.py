"""Flower's FedAvg over a small NumPy model, as its own documents have it: what ``benchmarks.deployment`` compares with."""

import os
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    moved = [array + 1 for array in message.content["arrays"].to_numpy_ndarrays()]
    content = RecordDict({"arrays": ArrayRecord(moved), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)


class Timed(FedAvg):
    """Writes the clock when a round begins, and when the last one ends."""

    def configure_train(self, *arguments, **options):
        note_time()
        return super().configure_train(*arguments, **options)


def note_time():
    with Path(os.environ["ROUND_TIMES"]).open("a") as file:
        file.write(f"{time.time()}\n")


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    start = ArrayRecord([np.zeros((10, 256), np.float32), np.zeros(10, np.float32)])
    strategy.start(grid=grid, initial_arrays=start, num_rounds=int(context.run_config["rounds"]))
    note_time()
