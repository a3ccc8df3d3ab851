"""Many clients in few tensors: a row for each client where shapes agree, so that no work is done
for each in Python.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor

from fedvl.methods.base import Update
from fedvl.tensors import Tensors, block_of, count_bytes, mean_of_rows

Column = Tensor | list[Tensor]  # a row for each client, or a tensor for each where shapes differ
Columns = dict[str, Column]


def columns_of(items: Sequence[Tensors]) -> Columns:
    """Stack tensors of the same names, as far as their shapes agree."""
    found: Columns = {}
    for name in items[0] if items else ():
        parts = [item[name] for item in items]
        alike = len({(part.shape, part.dtype) for part in parts}) == 1
        found[name] = torch.stack(parts) if alike else parts
    return found


def rows_of(column: Column, places: list[int]) -> Column:
    if isinstance(column, list):
        return [column[place] for place in places]
    return (
        column
        if places == list(range(len(column)))
        else column[torch.tensor(places, dtype=torch.long, device=column.device)]
    )


class Rows(Sequence[Tensor]):
    """Which samples each client holds, in one tensor."""

    def __init__(self, samples: Tensor, sizes: Tensor) -> None:
        self.samples, self.sizes = samples, sizes
        self.ends = sizes.cumsum(0)
        self.sizes_known = sizes.cpu().numpy()
        self.counts: list[int] = sizes.tolist()
        self._ends: list[int] = self.ends.tolist()

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> "Rows":
        if isinstance(rows, Rows):
            return rows
        samples = torch.cat(list(rows)) if len(rows) else torch.zeros(0, dtype=torch.long)
        return cls(samples, torch.tensor([len(own) for own in rows], dtype=torch.long, device=samples.device))

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, client: int) -> Tensor: ...
    @overload
    def __getitem__(self, client: slice) -> list[Tensor]: ...
    def __getitem__(self, client: int | slice) -> Tensor | list[Tensor]:
        if isinstance(client, slice):
            return [self[number] for number in range(len(self))[client]]
        end = self._ends[client]
        return self.samples[end - self.counts[client] : end]

    def padded(self, clients: Tensor, width: int) -> Tensor:
        """Return the samples of clients as clients x width; beyond a client's own stands any."""
        begins = (self.ends - self.sizes)[clients]
        places = begins[:, None] + torch.arange(width, device=clients.device)
        return self.samples[places.clamp_(max=len(self.samples) - 1)]


class Updates(Sequence[Update]):
    """Updates of one round in the order of clients; one is cut out when it is asked for."""

    def __init__(self, clients: list[int], columns: Columns, weights: list[float]) -> None:
        self.clients, self.columns, self.weights = clients, columns, weights
        self._distances: Tensors = {}

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

    @overload
    def __getitem__(self, place: int) -> Update: ...
    @overload
    def __getitem__(self, place: slice) -> list[Update]: ...
    def __getitem__(self, place: int | slice) -> Update | list[Update]:
        if isinstance(place, slice):
            return [self[number] for number in range(len(self))[place]]
        tensors = {name: column[place] for name, column in self.columns.items()}
        return Update(self.clients[place], tensors, self.weights[place])

    def take(self, places: list[int]) -> "Updates":
        """Return the updates at these places."""
        if len(places) == len(self):
            return self
        columns = {name: rows_of(column, places) for name, column in self.columns.items()}
        found = Updates([self.clients[place] for place in places], columns, [self.weights[place] for place in places])
        rows = torch.tensor(places, dtype=torch.long)
        found._distances = {name: distance[rows] for name, distance in self._distances.items()}
        return found

    def only(self, names: Iterable[str]) -> "Updates":
        """Return the updates with these tensors alone."""
        return Updates(self.clients, {name: self.columns[name] for name in names}, self.weights)

    def column(self, name: str) -> Tensor:
        """Return a tensor of all updates, stacked."""
        column = self.columns[name]
        assert isinstance(column, Tensor), f"updates have '{name}' in several shapes"
        return column

    @property
    def bytes(self) -> int:
        return sum(
            tensor.numel() * tensor.element_size()
            for column in self.columns.values()
            for tensor in (column if isinstance(column, list) else [column])
        )

    @property
    def alike(self) -> bool:
        """Whether all updates have the same shapes."""
        return not any(isinstance(column, list) for column in self.columns.values())

    def moves(self, names: Iterable[str], handed: Mapping[int, Tensors]) -> Tensor:
        """Return how far clients moved tensors from what they were handed; NaN shows in it."""
        begun = [handed[client] for client in self.clients]
        for name in names:
            if name not in self._distances:
                self._distances[name] = self._distance(name, begun).cpu()
        squares = [self._distances[name].square() for name in names]
        return torch.stack(squares).sum(0).sqrt() if squares else torch.zeros(len(self), dtype=torch.float64)

    def _distance(self, name: str, begun: Sequence[Tensors]) -> Tensor:
        column, same = self.columns[name], all(tensors is begun[0] for tensors in begun)
        if isinstance(column, list):
            pairs = zip(column, begun, strict=True)
            return torch.cat([length_from(sent[None], tensors.get(name)) for sent, tensors in pairs])
        parts, block = [], block_of(column)
        for first in range(0, len(column), block):
            known = begun[first : first + 1] if same else begun[first : first + block]
            was = torch.stack([tensors[name] for tensors in known]) if name in begun[0] else None
            parts.append(length_from(column[first : first + block], was))
        return torch.cat(parts)

    def mean(self, names: Sequence[str]) -> Tensors:
        """Return the weighted mean, in the order of clients: no chunk or machine changes it."""
        return {name: mean_of_rows(self.column(name), self.weights) for name in names}


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


class Shelf(NamedTuple):
    """Private tensors of some clients, stacked."""

    clients: list[int]
    tensors: Tensors


def shelved(pairs: Iterable[tuple[int, Tensors]]) -> list[Shelf]:
    """Stack the tensors of clients, as far as their shapes agree."""
    groups: dict[object, list[tuple[int, Tensors]]] = {}
    for client, tensors in pairs:
        # as a set: what was restored from a journal comes in another order
        shapes = frozenset((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        groups.setdefault(shapes, []).append((client, tensors))
    return [
        Shelf(
            [client for client, _ in group],
            {name: torch.stack([own[name] for _, own in group]) for name in group[0][1]},
        )
        for group in groups.values()
    ]


class Answers(Sequence[Trained]):
    """What the clients of a round answer, each by itself: nothing is known of its form."""

    def __init__(self, results: Sequence[Trained]) -> None:
        self.results = results
        self.clients = [result.update.client for result in results]
        self.updates: Sequence[Update] = [result.update for result in results]
        self.losses = [result.loss for result in results]
        self.examples = [result.examples for result in results]

    @staticmethod
    def of(trained: Sequence[Trained]) -> "Answers":
        return trained if isinstance(trained, Answers) else Answers(trained)

    def __len__(self) -> int:
        return len(self.clients)

    @overload
    def __getitem__(self, place: int) -> Trained: ...
    @overload
    def __getitem__(self, place: slice) -> list[Trained]: ...
    def __getitem__(self, place: int | slice) -> Trained | list[Trained]:
        return [self.one(each) for each in range(len(self))[place]] if isinstance(place, slice) else self.one(place)

    def one(self, place: int) -> Trained:
        return self.results[place]

    @property
    def bytes(self) -> int:
        return sum(count_bytes(update.tensors) for update in self.updates)

    def of_clients(self, clients: set[int]) -> "Answers":
        """Return what these clients answer."""
        return Answers([result for result in self.results if result.update.client in clients])

    def shelves(self) -> list[Shelf]:
        """Return what stays with the clients."""
        return shelved((result.update.client, result.private) for result in self.results)


class Cohort(Answers):
    """What local training leaves of a round's clients, in the order of clients."""

    def __init__(self, updates: Updates, private: list[Shelf], losses: list[float], examples: list[int]) -> None:
        self.stack, self.private, self.losses, self.examples = updates, private, losses, examples
        self.updates, self.clients = updates, updates.clients
        self._places: dict[int, tuple[Shelf, int]] | None = None

    def one(self, place: int) -> Trained:
        if self._places is None:
            self._places = {c: (shelf, row) for shelf in self.private for row, c in enumerate(shelf.clients)}
        update = self.updates[place]
        shelf, row = self._places.get(update.client, (Shelf([], {}), 0))
        private = {name: tensor[row] for name, tensor in shelf.tensors.items()}
        return Trained(update, private, self.losses[place], self.examples[place])

    @property
    def bytes(self) -> int:
        return self.stack.bytes

    def shelves(self) -> list[Shelf]:
        return self.private

    def of_clients(self, clients: set[int]) -> "Cohort":
        places = [place for place, client in enumerate(self.clients) if client in clients]
        if len(places) == len(self):
            return self
        shelves = []
        for members, tensors in self.private:
            rows = [row for row, client in enumerate(members) if client in clients]
            if rows:
                cut = {name: tensor[torch.tensor(rows, device=tensor.device)] for name, tensor in tensors.items()}
                shelves.append(Shelf([members[row] for row in rows], cut))
        return Cohort(
            self.stack.take(places), shelves, [self.losses[p] for p in places], [self.examples[p] for p in places]
        )
