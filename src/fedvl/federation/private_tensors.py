"""The private tensors of many clients, in few stores."""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence

import torch

from fedvl.federation.stacks import Stack
from fedvl.tensors import Tensors

MAX_ROWS = 2**40  # of a store


class PrivateTensors(MutableMapping[int, Tensors]):
    """The private tensors of many clients: those of the same shapes are rows of one store."""

    def __init__(self) -> None:
        self._stores: dict[object, Store] = {}  # by shapes
        self._places: dict[int, int] = {}  # the number of a client's store and its row there, in one number
        self._changed: set[int] | None = None  # clients since the last look; None: all

    def changed(self) -> Iterable[int] | None:
        """Return the clients whose tensors are new since the last call; None: look at all."""
        found, self._changed = self._changed, set()
        return found

    def __getitem__(self, client: int) -> Tensors:
        number, row = divmod(self._places[client], MAX_ROWS)
        return {name: tensor[row].clone() for name, tensor in self._numbered[number].tensors.items()}

    def __setitem__(self, client: int, tensors: Tensors) -> None:
        self.put(Stack([client], {name: tensor[None] for name, tensor in tensors.items()}))

    def __delitem__(self, client: int) -> None:
        self._leave(client)
        self._changed = None  # nothing that is added tells of what is gone

    def _leave(self, client: int) -> None:
        """Free the row of a client that comes back with tensors of other shapes."""
        number, row = divmod(self._places.pop(client), MAX_ROWS)
        self._numbered[number].free.append(row)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, client: object) -> bool:
        return client in self._places

    def clear(self) -> None:
        self._stores.clear()
        self._places.clear()
        self._changed = None

    @property
    def _numbered(self) -> "list[Store]":
        return list(self._stores.values())

    def put(self, stack: Stack) -> None:
        """Keep the tensors of clients, in place of those they had."""
        if not stack.tensors:
            return
        # as a set: what was restored from a journal comes in another order
        shapes = frozenset((name, tensor.shape[1:], tensor.dtype) for name, tensor in stack.tensors.items())
        store = self._stores.setdefault(shapes, Store())
        first = self._numbered.index(store) * MAX_ROWS
        if self._changed is not None:
            self._changed.update(stack.clients)
        for client in self._elsewhere(stack.clients, first):
            self._leave(client)
        new = [client for client in stack.clients if client not in self._places]
        self._places.update(zip(new, (first + row for row in store.room(len(new), stack.tensors)), strict=True))
        places = torch.tensor([self._places[client] - first for client in stack.clients])
        for name, tensor in stack.tensors.items():
            store.tensors[name][places.to(tensor.device)] = tensor

    def _elsewhere(self, clients: Iterable[int], first: int) -> list[int]:
        """Return the clients that have tensors of other shapes."""
        places = ((client, self._places.get(client, first)) for client in clients)
        return [client for client, place in places if not first <= place < first + MAX_ROWS]

    def stacks(self, clients: Sequence[int]) -> Iterator[Stack]:
        """Return the tensors of clients, stacked by their shapes; who has none is left out."""
        if not self._places:
            return
        places = torch.tensor([self._places.get(client, -1) for client in clients], dtype=torch.long)
        members = torch.tensor(clients, dtype=torch.long)
        for number, store in enumerate(self._stores.values()):
            here = places.div(MAX_ROWS, rounding_mode="floor") == number
            if bool(here.any()):
                rows = places[here] % MAX_ROWS
                tensors = {name: tensor[rows.to(tensor.device)] for name, tensor in store.tensors.items()}
                yield Stack(members[here].tolist(), tensors)


class Store:
    """Tensors with more rows than clients have taken; they grow by doubling."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self.free: list[int] = []
        self.rows = 0

    def room(self, count: int, like: Tensors) -> list[int]:
        """Return free rows."""
        if (missing := count - len(self.free)) > 0:
            grown = max(missing, self.rows)
            for name, tensor in like.items():
                fresh = tensor.new_zeros(grown, *tensor.shape[1:])
                self.tensors[name] = torch.cat([self.tensors[name], fresh]) if name in self.tensors else fresh
            self.free += range(self.rows, self.rows + grown)
            self.rows += grown
        taken = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        return taken
