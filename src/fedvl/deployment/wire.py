"""Named tensors as bytes between machines: safetensors, read as something that a stranger wrote.

What comes out of :func:`decode` is well formed and no larger than asked for; whether it is what a client should have sent
is for ``checks`` to say.
"""

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors

from fedvl.errors import FedVLError
from fedvl.tensors import Tensors, to_bytes

LENGTH_BYTES = 8  # of the number that says how long the header is
# Names and shapes take less than 100 bytes a tensor. Tensors of no elements have a header only, and each costs far more
# memory than its line there, so that this and not the limit on the whole bounds what they can take.
MOST_HEADER_BYTES = 2**20


def encode(tensors: Mapping[str, torch.Tensor]) -> bytes:
    return to_bytes(tensors)


def decode(payload: bytes, limit: int) -> Tensors:
    """The tensors of a payload of at most ``limit`` bytes; FedVLError says why where there are none."""
    if len(payload) > limit:
        raise FedVLError(f"its message has {len(payload):,} bytes, more than the {limit:,} that it may have")
    if len(payload) < LENGTH_BYTES:
        raise FedVLError(f"its message has only {len(payload)} bytes")
    header = int.from_bytes(payload[:LENGTH_BYTES], "little")
    if header > MOST_HEADER_BYTES:
        raise FedVLError(f"its message claims a header of {header:,} bytes, more than {MOST_HEADER_BYTES:,}")
    try:
        return dict(parse_safetensors(payload))
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing: ")
        raise FedVLError(f"its message is not whole safetensors: {reason[:200]}") from error
    except (KeyError, AssertionError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        # types that torch does not have, and sizes of empty tensors that it cannot count
        raise FedVLError("its message holds tensors of a type or shape that does not exist") from error
