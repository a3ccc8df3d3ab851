"""Messages between server and clients: a header, and tensors as safetensors.

A reply repeats the header of its request, so that one of another run, round or attempt is
recognised. What is received is read as something that a stranger wrote: :func:`unpack_tensors`
bounds its size and checks its form, and ``federation/checks.py`` says whether it is what a client
should have sent.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from safetensors import SafetensorError

from fedvl.errors import FedVLError

if TYPE_CHECKING:  # half of the start of Flower's own processes, which carry messages and never open them
    import torch

    from fedvl.tensors import Tensors

FORMAT = 2  # of messages between machines: to be raised by every change of Header or of what a message holds
MAX_HEADER_CHARACTERS = 4096  # of a message; ours have some 500
MAX_LOSS = 1e6  # either way: a loss beyond it is a lie or a divergence, and would spoil the record
LENGTH_BYTES = 8  # of the number that says how long the header is
# Names and shapes take less than 100 bytes a tensor. Tensors of no elements have a header only, and each costs far more
# memory than its line there, so that this and not the limit on the whole bounds what they can take.
MAX_HEADER_BYTES = 2**20

HexName = Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
SummedKind = Literal["train", "report", "evaluate", "survey"]  # what secure aggregation sums
MessageKind = Literal[
    "train",
    "report",
    "adopt",
    "finish",
    "evaluate",
    "survey",
    "names",
    "keys",
    "share_train",
    "share_report",
    "share_evaluate",
    "share_survey",
    "confirm_train",
    "confirm_report",
    "confirm_evaluate",
    "confirm_survey",
    "reveal_train",
    "reveal_report",
    "reveal_evaluate",
    "reveal_survey",
]
# the steps of a sum before and after its numbers, by what is summed
SHARE: dict[str, MessageKind] = {
    "train": "share_train",
    "report": "share_report",
    "evaluate": "share_evaluate",
    "survey": "share_survey",
}
CONFIRM: dict[str, MessageKind] = {
    "train": "confirm_train",
    "report": "confirm_report",
    "evaluate": "confirm_evaluate",
    "survey": "confirm_survey",
}
REVEAL: dict[str, MessageKind] = {
    "train": "reveal_train",
    "report": "reveal_report",
    "evaluate": "reveal_evaluate",
    "survey": "reveal_survey",
}
STEPS = (*SHARE.values(), *CONFIRM.values(), *REVEAL.values())


class Header(BaseModel):
    """What a message belongs to; ``state`` names the client's private tensors by their SHA-256."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    run: HexName
    experiment: HexName  # SHA-256 of its description: a client works on those that lie in its own folder only
    round: Annotated[int, Field(ge=0, lt=2**31)]
    attempt: Annotated[int, Field(ge=0, lt=2**31)]
    kind: MessageKind
    sum_attempt: Annotated[int, Field(ge=0, lt=2**31)] = (
        0  # of a secure sum; a client begins each attempt with new masks
    )
    client: Annotated[int, Field(ge=0, lt=2**31)]
    state: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = (
        ""  # request: those to begin with; reply: those that resulted
    )
    log: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""  # the hash of the last line of the sender's log
    # replies only
    examples: Annotated[int, Field(ge=0, lt=2**31)] = 0  # that the client has, whatever it trains on in this round
    weight: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    loss: Annotated[FiniteFloat, Field(ge=-MAX_LOSS, le=MAX_LOSS)] = 0.0
    idle: bool = False  # the client has nothing to do in this round
    problem: Annotated[str, Field(max_length=500)] = ""  # why there is no answer

    def answers(self, request: "Header") -> bool:
        return all(
            getattr(self, field) == getattr(request, field)
            for field in ("run", "experiment", "round", "attempt", "kind", "client")
        )

    def misplaced(self, payload: bytes) -> str | None:
        """Return what an answer of this kind has no place for, or None."""
        if (self.kind != "train" or self.idle) and (self.weight or self.loss or self.examples):
            return "a weight, a loss or a number of examples"
        if payload and (self.kind in ("adopt", "finish") or self.idle):
            return "tensors"
        return None


class Message(NamedTuple):
    header: Header
    payload: bytes = b""  # safetensors; empty where there are none


def read_header(text: str) -> Header:
    """Return the header of a received message; raise a FedVLError if it is malformed."""
    if len(text) > MAX_HEADER_CHARACTERS:
        raise FedVLError(f"the header of its message has {len(text):,} characters")
    try:
        return Header.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, problem["loc"])) or "whole"
        raise FedVLError(f"the header of its message is malformed ({field}: {problem['msg'][:200]})") from error


def pack_tensors(tensors: Mapping[str, "torch.Tensor"]) -> bytes:
    from fedvl.tensors import to_bytes

    return to_bytes(tensors)


def unpack_tensors(payload: bytes, limit: int) -> "Tensors":
    """Return the tensors of a payload of at most ``limit`` bytes, or raise a FedVLError."""
    from safetensors.torch import load as parse_safetensors

    if len(payload) > limit:
        raise FedVLError(f"its message has {len(payload):,} bytes, more than the {limit:,} that it may have")
    if len(payload) < LENGTH_BYTES:
        raise FedVLError(f"its message has only {len(payload)} bytes")
    header = int.from_bytes(payload[:LENGTH_BYTES], "little")
    if header > MAX_HEADER_BYTES:
        raise FedVLError(f"its message claims a header of {header:,} bytes, more than {MAX_HEADER_BYTES:,}")
    try:
        return dict(parse_safetensors(payload))
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing: ")
        raise FedVLError(f"its message is not whole safetensors: {reason[:200]}") from error
    except (KeyError, AssertionError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        # types that torch does not have, and sizes of empty tensors that it cannot count
        raise FedVLError("its message holds tensors of a type or shape that does not exist") from error
