"""Check updates and reports before they count; each refusal is named and recorded."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from fedvl.config import FederationConfig
from fedvl.methods.base import Update
from fedvl.methods.roles import Roles, Shapes
from fedvl.tensors import Tensors

MOST_REASON = 300  # characters


class Refusal(NamedTuple):
    client: int
    reason: str


def refusal(client: int, reason: str) -> Refusal:
    """A client chooses the names of what it sends: what is written down of them has an end."""
    return Refusal(client, reason if len(reason) <= MOST_REASON else f"{reason[:MOST_REASON]}...")


class Report(NamedTuple):
    """What a client reports before a round; the sum of all reports has no client (None)."""

    client: int | None
    tensors: Tensors


def sum_of_reports(reports: Sequence[Report]) -> Report:
    """Summed in 64 bits, so that the order of arrival cannot be seen in the result."""
    first = reports[0].tensors
    stacked = {name: torch.stack([report.tensors[name] for report in reports]) for name in first}
    return Report(None, {name: parts.sum(0, dtype=torch.float64).to(parts.dtype) for name, parts in stacked.items()})


def sound_reports(reports: Iterable[Report], shapes: Shapes) -> tuple[list[Report], list[Refusal]]:
    """The clients' reports that may be counted, by client, and the refusals."""
    good: dict[int, Report] = {}
    refusals = []
    for report in reports:
        assert report.client is not None, "only a sum is nobody's"
        reason = "answered twice" if report.client in good else misshapen(report.tensors, shapes)
        if reason is None:
            good[report.client] = report
        else:
            refusals.append(refusal(report.client, f"in its report {reason}"))
    return [good[client] for client in sorted(good)], refusals


def misshapen(tensors: Tensors, shapes: Shapes) -> str | None:
    """Why these are not 32-bit, finite, non-negative tensors of these shapes, or None."""
    if tensors.keys() != shapes.keys():
        return f"tensors {', '.join(map(repr, sorted(tensors.keys() ^ shapes.keys())))} are missing or not asked for"
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or not fits(tensor, shapes[name]):
            return f"'{name}' is {tensor.dtype} of shape {tuple(tensor.shape)}, not torch.float32 of {shapes[name]}"
        if not bool((torch.isfinite(tensor) & (tensor >= 0)).all()):
            return f"'{name}' holds values that are not finite or below 0"
    return None


def foreign(received: Tensors, start: Tensors, roles: Roles) -> str | None:
    """Return why a hand-out is not what the method declares, or None.

    A client trains and sends back what it is handed, so it takes declared tensors alone.
    """
    names = start.keys() | roles.given.keys()
    if received.keys() != names:
        odd = ", ".join(map(repr, sorted(received.keys() ^ names)))
        return f"tensors {odd} are missing or not of the method"
    for name, tensor in received.items():
        declared = start.get(name)
        dtype = torch.float32 if declared is None else declared.dtype
        shape: tuple[int | None, ...] = roles.given[name] if declared is None else tuple(declared.shape)
        shape = (roles.shared(name).shape or shape) if declared is not None else shape
        if tensor.dtype != dtype or not fits(tensor, shape):
            return f"'{name}' is {tensor.dtype} of shape {tuple(tensor.shape)}, not {dtype} of {shape}"
        if not bool(torch.isfinite(tensor).all()):
            return f"'{name}' holds values that are not finite"
    return None


def fits(tensor: torch.Tensor, shape: tuple[int | None, ...]) -> bool:
    return len(tensor.shape) == len(shape) and all(
        want in (None, has) for want, has in zip(shape, tensor.shape, strict=True)
    )


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
            refusals.append(refusal(update.client, reason))
    return [good[client] for client in sorted(good)], refusals


def fault(update: Update, shared: Tensors, extras: Shapes, limits: FederationConfig) -> str | None:
    """Why an update may not be merged, or None."""
    if not (0 < update.weight <= limits.max_examples and update.weight < math.inf):  # NaN fails too
        return f"weight {update.weight} is not between 0 and {limits.max_examples:g}"
    if update.tensors.keys() != shared.keys() | extras.keys():
        odd = sorted(update.tensors.keys() ^ (shared.keys() | extras.keys()))
        return f"tensors {', '.join(map(repr, odd))} are missing or not asked for"
    moved = 0.0
    for name, sent in update.tensors.items():
        expected = shared.get(name)
        dtype, shape = (
            (expected.dtype, tuple(expected.shape)) if expected is not None else (torch.float32, extras[name])
        )
        if sent.dtype != dtype:
            return f"'{name}' is {sent.dtype}, not {dtype}"
        if not fits(sent, shape):
            return f"'{name}' has shape {tuple(sent.shape)}, not {shape}"
        move = sent - expected if expected is not None else sent
        distance = float(torch.linalg.vector_norm(move))  # one pass: NaN and infinity show in it too
        if not math.isfinite(distance) and not bool(torch.isfinite(sent).all()):
            return f"'{name}' holds values that are not finite"
        moved = math.hypot(moved, distance)
    if not moved <= limits.max_update_norm:
        return f"it moves by {moved:.3g}, more than {limits.max_update_norm:g}"
    return None
