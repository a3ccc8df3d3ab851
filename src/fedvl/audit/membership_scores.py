"""Score candidates against messages: many scores of every item, weighed on imitated clients.

The attacker knows which of its images an imitated client has. It keeps the scores that tell them
from the others there, over all rounds, and fits a logistic regression on them. Scores are
deviations from what images of the same class score, so that the class alone gives nothing away.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvl.audit.candidates import (
    as_matrix,
    candidates_of,
    shadows_of,
    signatures_of,
    tailored,
    together,
)
from fedvl.audit.evidence import Evidence, seen_of_each_client
from fedvl.audit.imitation import draw_rows
from fedvl.audit.messages import Seen
from fedvl.audit.scores import Item
from fedvl.evaluation.statistics import auc
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors


class Key(NamedTuple):
    """Which score: of which item in which round, by which kind of signature."""

    round_index: int
    item: str
    kind: str
    score: str


FARTHEST = 12.0  # deviation up to which scores are told apart
CLEAR, FEW = 3.0, 3  # standard errors by which scores must tell members; so many are taken if none does
TAIL = 3.0  # deviation beyond which a score counts more
PENALTY, STEPS = 100.0, 12  # of the logistic regression: weight of the squared coefficients, Newton's steps
OUTSIDE_FOR_EACH = 4  # images outside an imitated client for each one inside, by which scores are weighed
SIZE_DEVIATION = 0.5  # of the logarithm of sizes: imitated clients much larger or smaller count less
LEAST = 0.01  # of what an imitated client of the same size counts


class Scored(NamedTuple):
    """Scores of all candidates against what was seen of a client, and the items examined."""

    client: int
    scores: Tensor
    items: frozenset[str]


def score_candidates(
    evidence: Evidence, seen: Sequence[Seen], names: Iterable[str] | None = None, of_sum: bool = False
) -> list[Scored]:
    """Score all candidates against what was seen of each client, in these items or in all.

    ``of_sum``: what was seen is a sum, or a mean, over several clients.
    """
    found = []
    for client, all_seen in seen_of_each_client(seen):
        board = board_of(evidence, all_seen, of_sum)
        wanted = frozenset(all_seen[0].items if names is None else names)
        size = None if of_sum else len(evidence.rows(client))
        found.append(Scored(client, board.predict(all_seen, wanted, size), board.examined & wanted))
    return found


def board_of(evidence: Evidence, seen: Sequence[Seen], of_sum: bool) -> "Board":
    rounds = tuple(each.round_index for each in seen)
    whose = next((own for each in seen if (own := tailored(evidence, each)) is not None), None)
    key = (whose, rounds, frozenset(seen[0].items), of_sum)
    return evidence.once(("board", *key), lambda: Board(evidence, *key))


class Board:
    """The scores of imitated clients' images, and classifiers fitted on them.

    A classifier is of some items, and for clients of some size: imitated ones of that size count
    most.
    """

    def __init__(
        self, evidence: Evidence, client: int | None, rounds: tuple[int, ...], names: frozenset[str], of_sum: bool
    ) -> None:
        self.candidates = candidates_of(evidence)
        self.items = {index: items_of(evidence, client, index, names) for index in rounds}
        self.examined = frozenset(item.name for items in self.items.values() for item, _ in items)
        shadows = shadows_of(evidence, client)
        if of_sum:
            shadows = together(evidence, shadows)
        self.sizes = torch.tensor([len(shadow.rows) for shadow in shadows]).double()
        messages = {index: [matrices(shadow.seen[index].items) for shadow in shadows] for index in rounds}
        self.centres = {index: centres_of(messages[index]) for index in rounds}
        self._learn([shadow.rows for shadow in shadows], messages)
        self.chosen: dict[frozenset[str], list[Key]] = {}
        self.fitted: dict[tuple[frozenset[str], int | None], Tensor] = {}

    def _learn(self, rows: list[Tensor], messages: dict[int, list[Tensors]]) -> None:
        """Score the images of each imitated client and some that it does not have."""
        labels = self.candidates.labels[self.candidates.trial]
        tables, insides, weights = [], [], []
        for number, own in enumerate(rows):
            inside = torch.zeros(len(labels), dtype=torch.bool)
            inside[own] = True
            table: dict[Key, Tensor] = {}
            for index, of_round in messages.items():
                table |= self._deviations(index, of_round[number], ~inside, len(labels))
            weight = matched_weights(labels, inside)
            others = torch.nonzero(~inside & (weight > 0))[:, 0]
            drawn = draw_rows(
                others, min(OUTSIDE_FOR_EACH * len(own), len(others)), torch_generator(0, "others", number)
            )
            chosen = torch.cat([own, drawn])
            tables.append({key: column[chosen] for key, column in table.items()})
            insides.append(inside[chosen])
            weights.append(torch.where(inside, 1.0, weight * len(others) / max(len(drawn), 1))[chosen])
        self.inside, self.weights = torch.cat(insides), torch.cat(weights)
        self.shadow = torch.cat([torch.full((len(each),), number) for number, each in enumerate(insides)])
        blank = [torch.zeros(len(each), dtype=torch.float64) for each in insides]  # where a score does not apply
        self.columns = {
            key: torch.cat([table.get(key, none) for table, none in zip(tables, blank, strict=True)])
            for key in dict.fromkeys(key for table in tables for key in table)
        }
        self.told = {key: told_by_score(column, self.inside, self.weights) for key, column in self.columns.items()}

    def predict(self, seen: Sequence[Seen], names: frozenset[str], size: int | None) -> Tensor:
        """Return one score for each candidate; 0 for all if no item depends on a candidate."""
        count, keys = self.candidates.held.stop, self._keys(names)
        if not keys:
            return torch.zeros(count, dtype=torch.float64)
        found: dict[Key, Tensor] = {}
        free = torch.zeros(count, dtype=torch.bool)
        free[self.candidates.trial] = True
        for each in seen:
            only = {name: tensor for name, tensor in each.items.items() if name in names}
            found |= self._deviations(each.round_index, matrices(only), free, count)
        nothing = torch.zeros(count, dtype=torch.float64)
        table = with_tails(torch.stack([found.get(key, nothing) for key in keys], dim=1))
        return table @ self._coefficients(names, size)

    def _keys(self, names: frozenset[str]) -> list[Key]:
        """Return the scores that tell members of imitated clients, or the best few."""
        if names not in self.chosen:
            best = sorted((key for key in self.told if key.item in names), key=lambda key: -self.told[key])
            self.chosen[names] = [key for key in best if self.told[key] > CLEAR] or best[:FEW]
        return self.chosen[names]

    def _coefficients(self, names: frozenset[str], size: int | None) -> Tensor:
        """Fit the regression for a client of this size."""
        if (names, size) not in self.fitted:
            alike = torch.ones(len(self.sizes))
            if size is not None:
                alike = (-((self.sizes / size).log() / SIZE_DEVIATION).square()).exp() + LEAST
            table = with_tails(torch.stack([self.columns[key] for key in self._keys(names)], dim=1))
            self.fitted[names, size] = logistic(table, self.inside.double(), self.weights * alike[self.shadow])
        return self.fitted[names, size]

    def _deviations(self, index: int, items: Tensors, free: Tensor, count: int) -> dict[Key, Tensor]:
        found = {}
        for item, kind in self.items[index]:
            if item.name in items:
                for name, scores in item.scores(items[item.name], self.centres[index].get(item.name), count):
                    found[Key(index, item.name, kind, name)] = deviations(scores, self.candidates.labels[:count], free)
        return found


def items_of(evidence: Evidence, client: int | None, index: int, names: frozenset[str]) -> list[tuple[Item, str]]:
    """Return the items of a round that depend on a candidate, with the kind of signature."""
    candidates = candidates_of(evidence)

    def make() -> list[tuple[Item, str]]:
        signatures = signatures_of(evidence, client, index)
        labels, known = candidates.labels, candidates.known
        return [(Item(name, signature, labels, known), kind) for (name, kind), signature in signatures.items()]

    found = evidence.once(("items", client, index), make)
    role = evidence.method.role
    by_gradients = {name for name in names if role.shared(name).trained} - role.ends(names).keys()
    # the gradient of an image does not depend on its company, if the method says so
    once = by_gradients if evidence.method.scope == "row" else set()
    return [
        (item, kind)
        for item, kind in found
        if item.name in names and item.varies and not (kind == "beside" and item.name in once)
    ]


def matrices(items: Tensors) -> Tensors:
    return {name: as_matrix(tensor) for name, tensor in items.items()}


def centres_of(messages: list[Tensors]) -> Tensors:
    """Return the mean of each item over imitated clients, if all have it in one shape."""
    found = {}
    for name in messages[0]:
        parts = [items[name] for items in messages if name in items]
        if len(parts) == len(messages) and len({part.shape for part in parts}) == 1:
            found[name] = torch.stack(parts).double().mean(0)
    return found


def deviations(scores: Tensor, labels: Tensor, free: Tensor) -> Tensor:
    """Return scores as deviations from those of images of the same class that are outside."""
    scores, classes = scores.double(), int(labels.max()) + 1
    known, of = scores[free], labels[free]
    counts = torch.bincount(of, minlength=classes).double()
    means = torch.zeros(classes, dtype=torch.float64).index_add(0, of, known) / counts.clamp(min=1)
    squares = torch.zeros(classes, dtype=torch.float64).index_add(0, of, (known - means[of]).square())
    spreads = (squares / (counts - 1).clamp(min=1)).sqrt()
    few = counts < 3  # images of a class, by which no spread can be told: all of them are taken
    means, spreads = torch.where(few, known.mean(), means), torch.where(few, known.std(correction=0), spreads)
    floor = 1e-3 * float(spreads.max()) + 1e-12
    return ((scores - means[labels]) / spreads.clamp(min=floor)[labels]).clamp(-FARTHEST, FARTHEST)


def matched_weights(labels: Tensor, inside: Tensor) -> Tensor:
    """Weight images so that those outside have the classes of those inside, and as much weight."""
    size = int(labels.max()) + 1
    held, free = torch.bincount(labels[inside], minlength=size), torch.bincount(labels[~inside], minlength=size)
    outside = (held / free.clamp(min=1))[labels].double()
    return torch.where(inside, torch.ones_like(outside), outside)


def with_tails(table: Tensor) -> Tensor:
    return torch.cat([table, (table - TAIL).clamp(min=0)], dim=1)


def told_by_score(column: Tensor, inside: Tensor, weights: Tensor) -> float:
    """Return by how many standard errors a score tells members, on average or some surely."""
    members, others, apart = column[inside].numpy(), column[~inside].numpy(), weights[~inside].numpy()
    if not apart.sum() > 0:
        return 0.0
    error = np.sqrt(1 / (12 * len(members)) + 1 / (12 * len(others)))
    sure = float((members > np.quantile(others, 0.99)).mean())
    of_chance = np.sqrt(0.01 * 0.99 / len(members))
    on_average = abs(auc(members, others, apart) - 0.5) / error
    return float(max(on_average, (sure - 0.01 - 1 / len(members)) / of_chance))


def logistic(table: Tensor, inside: Tensor, weights: Tensor) -> Tensor:
    """Return the coefficients of a penalised logistic regression, without its intercept."""
    table = torch.cat([table, torch.ones(len(table), 1, dtype=table.dtype)], dim=1)
    penalty = PENALTY * torch.eye(table.shape[1], dtype=table.dtype)
    penalty[-1, -1] = 1e-6
    found = torch.zeros(table.shape[1], dtype=table.dtype)
    for _ in range(STEPS):
        likelihood = torch.sigmoid(table @ found)
        slope = table.T @ (weights * (likelihood - inside)) + penalty @ found
        curvature = (table * (weights * likelihood * (1 - likelihood))[:, None]).T @ table + penalty
        found = found - torch.linalg.solve(curvature, slope)
    return found[:-1]
