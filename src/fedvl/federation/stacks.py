"""Many clients in few tensors: a row for each client where shapes agree, so that no work is done
for each in Python.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Self, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvl.methods.base import Update
from fedvl.tensors import RunningMean, Tensors, block_of, count_bytes, mean_of_rows


class Folded:
    """Updates of many clients to one tensor, of which their mean and moves are held."""

    def __init__(self, begun: Tensor, clients: int) -> None:
        self.begun, self.mean = begun, RunningMean()
        self.distances = torch.zeros(clients, dtype=torch.float64, device=begun.device)
        self.nbytes = clients * begun.nbytes

    def add(self, rows: Tensor, weights: Tensor, places: Tensor) -> None:
        """Add updates of clients at these places, in the order of the mean."""
        self.distances[places.to(rows.device)] = distances_from(rows, [self.begun])
        self.mean.add(rows, weights)


Column = Tensor | list[Tensor]  # a row for each client, or a tensor for each where shapes differ
Cell = TypeVar("Cell")


def columns_of(items: Sequence[Tensors]) -> dict[str, Column]:
    """Stack tensors of the same names, as far as their shapes agree."""
    columns: dict[str, Column] = {}
    for name in items[0] if items else ():
        parts = [item[name] for item in items]
        alike = len({(part.shape, part.dtype) for part in parts}) == 1
        columns[name] = torch.stack(parts) if alike else parts
    return columns


class Stack(NamedTuple):
    """Tensors of clients with the same shapes: a row of each tensor for each client."""

    clients: list[int]
    tensors: Tensors

    def row(self, place: int) -> Tensors:
        return {name: tensor[place] for name, tensor in self.tensors.items()}

    def take(self, places: Sequence[int]) -> Self:
        """Return the rows at these places."""
        tensors = {name: rows_at(tensor, places) for name, tensor in self.tensors.items()}
        return self._replace(clients=[self.clients[place] for place in places], tensors=tensors)


def stacks_of(pairs: Iterable[tuple[int, Tensors]]) -> list[Stack]:
    """Stack the tensors of clients, one stack for each combination of shapes."""
    groups: dict[object, list[tuple[int, Tensors]]] = {}
    for client, tensors in pairs:
        # as a set: what was restored from a journal comes in another order
        shapes = frozenset((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        groups.setdefault(shapes, []).append((client, tensors))
    return [
        Stack(
            [client for client, _ in group],
            {name: torch.stack([tensors[name] for _, tensors in group]) for name in group[0][1]},
        )
        for group in groups.values()
    ]


def rows_at(tensor: Tensor, places: Sequence[int]) -> Tensor:
    return tensor[torch.tensor(places, dtype=torch.long, device=tensor.device)]


class Cut(Sequence[Cell]):
    """A sequence whose items are cut out of stacked tensors when they are asked for."""

    @abstractmethod
    def one(self, place: int) -> Cell: ...

    @overload
    def __getitem__(self, place: int) -> Cell: ...
    @overload
    def __getitem__(self, place: slice) -> list[Cell]: ...
    def __getitem__(self, place: int | slice) -> Cell | list[Cell]:
        return [self.one(each) for each in range(len(self))[place]] if isinstance(place, slice) else self.one(place)


class SampleRows(Cut[Tensor]):
    """Which samples each client holds, in one tensor."""

    def __init__(self, samples: Tensor, sizes: Tensor) -> None:
        self.samples, self.sizes = samples, sizes
        self.ends = sizes.cumsum(0)
        self.sizes_known = sizes.cpu().numpy()
        self.counts: list[int] = sizes.tolist()
        self._ends: list[int] = self.ends.tolist()

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> "SampleRows":
        if isinstance(rows, SampleRows):
            return rows
        samples = torch.cat(list(rows)) if len(rows) else torch.zeros(0, dtype=torch.long)
        return cls(samples, torch.tensor([len(own) for own in rows], dtype=torch.long, device=samples.device))

    def __len__(self) -> int:
        return len(self.counts)

    def one(self, client: int) -> Tensor:
        end = self._ends[client]
        return self.samples[end - self.counts[client] : end]

    def padded(self, clients: Tensor, width: int) -> Tensor:
        """Return the samples of clients as clients x width; beyond a client's own stands any."""
        begins = (self.ends - self.sizes)[clients]
        places = begins[:, None] + torch.arange(width, device=clients.device)
        return self.samples[places.clamp_(max=len(self.samples) - 1)]


class Updates(Cut[Update]):
    """Updates of one round in the order of clients; one is cut out when it is asked for.

    Where tensors are folded, ``again`` trains some of the clients once more, which gives the same
    updates: so one that is refused is left out, and one that is looked at is there.
    """

    def __init__(
        self,
        clients: list[int],
        columns: Mapping[str, Column | Folded],
        weights: list[float],
        again: "Callable[[list[int]], Updates] | None" = None,
    ) -> None:
        self.clients, self.columns, self.weights, self.again = clients, columns, weights, again
        self._distances = {name: c.distances.cpu() for name, c in columns.items() if isinstance(c, Folded)}

    @classmethod
    def of(cls, updates: Iterable[Update]) -> "Updates":
        """Stack updates of the same names."""
        if isinstance(updates, Updates):
            return updates
        found = sorted(updates, key=lambda update: update.client)
        columns = columns_of([update.tensors for update in found])
        return cls([update.client for update in found], columns, [update.weight for update in found])

    def __len__(self) -> int:
        return len(self.clients)

    def one(self, place: int) -> Update:
        return self._trained_again([place])[0] if self._folded else self.outline(place)

    def outline(self, place: int) -> Update:
        """Return an update in which a folded tensor has a shape and a type alone."""
        tensors = {
            name: torch.empty_like(column.begun, device="meta") if isinstance(column, Folded) else column[place]
            for name, column in self.columns.items()
        }
        return Update(self.clients[place], tensors, self.weights[place])

    def not_finite(self, place: int) -> list[str]:
        """Return the tensors of an update whose values, or folded whose move, are not finite."""
        values = {
            name: self._distances[name][place] if tensor.is_meta else tensor
            for name, tensor in self.outline(place).tensors.items()
        }
        return [name for name, found in values.items() if not bool(torch.isfinite(found).all())]

    @property
    def _folded(self) -> bool:
        return any(isinstance(column, Folded) for column in self.columns.values())

    def _trained_again(self, places: Sequence[int]) -> "Updates":
        assert self.again is not None
        if not places:
            return Updates([], {}, [])
        return self.again([self.clients[place] for place in places]).only(self.columns)

    def take(self, places: Sequence[int]) -> "Updates":
        """Return the updates at these places."""
        if places == list(range(len(self))):
            return self
        if self._folded:
            return self._trained_again(places)
        columns = {
            name: [column[place] for place in places] if isinstance(column, list) else rows_at(column, places)
            for name, column in self.columns.items()
            if not isinstance(column, Folded)
        }
        taken = Updates([self.clients[place] for place in places], columns, [self.weights[place] for place in places])
        taken._distances = {name: rows_at(distance, places) for name, distance in self._distances.items()}
        return taken

    def only(self, names: Iterable[str]) -> "Updates":
        """Return the updates with these tensors alone."""
        return Updates(self.clients, {name: self.columns[name] for name in names}, self.weights, self.again)

    def column(self, name: str) -> Tensor:
        """Return a tensor of all updates, stacked."""
        column = self.columns[name]
        assert isinstance(column, Tensor), f"updates have '{name}' in several shapes"
        return column

    @property
    def bytes(self) -> int:
        return sum(
            tensor.nbytes
            for column in self.columns.values()
            for tensor in (column if isinstance(column, list) else [column])
        )

    @property
    def alike(self) -> bool:
        """Whether all updates have the same shapes."""
        return not any(isinstance(column, list) for column in self.columns.values())

    def moves(self, names: Iterable[str], handed: Mapping[int, Tensors]) -> Tensor:
        """Return how far clients moved tensors from what they were handed; NaN shows in it."""
        unknown = [name for name in names if name not in self._distances]
        begun = [handed[client] for client in self.clients] if unknown else []
        for name in unknown:
            self._distances[name] = self._distance(name, begun).cpu()
        squares = [self._distances[name].square() for name in names]
        return torch.stack(squares).sum(0).sqrt() if squares else torch.zeros(len(self), dtype=torch.float64)

    def _distance(self, name: str, begun: Sequence[Tensors]) -> Tensor:
        column, same = self.columns[name], all(tensors is begun[0] for tensors in begun)
        assert not isinstance(column, Folded), "it brings its distances"
        if isinstance(column, list):
            pairs = zip(column, begun, strict=True)
            return torch.cat([length_from(sent[None], tensors.get(name)) for sent, tensors in pairs])
        known = begun[:1] if same else begun
        return distances_from(column, [tensors[name] for tensors in known] if name in begun[0] else None)

    def mean(self, names: Sequence[str]) -> Tensors:
        """Return the weighted mean: no chunk or machine changes its order of clients."""
        order, found = order_of_mean(self.clients, self.weights), Tensors()
        weights = self.weights if in_turn(order) else [self.weights[place] for place in order]
        for name in names:
            column = self.columns[name]
            if isinstance(column, Folded):
                found[name] = column.mean.finish()
            else:
                rows = self.column(name)
                ordered = rows if in_turn(order) else rows[torch.from_numpy(order).to(rows.device)]
                found[name] = mean_of_rows(ordered, weights)
        return found


def in_turn(order: NDArray[np.int64]) -> bool:
    return bool((order == np.arange(len(order))).all())


def order_of_mean(clients: Sequence[int], weights: Sequence[float]) -> NDArray[np.int64]:
    """Return the places of updates as they are summed: the heaviest first, then by client.

    Clients are trained in that order, so that they can be summed as they come.
    """
    return np.lexsort((np.asarray(clients), -np.asarray(weights)))


def distances_from(rows: Tensor, begun: Sequence[Tensor] | None) -> Tensor:
    """Return how far rows are from where they began: all from one, each from its own, or 0."""
    parts, block = [], block_of(rows)
    for first in range(0, len(rows), block):
        known = begun if begun is None or len(begun) == 1 else begun[first : first + block]
        was = torch.stack(list(known)) if known is not None else None
        parts.append(length_from(rows[first : first + block], was))
    return torch.cat(parts)


def length_from(sent: Tensor, begun: Tensor | None) -> Tensor:
    """Return the norm of each row's move, in one pass."""
    moves = sent if begun is None else sent - begun
    lengths: Tensor = torch.linalg.vector_norm(moves.reshape(len(moves), -1), dim=1)
    return lengths.double()


class Trained(NamedTuple):
    """What local training leaves: the update that is sent, and what stays with the client."""

    update: Update
    private: Tensors
    loss: float
    examples: int  # that the client declares; what it trained on may be fewer


class Answers(Cut[Trained]):
    """What the clients of a round answer: updates, which may have any form before they are checked,
    and what stays with the clients.
    """

    def __init__(
        self,
        updates: Sequence[Update] = (),
        private: Sequence[Stack] = (),
        losses: Sequence[float] = (),
        examples: Sequence[int] = (),
    ) -> None:
        self.updates, self.private, self.losses, self.examples = updates, private, losses, examples
        if isinstance(updates, Updates):
            self.clients, self.weights = updates.clients, updates.weights
        else:
            self.clients, self.weights = [u.client for u in updates], [u.weight for u in updates]
        self._places: dict[int, tuple[Stack, int]] | None = None

    @staticmethod
    def of(trained: Sequence[Trained]) -> "Answers":
        if isinstance(trained, Answers):
            return trained
        return Answers(
            [result.update for result in trained],
            stacks_of((result.update.client, result.private) for result in trained),
            [result.loss for result in trained],
            [result.examples for result in trained],
        )

    def __len__(self) -> int:
        return len(self.clients)

    def one(self, place: int) -> Trained:
        if self._places is None:
            self._places = {client: (stack, row) for stack in self.private for row, client in enumerate(stack.clients)}
        stack, row = self._places.get(self.clients[place], (Stack([], {}), 0))
        return Trained(self.updates[place], stack.row(row), self.losses[place], self.examples[place])

    @property
    def bytes(self) -> int:
        if isinstance(self.updates, Updates):
            return self.updates.bytes
        return sum(count_bytes(update.tensors) for update in self.updates)

    def counted(self, good: Updates) -> "Answers":
        """Return the answers of which the updates count."""
        if good is self.updates:
            return self
        clients, place_of = set(good.clients), {client: place for place, client in enumerate(self.clients)}
        rows = [[row for row, client in enumerate(stack.clients) if client in clients] for stack in self.private]
        private = [stack.take(places) for stack, places in zip(self.private, rows, strict=True) if places]
        places = [place_of[client] for client in good.clients]
        return Answers(good, private, [self.losses[p] for p in places], [self.examples[p] for p in places])
