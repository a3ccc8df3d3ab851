"""The roles of a method's tensors: who holds them, what trains them, what the server needs of them.

A tensor of :meth:`Method.start` is ``Shared()`` and one of :meth:`Method.join` is ``Private()``
unless :meth:`Method.roles` says otherwise. What travels follows from the roles alone.

``first`` makes a tensor from a client's samples alone, for many clients in one kernel: it is
written by the three rules of a loss. ``begin``, ``end`` and ``make`` give a tensor its value when a
client's training begins or ends.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

from fedvl.tensors import Tensors

Shape = tuple[int | range | None, ...]  # a range: any of its sizes; None: any size
Shapes = dict[str, Shape]
# The weighted mean over clients, the update of each client, or each and the last one of every client kept
Needs = Literal["sum", "each", "last"]
# Name of the tensor, all the client's tensors at that time, what the server handed out, the client's samples -> value
Make = Callable[[str, Tensors, Tensors, Any], Any]


@dataclass(frozen=True)
class Shared:
    """A tensor that the server hands out and clients send back."""

    trained: bool = True  # by gradients; if not, by what ``objective`` returns
    rate: float = 1.0  # factor on the learning rate
    needs: Needs = "sum"
    shape: Shape | None = None  # where it may differ from that of ``start``; None: any size
    features: bool = False  # its rows are compared with image features, and live where these do
    end: Make | None = None  # what a client sends of it; without, what training left


@dataclass(frozen=True)
class Private:
    """A tensor that stays with its client; clients may have different shapes of it."""

    trained: bool = False
    rate: float = 1.0  # factor on the learning rate
    per_sample: bool = False  # one row for each of the client's samples
    lasts: bool = True  # outlives the round; if not, it is made anew by ``join``
    first: Callable[[Any], Any] | None = None  # what a client has before its first round, of its samples
    begin: Make | None = None  # what training begins with; without, what the client kept
    end: Make | None = None  # what the client keeps of it; without, what training left


@dataclass(frozen=True)
class Sent:
    """A tensor that a client sends beside the shared ones."""

    make: Make
    shape: Shape
    needs: Literal["each", "last"] = "each"


@dataclass(frozen=True)
class Statistic:
    """A sum over samples that :meth:`Method.statistics` returns; the server needs the total."""

    shape: tuple[int, ...]
    norm: float | None = None  # of what one sample adds, at most; None: noise cannot cover it
    noised: bool = False  # whether ``solve`` expects noise on the sum, as ``task.noise`` says


@dataclass(frozen=True)
class Given:
    """A tensor that ``hand_out`` gives a client beside the shared ones, only to read."""

    shape: Shape


@dataclass(frozen=True)
class Server:
    """A tensor of ``start`` that stays on the server; :meth:`Method.step` reads and changes it."""


@dataclass(frozen=True)
class Remembered:
    """A tensor of a user's session, from one query to the next."""


Role = Shared | Private | Sent | Statistic | Given | Server | Remembered
AnyRole = TypeVar("AnyRole", Shared, Private, Server)


class Roles:
    """Look up the roles of tensors by name."""

    def __init__(self, declared: Mapping[str, Role]) -> None:
        self.declared = dict(declared)
        self.sent = {name: role for name, role in self.declared.items() if isinstance(role, Sent)}
        self.statistics = {name: role for name, role in self.declared.items() if isinstance(role, Statistic)}
        changing = [role for role in self.declared.values() if isinstance(role, Shared | Private)]
        self.has_ends = bool(self.sent) or any(role.end for role in changing)
        self.has_begins = any(isinstance(role, Private) and role.begin for role in changing)
        self.given = {name: role.shape for name, role in self.declared.items() if isinstance(role, Given)}
        self.remembers = any(isinstance(role, Remembered) for role in self.declared.values())
        private = {name: role for name, role in self.declared.items() if isinstance(role, Private)}
        self.named_private = [name for name in private if not any(sign in name for sign in "*?[")]
        self.trained_private = [name for name, role in private.items() if role.trained]
        self.firsts = {name: role.first for name, role in private.items() if role.first is not None}
        self.per_sample = {name for name, role in private.items() if role.per_sample}
        self.renews_private = not all(role.lasts for role in private.values())

    def shared(self, name: str) -> Shared:
        return self._find(name, Shared) or Shared()

    def private(self, name: str) -> Private:
        return self._find(name, Private) or Private()

    def declares(self, name: str) -> bool:
        """Return whether the method gives a private tensor a role, by its name or a pattern."""
        return self._find(name, Private) is not None

    def on_server(self, name: str) -> bool:
        """Return whether a tensor of ``start`` stays on the server."""
        return self._find(name, Server) is not None

    def split(self, start: Tensors) -> tuple[Tensors, Tensors]:
        """Split tensors of ``start`` into those that are handed out and those that are not."""
        if not isinstance(start, dict):
            kind = "nothing" if start is None else f"a {type(start).__name__}"
            raise TypeError(f"start must return a dictionary of tensors by name, and returns {kind}")
        server = {name: tensor for name, tensor in start.items() if self.on_server(name)}
        return {name: tensor for name, tensor in start.items() if name not in server}, server

    def trained(self, start: Tensors) -> Tensors:
        """Return the tensors of ``start`` that clients train and send."""
        return {name: t for name, t in start.items() if self.shared(name).trained and not self.on_server(name)}

    def begins(self, private: Iterable[str]) -> dict[str, Make]:
        """Return the ``begin`` of these tensors, and of those declared by name, that have one."""
        found = {name: self.private(name).begin for name in (*self.named_private, *private)}
        return {name: begin for name, begin in found.items() if begin is not None}

    def ends(self, shared: Iterable[str], private: Iterable[str] = ()) -> dict[str, Make]:
        """Return the ``make`` of what is sent besides, and the ``end`` of tensors that have one."""
        found = {
            **{name: role.make for name, role in self.sent.items()},
            **{name: self.private(name).end for name in (*self.named_private, *private)},
            **{name: self.shared(name).end for name in shared},
        }
        return {name: end for name, end in found.items() if end is not None}

    def needs(self, name: str) -> Needs:
        """Return what the server needs of a tensor of an update."""
        return self.sent[name].needs if name in self.sent else self.shared(name).needs

    @property
    def sent_shapes(self) -> Shapes:
        return {name: role.shape for name, role in self.sent.items()}

    @property
    def statistics_shapes(self) -> Shapes:
        return {name: role.shape for name, role in self.statistics.items()}

    def _find(self, name: str, kind: type[AnyRole]) -> AnyRole | None:
        """Return the declared role of this kind: of the name, or of the first pattern that fits."""
        own = self.declared.get(name)
        if isinstance(own, kind):
            return own
        fitting = (role for key, role in self.declared.items() if isinstance(role, kind) and fnmatchcase(name, key))
        return next(fitting, None)
