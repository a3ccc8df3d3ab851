"""Small federations, spread over the processes of one torchrun: python -m torch.distributed.run ... spread.py FILE METHOD..."""

import json
import sys
from functools import partial
from pathlib import Path

import torch

from fedvl.federation.local import LocalEngine
from fedvl.federation.processes import Processes, join_processes
from fedvl.federation.round import Federation
from fedvl.tensors import digest, flatten
from helpers.small import run_quietly, small_federation, small_method

CHUNK = 2  # clients: the five of a small federation are three chunks, which two processes cannot share evenly


def engine_of(name: str) -> LocalEngine:
    engine = federation_of(name).engine
    assert isinstance(engine, LocalEngine)
    return engine


def federation_of(name: str) -> Federation:
    torch.set_num_threads(1)
    return small_federation(small_method(name), chunk=CHUNK, rounds=2)


def state(federation: Federation) -> str:
    everything = {f"shared/{name}": tensor for name, tensor in federation.shared.items()}
    return digest(everything | flatten(federation.engine.private))


def finished(name: str, processes: Processes | None) -> str:
    federation = federation_of(name)
    federation.engine.processes = processes  # type: ignore[attr-defined]
    return state(run_quietly(federation))


def main(file: Path, names: list[str]) -> None:
    processes = join_processes()
    if processes.rank == 0:
        found = {}
        for name in names:
            processes.begin()
            found[name] = finished(name, processes)
            processes.end()
        file.write_text(json.dumps(found), encoding="utf-8")
        return
    for name in names:
        processes.help(partial(engine_of, name))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
