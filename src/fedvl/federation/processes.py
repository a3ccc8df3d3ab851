"""Clients spread over the processes that torchrun started, with the bits of one process.

The first process holds the run. In each round it shares out whole chunks of clients, with all that
their training needs, and takes back what they leave: a chunk is the same arithmetic in any process.
The others hold the same data and nothing of the run, so that a killed run is resumed as ever.
Messages are safetensors after a JSON header, over torch.distributed (gloo).
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as parse_safetensors
from torch import distributed

from fedvl.errors import FedVLError
from fedvl.federation.chunks import Chunk, Done
from fedvl.federation.local import LocalEngine
from fedvl.federation.stacks import Column, Stack
from fedvl.tensors import Tensors, to_bytes

MAX_PROCESS_WAIT = timedelta(days=30)  # others wait as long as the first encodes, or evaluates


class Letter(NamedTuple):
    """What one process tells another."""

    header: dict[str, Any]
    tensors: Tensors


class Processes:
    """The processes of a run; the first one, of rank 0, shares out the chunks of a round."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    def train(self, round_index: int, chunks: Sequence[Chunk], engine: LocalEngine) -> list[Done]:
        """Train each chunk in one of the processes; return their results in the chunks' order."""
        shares, several = [list(chunks[rank :: self.count]) for rank in range(self.count)], len(chunks) > 1
        for rank in range(1, self.count):
            self.send(rank, pack_chunks(round_index, shares[rank], several))
        found: dict[int, list[Done]] = {0: list(engine.train_chunks(round_index, shares[0], several))}
        for rank in range(1, self.count):
            found[rank] = unpack_results(self.receive(rank), engine.data.labels.device)
        return [found[number % self.count][number // self.count] for number in range(len(chunks))]

    def begin(self) -> None:
        """Let the others prepare, now that what the first has encoded can be read."""
        for rank in range(1, self.count):
            self.send(rank, Letter({"what": "begin"}, {}))

    def end(self) -> None:
        """Tell the others that there is no more to train."""
        for rank in range(1, self.count):
            self.send(rank, Letter({"what": "end"}, {}))

    def help(self, make_engine: Callable[[], LocalEngine]) -> None:
        """Train what the first process shares out, until it ends."""
        if self.receive(0).header["what"] == "begin":
            engine = make_engine()
            while (letter := self.receive(0)).header["what"] == "train":
                round_index, chunks = unpack_chunks(letter, engine.data.labels.device)
                results = engine.train_chunks(round_index, chunks, letter.header["several"])
                self.send(0, pack_results(list(results)))

    def send(self, rank: int, letter: Letter) -> None:
        # copies, for safetensors refuses tensors of the same memory, and a method may have some
        payload = to_bytes({name: tensor.clone() for name, tensor in letter.tensors.items()})
        header = json.dumps(letter.header).encode()
        with losses_explained():
            distributed.send(torch.tensor([len(header), len(payload)]), rank)
            distributed.send(torch.frombuffer(bytearray(header + payload), dtype=torch.uint8), rank)

    def receive(self, rank: int) -> Letter:
        with losses_explained():
            sizes = torch.zeros(2, dtype=torch.int64)
            distributed.recv(sizes, rank)
            header, payload = sizes.tolist()
            content = torch.zeros(header + payload, dtype=torch.uint8)
            distributed.recv(content, rank)
        found = content.numpy().tobytes()
        return Letter(json.loads(found[:header]), dict(parse_safetensors(found[header:])))


@contextmanager
def losses_explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise FedVLError(
            "Another process of this run has ended; committed rounds are safe: look at what it said, then run "
            "torchrun -m fedvl resume."
        ) from error


def join_processes() -> Processes:
    """Join the processes that torchrun started."""
    distributed.init_process_group("gloo", timeout=MAX_PROCESS_WAIT)
    if torch.cuda.is_available():  # "cuda" is then another GPU in each process, as far as there are so many
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return Processes(distributed.get_rank(), distributed.get_world_size())


# --- chunks and results as tensors with names


def pack_chunks(round_index: int, chunks: Sequence[Chunk], several: bool) -> Letter:
    """Write chunks as a letter; a tensor that many begin from is in it once."""
    places = dict[int, int]()
    tensors: Tensors = {}
    for number, chunk in enumerate(chunks):
        for begin in chunk.begins:
            for tensor in begin.values():
                tensors[f"begin/{places.setdefault(id(tensor), len(places))}/0/"] = tensor
        tensors |= {f"private/{number}/0/{name}": tensor for name, tensor in chunk.private.items()}
    members = [[chunk.clients, chunk.used] for chunk in chunks]
    begins = [
        [{name: places[id(tensor)] for name, tensor in begin.items()} for begin in chunk.begins] for chunk in chunks
    ]
    header = {"what": "train", "round": round_index, "several": several, "members": members, "begins": begins}
    return Letter(header, tensors)


def unpack_chunks(letter: Letter, device: torch.device) -> tuple[int, list[Chunk]]:
    parts, header = sorted_out(letter.tensors, device), letter.header
    chunks = []
    for number, ((clients, used), begins) in enumerate(zip(header["members"], header["begins"], strict=True)):
        states = [{name: parts["begin", place, 0][""] for name, place in begin.items()} for begin in begins]
        chunks.append(Chunk(clients, used, parts.get(("private", number, 0), {}), states))
    return header["round"], chunks


def pack_results(results: Sequence[Done]) -> Letter:
    """Write what chunks leave; a column of several shapes is written client by client."""
    tensors: Tensors = {}
    headers = []
    for number, done in enumerate(results):
        tensors[f"losses/{number}/0/"] = done.losses
        apart = {name: len(column) for name, column in done.sent.items() if isinstance(column, list)}
        for name, column in done.sent.items():
            parts: Sequence[torch.Tensor] = column if isinstance(column, list) else [column]
            tensors |= {f"sent/{number}/{place}/{name}": part for place, part in enumerate(parts)}
        for place, stack in enumerate(done.private):
            tensors |= {f"private/{number}/{place}/{name}": tensor for name, tensor in stack.tensors.items()}
        headers.append([done.clients, list(done.sent), apart, [stack.clients for stack in done.private]])
    return Letter({"what": "trained", "chunks": headers}, tensors)


def unpack_results(letter: Letter, device: torch.device) -> list[Done]:
    parts, results = sorted_out(letter.tensors, device), []
    for number, (clients, names, apart, stacks) in enumerate(letter.header["chunks"]):
        sent: dict[str, Column] = {}
        for name in names:
            column: Column = parts["sent", number, 0][name]
            if name in apart:
                column = [parts["sent", number, place][name] for place in range(apart[name])]
            sent[name] = column
        private = [Stack(held, parts.get(("private", number, place), {})) for place, held in enumerate(stacks)]
        results.append(Done(clients, sent, private, parts["losses", number, 0][""]))
    return results


def sorted_out(tensors: Tensors, device: torch.device) -> dict[tuple[str, int, int], Tensors]:
    """Sort tensors by what they are of: kind, number of the chunk, place in it."""
    found: dict[tuple[str, int, int], Tensors] = {}
    for key in sorted(tensors):
        kind, number, place, name = key.split("/", 3)
        found.setdefault((kind, int(number), int(place)), {})[name] = tensors[key].to(device)
    return found
