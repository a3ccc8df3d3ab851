"""Build twenty-four kinds of invalid update, and read them as the server does."""

import json
import math
import pickle
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from fedvl.deployment.messages import pack_tensors, unpack_tensors
from fedvl.errors import FedVLError
from fedvl.federation.checks import Refusal
from fedvl.methods.base import Update
from fedvl.tensors import Tensors

LIMIT = 2**20  # maximum bytes of a message in these trials
TERA = 10**12  # elements: 3.6 TiB as 32-bit floats


class Message(NamedTuple):
    client: int
    payload: bytes
    weight: float


def one_nan(tensor: torch.Tensor) -> torch.Tensor:
    spoilt = tensor.clone()
    spoilt.view(-1)[-1] = math.nan
    return spoilt


# What is sent instead of one of the tensors; None leaves it out.
TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "NaN": lambda tensor: torch.full_like(tensor, math.nan),
    "+Inf": lambda tensor: torch.full_like(tensor, math.inf),
    "-Inf": lambda tensor: torch.full_like(tensor, -math.inf),
    "one NaN element": one_nan,
    "wrong shape": lambda tensor: torch.ones(7, 7),
    "broadcastable shape": lambda tensor: torch.ones(1),
    "empty": lambda tensor: tensor[:0],
    "wrong dtype": lambda tensor: torch.ones_like(tensor, dtype=torch.int64),
    "complex": lambda tensor: tensor + 2j,
    "missing key": lambda tensor: None,
    "huge norm": lambda tensor: tensor + 1e6,
    "1e38": lambda tensor: torch.full_like(tensor, 1e38),
}
WEIGHTS = {"weight 0": 0.0, "weight negative": -15.0, "weight NaN": math.nan, "weight 1e15": 1e15}


def with_header(payload: bytes, change: Callable[[str], str]) -> bytes:
    """Return the payload with its header changed as text."""
    end = 8 + int.from_bytes(payload[:8], "little")
    header = change(payload[8:end].decode()).encode()
    return len(header).to_bytes(8, "little") + header + payload[end:]


def with_description(payload: bytes, **changes: object) -> bytes:
    """Return the payload with the first tensor of the header described differently."""

    def change(header: str) -> str:
        described = json.loads(header)
        name = min(described.keys() - {"__metadata__"})
        return json.dumps({**described, name: {**described[name], **changes}})

    return with_header(payload, change)


def invalid_utf8(payload: bytes) -> bytes:
    name = payload.index(b'{"dtype"') - 3  # the last message of the first name
    return payload[:name] + b"\xff" + payload[name + 1 :]


class Canary:
    """An object that leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("import fedvl; fedvl.canary = True",)


PAYLOADS: dict[str, Callable[[bytes], bytes]] = {
    "string": lambda payload: with_description(payload, dtype="STR"),
    "object": lambda payload: pickle.dumps(Canary()),
    "truncated payload": lambda payload: payload[:-7],
    "header that lies": lambda payload: with_description(payload, shape=[3, 3, 3]),
    "3.6 TiB header": lambda payload: with_description(payload, shape=[TERA], data_offsets=[0, 4 * TERA]),
    "oversized message": lambda payload: payload + bytes(LIMIT),
    "invalid UTF-8 key": invalid_utf8,
}
KINDS = (*TENSORS, "extra key", *WEIGHTS, *PAYLOADS)


def bad_message(kind: str, update: Update) -> Message:
    """Return this client's honest update, made invalid."""
    tensors, weight = dict(update.tensors), WEIGHTS.get(kind, update.weight)
    if kind in TENSORS:
        name = min(tensors)
        sent = TENSORS[kind](tensors.pop(name))
        tensors |= {} if sent is None else {name: sent}
    if kind == "extra key":
        tensors["backdoor"] = torch.ones(1)
    payload = pack_tensors(tensors)
    return Message(update.client, PAYLOADS[kind](payload) if kind in PAYLOADS else payload, weight)


def received(messages: Iterable[Message]) -> tuple[list[Update], list[Refusal]]:
    """Return the updates that can be read, and refusals of those that cannot."""
    updates, refusals = [], []
    for message in messages:
        try:
            updates.append(Update(message.client, unpack_tensors(message.payload, LIMIT), message.weight))
        except FedVLError as error:
            refusals.append(Refusal(message.client, str(error)))
    return updates, refusals


def honest(tensors: Tensors, client: int, weight: float) -> Message:
    return Message(client, pack_tensors(tensors), weight)
