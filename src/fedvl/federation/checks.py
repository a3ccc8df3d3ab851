"""Check updates and reports before they count; each refusal is named and recorded."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedvl.config import FederationConfig
from fedvl.errors import FedVLError
from fedvl.federation.fixed_point import SumOfUpdates
from fedvl.federation.stacks import Answers, Updates
from fedvl.methods.base import Method, Update
from fedvl.methods.roles import Roles, Shape, Shapes
from fedvl.tensors import Tensors

MAX_REASON_LENGTH = 300  # characters
MAX_REPORTED = 1e9  # so that the sum over any number of clients is a number, and whole numbers stay whole
# A move of this share of the shared tensors is lost in rounding: clients of one class may have no gradient at all,
# and say nothing of how far others move.
STILL = 1e-5
NOT_FINITE, TOO_FAR = "holds values that are not finite", "it moves by"
LOSSES_APART = 10.0  # times what is usual, and at least this many nats, before a loss is left out of the mean


class Refusal(NamedTuple):
    client: int
    reason: str


def refusal(client: int, reason: str) -> Refusal:
    """A client chooses the names of what it sends: what is written down of them has an end."""
    return Refusal(client, reason if len(reason) <= MAX_REASON_LENGTH else f"{reason[:MAX_REASON_LENGTH]}...")


class SpoiledSumError(FedVLError):
    """A sum that was opened and cannot be used; ``culprits`` is empty if nobody is identified."""

    def __init__(self, problem: str, culprits: Sequence[int] = ()) -> None:
        super().__init__(problem)
        self.culprits = tuple(culprits)


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
        if tensor.dtype != torch.float32 or not fits_shape(tensor, shapes[name]):
            return f"'{name}' is {tensor.dtype} of shape {tuple(tensor.shape)}, not torch.float32 of {shapes[name]}"
        if not bool((torch.isfinite(tensor) & (tensor >= 0)).all()):
            return f"'{name}' holds values that are not finite or below 0"
        if not bool((tensor <= MAX_REPORTED).all()):
            return f"'{name}' holds values above {MAX_REPORTED:g}"
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
        shape: Shape = roles.given[name] if declared is None else tuple(declared.shape)
        shape = (roles.shared(name).shape or shape) if declared is not None else shape
        if tensor.dtype != dtype or not fits_shape(tensor, shape):
            return f"'{name}' is {tensor.dtype} of shape {tuple(tensor.shape)}, not {dtype} of {shape}"
        if not bool(torch.isfinite(tensor).all()):
            return f"'{name}' holds values that are not finite"
    return None


def fits_shape(tensor: torch.Tensor, shape: Shape) -> bool:
    return len(tensor.shape) == len(shape) and all(
        has in want if isinstance(want, range) else want in (None, has)
        for want, has in zip(shape, tensor.shape, strict=True)
    )


def sort_out(
    updates: Sequence[Update],
    asked: Mapping[int, int],
    handed: Mapping[int, Tensors],
    method: Method,
    limits: FederationConfig,
) -> tuple[Updates, list[Refusal]]:
    """Return the updates fit to be merged, by client, and the refusals.

    ``asked`` has the clients that were asked, and how many examples each has declared; ``handed``
    what each began with, from which it moves. Stacked updates of one form are looked at once.
    """
    stacked, role = updates if isinstance(updates, Updates) else None, method.role
    malformed: str | None = None
    of_one_form = bool(stacked and stacked.alike and all_same(handed.values()))
    if stacked and of_one_form:
        malformed = ill_formed(stacked.outline(0), returned(next(iter(handed.values())), role), role.sent_shapes)
    good: dict[int, int] = {}  # places by client
    refusals = []
    answers = Answers(updates)
    for place, (client, weight) in enumerate(zip(answers.clients, answers.weights, strict=True)):
        if client not in asked or client not in handed:
            reason: str | None = "was not asked this round"
        elif client in good:
            reason = "answered twice"
        else:
            reason = unfounded(weight, asked[client], method.weighting, limits) or malformed
            if reason is None and not of_one_form:
                update = stacked.outline(place) if stacked else updates[place]
                reason = ill_formed(update, returned(handed[client], role), role.sent_shapes)
        if reason is None:
            good[client] = place
        else:
            refusals.append(refusal(client, reason))
    places = [good[client] for client in sorted(good)]
    formed = stacked.take(places) if stacked else Updates.of([updates[place] for place in places])
    strayed = astray(formed, handed, limits)
    if not strayed:
        return formed, refusals
    refusals += [refusal(client, why) for client, why in strayed.items()]
    return formed.take([place for place, client in enumerate(formed.clients) if client not in strayed]), refusals


def all_same(states: Iterable[Tensors]) -> bool:
    """Whether these are one and the same dictionary, and not only equal."""
    return len(set(map(id, states))) == 1


def astray(updates: Updates, handed: Mapping[int, Tensors], limits: FederationConfig) -> dict[int, str]:
    """Return why updates of the right form may not be merged, by client."""
    if not len(updates):
        return {}
    moves = updates.moves(updates.columns, handed)
    wrong = (~(moves <= limits.max_update_norm)).nonzero()[:, 0].tolist()  # NaN is wrong too
    found = {}
    for place in wrong:
        lost = updates.not_finite(place)
        far = f"{TOO_FAR} {float(moves[place]):.3g}, more than {limits.max_update_norm:g}"
        found[updates.clients[place]] = f"'{lost[0]}' {NOT_FINITE}" if lost else far
    return found


def returned(handed: Tensors, role: Roles) -> Tensors:
    """Return what a client sends back of what it was handed."""
    return {name: tensor for name, tensor in handed.items() if name not in role.given}


def diverged(refusals: Sequence[Refusal], trained: int) -> bool:
    """Whether all that trained left the range of numbers: no client's fault, but the rate's."""
    gone = [refusal for refusal in refusals if NOT_FINITE in refusal.reason or TOO_FAR in refusal.reason]
    return 0 < trained == len(gone)


def unfounded(weight: float, examples: int, weighting: str, limits: FederationConfig) -> str | None:
    """Why a client may not have this weight, or None: it declared how many examples it has."""
    if not 0 < examples <= limits.max_examples:
        return f"it declares {examples} examples, not between 1 and {limits.max_examples:g}"
    most = 1 if weighting == "clients" else examples
    if not 0 < weight <= most:  # NaN fails too
        return f"weight {weight} is not between 0 and {most}, what it declared"
    return None


def ill_formed(update: Update, shared: Tensors, extras: Shapes) -> str | None:
    """Why these are not the tensors that were asked for, or None."""
    if update.tensors.keys() != shared.keys() | extras.keys():
        odd = sorted(update.tensors.keys() ^ (shared.keys() | extras.keys()))
        return f"tensors {', '.join(map(repr, odd))} are missing or not asked for"
    for name, sent in update.tensors.items():
        expected = shared.get(name)
        dtype = torch.float32 if expected is None else expected.dtype
        shape: Shape = extras[name] if expected is None else tuple(expected.shape)
        if sent.dtype != dtype:
            return f"'{name}' is {sent.dtype}, not {dtype}"
        if not fits_shape(sent, shape):
            return f"'{name}' has shape {tuple(sent.shape)}, not {shape}"
    return None


def unsound(total: SumOfUpdates, clients: int, limits: FederationConfig) -> str | None:
    """Why a sum of updates, of which no single one is known, may not be merged, or None."""
    if not 0 < total.weight <= clients * limits.max_examples:
        return f"has the weight {total.weight:g}, not between 0 and {clients * limits.max_examples:g}"
    if not 0 < total.trained <= clients:
        return f"is of {total.trained:g} clients, and {clients} answered"
    move = length(total.moves) / total.weight
    if not move <= limits.max_update_norm:
        return f"moves by {move:.3g}, more than {limits.max_update_norm:g}"
    return None


class Compared(NamedTuple):
    """The updates that move as others do, the refusals, and the largest usual move so far."""

    good: Updates
    refusals: list[Refusal]
    usual: float


def compare_moves(
    updates: Sequence[Update],
    examples: Mapping[int, int],
    handed: Mapping[int, Tensors],
    role: Roles,
    ratio: float,
    before: float,
) -> Compared:
    """Refuse updates that move what is trained much farther than is usual.

    Usual is the move that a fifth of the clients exceed, in this round or an earlier one
    (``before``): a few liars cannot raise it, and clients that have learned all do not lower it. A
    client of many examples takes more steps, so it may move farther in proportion. Of fewer than
    ten clients less is known, and more is allowed: of three or four, where two may have nothing to
    learn, any move within the norm of the tensors themselves. Fewer are not compared.
    """
    updates = Updates.of(updates)
    states = list(map(handed.__getitem__, updates.clients))
    begun = [trained_of(tensors, role) for tensors in (states[:1] if all_same(states) else states)]
    size = max((length(tensors) for tensors in begun), default=0.0)
    moves = updates.moves(begun[0] if begun else {}, handed).numpy()
    sizes = np.fromiter(map(examples.__getitem__, updates.clients), dtype=np.float64, count=len(updates))
    usual, most = longest_moves(moves, sizes, size, ratio, before)
    far = moves > most
    refusals = [
        refusal(
            updates.clients[place],
            f"it moves by {moves[place]:.3g}, far more than the usual {usual:.3g} (max_norm_ratio)",
        )
        for place in np.flatnonzero(far)
    ]
    return Compared(updates.take(np.flatnonzero(~far).tolist()), refusals, usual)


def longest_moves(
    moves: NDArray[np.float64], examples: NDArray[np.float64], size: float, ratio: float, before: float
) -> tuple[float, NDArray[np.float64]]:
    """Return the usual move, and how far each client may move tensors of norm ``size``."""
    moving = moves > STILL * size
    count = int(moving.sum())
    if count < 3:
        return before, np.full(len(moves), np.inf)
    usual = max(before, usual_among(moves[moving]))
    allowed = max(ratio * max(1.0, 10 / count) ** 3 * usual, size if count < 5 else 0.0)
    return usual, np.where(moving, allowed * np.maximum(1.0, examples / np.median(examples[moving])), np.inf)


def trained_of(handed: Tensors, role: Roles) -> Tensors:
    """Return the tensors that a client trains and sends back."""
    return {name: tensor for name, tensor in returned(handed, role).items() if role.shared(name).trained}


def length(tensors: Tensors) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in tensors.values()))


def usual_among(values: NDArray[np.float64]) -> float:
    """Return the value that a fifth of the clients exceed, or the second largest of a few."""
    return float(np.sort(values)[-1 - max(1, len(values) // 5)])


def mean_loss(losses: Sequence[float]) -> float:
    """Return the mean of the clients' losses without those far beyond the others'."""
    told = np.asarray(losses)
    if len(told) >= 3:
        most = LOSSES_APART * max(1.0, usual_among(np.abs(told)))
        told = told[~(np.abs(told) > most)]  # one that is none stays, and is seen
    return float(sum(told.tolist()) / len(told))
