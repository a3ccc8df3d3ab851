"""What an update may be. Nothing that fails here is ever merged; each refusal is counted, named and kept."""

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from fedvl.config import FederationConfig
from fedvl.methods.base import Update
from fedvl.tensors import Tensors

Shapes = dict[str, tuple[int | None, ...]]


class Refusal(NamedTuple):
    client: int
    reason: str


def sort_out(
    updates: Iterable[Update], cohort: Collection[int], shared: Tensors, extras: Shapes, limits: FederationConfig
) -> tuple[list[Update], list[Refusal]]:
    """The updates fit to be merged, by client, and the refusals."""
    good: dict[int, Update] = {}
    refusals = []
    for update in updates:
        if update.client not in cohort:
            reason: str | None = "was not asked this round"
        elif update.client in good:
            reason = "answered twice"
        else:
            reason = fault(update, shared, extras, limits)
        if reason is None:
            good[update.client] = update
        else:
            refusals.append(Refusal(update.client, reason))
    return [good[client] for client in sorted(good)], refusals


def fault(update: Update, shared: Tensors, extras: Shapes, limits: FederationConfig) -> str | None:
    """Why an update may not be merged, or None."""
    if not (math.isfinite(update.weight) and 0 < update.weight <= limits.max_examples):
        return f"weight {update.weight} is not between 0 and {limits.max_examples:g}"
    if update.tensors.keys() != shared.keys() | extras.keys():
        odd = sorted(update.tensors.keys() ^ (shared.keys() | extras.keys()))
        return f"tensors {', '.join(map(repr, odd))} are missing or not asked for"
    squares = 0.0
    for name, sent in update.tensors.items():
        expected = shared.get(name)
        dtype, shape = (
            (expected.dtype, tuple(expected.shape)) if expected is not None else (torch.float32, extras[name])
        )
        if sent.dtype != dtype:
            return f"'{name}' is {sent.dtype}, not {dtype}"
        if len(sent.shape) != len(shape) or any(
            want not in (None, has) for want, has in zip(shape, sent.shape, strict=True)
        ):
            return f"'{name}' has shape {tuple(sent.shape)}, not {shape}"
        move = sent - expected if expected is not None else sent
        distance = float(torch.linalg.vector_norm(move))  # one pass: NaN and infinity show in it too
        if not math.isfinite(distance) and not bool(torch.isfinite(sent).all()):
            return f"'{name}' holds values that are not finite"
        squares += distance**2
    if not math.sqrt(squares) <= limits.max_update_norm:
        return f"it moves by {math.sqrt(squares):.3g}, more than {limits.max_update_norm:g}"
    return None
