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

CHUNKS = (1, 2)  # clients: four chunks for two processes, two each, and two chunks, one of several clients


def engine_of(name: str, chunk: int) -> LocalEngine:
    engine = federation_of(name, chunk).engine
    assert isinstance(engine, LocalEngine)
    return engine


def federation_of(name: str, chunk: int) -> Federation:
    torch.set_num_threads(1)
    return small_federation(small_method(name), chunk=chunk, rounds=2)


def state(federation: Federation) -> str:
    everything = {f"shared/{name}": tensor for name, tensor in federation.shared.items()}
    return digest(everything | flatten(federation.engine.private))


def finished(name: str, chunk: int, processes: Processes | None) -> str:
    federation = federation_of(name, chunk)
    federation.engine.processes = processes  # type: ignore[attr-defined]
    return state(run_quietly(federation))


def main(file: Path, names: list[str]) -> None:
    processes = join_processes()
    if processes.rank == 0:
        found = dict[str, list[str]]()
        for name in names:
            for chunk in CHUNKS:
                processes.begin()
                found.setdefault(name, []).append(finished(name, chunk, processes))
                processes.end()
        file.write_text(json.dumps(found), encoding="utf-8")
        return
    for name in names:
        for chunk in CHUNKS:
            processes.help(partial(engine_of, name, chunk))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
