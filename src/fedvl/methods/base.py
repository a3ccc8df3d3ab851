"""What a method is: pure functions on named tensors, with no knowledge of where they run.

A method is one file in this folder that defines one subclass of :class:`Method`. It is written for ONE client and ONE
batch, as its paper is; the engine runs all clients of a round in one kernel (``torch.func.vmap``). Hence three rules:
nothing is written in place, nothing branches on a tensor's value, and randomness comes from :meth:`Method.noise`.

Three kinds of tensors, kept apart by where they come from:

- *shared*: what :meth:`Method.start` returns. They travel to the client, are trained there and travel back.
- *private*: what :meth:`Method.join` returns. They stay with their client; no code path sends them.
- *constants*: whatever the method computes from its :class:`Task` in ``__init__``, known to every party.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, cast

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fedvl.methods.parts.losses import entropy, label_loss
from fedvl.tensors import Tensors, weighted_mean

if TYPE_CHECKING:
    from fedvl.models.clip import DualEncoder
    from fedvl.models.vilt import FusedEncoder


@dataclass(frozen=True)
class Samples:
    """Rows of data: what the method's encoder made of each image, and its label (-1 where there is none)."""

    inputs: Tensors
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> "Samples":
        return Samples({name: tensor[rows] for name, tensor in self.inputs.items()}, self.labels[rows])


@dataclass(frozen=True)
class Task:
    """What every party knows before the first round."""

    class_names: tuple[str, ...]
    # classes x d, as the text tower gives them (mean of unit vectors for several templates); d is 0 for a fused encoder
    text_embeddings: Tensor
    encoder: "DualEncoder | FusedEncoder"
    clients: int
    seed: int = 0  # for draws that must be the same for all parties
    stage: Callable[[str], Callable[[int, int], None]] = lambda name: lambda done, total: None  # shows progress
    protocol: str = "closed"  # "open": a user will ask about classes that nobody trains on
    target: Tensors | None = None  # that user's own images, without labels; only for a method that ``uses_target``

    # The encoder as the kind that a method was written for; preparation refuses a model of the other kind.

    @property
    def clip(self) -> "DualEncoder":
        return cast("DualEncoder", self.encoder)

    @property
    def fused(self) -> "FusedEncoder":
        return cast("FusedEncoder", self.encoder)

    @cached_property
    def text_features(self) -> Tensor:
        """The class texts as unit vectors."""
        return torch.nn.functional.normalize(self.text_embeddings, dim=-1)


class Batch(NamedTuple):
    """One client's batch of at most ``batch_size`` rows; rows beyond the client's are padding with ``mask`` 0."""

    inputs: Tensors
    labels: Tensor
    mask: Tensor
    position: Tensor  # among the client's samples; padding points one past the last
    received: Tensors  # the shared tensors as the server sent them this round
    noise: Tensors = {}
    whole: Tensors = {}  # inputs of all the client's samples, padded with one row or more, if the method sees the whole client


class Update(NamedTuple):
    """What a client sends after its local training."""

    client: int
    tensors: Tensors
    weight: float


class Answer(NamedTuple):
    """What is said of one user's next images."""

    scores: Tensor  # rows x classes, larger is likelier
    session: Tensors  # what is remembered of that user from now on
    entropy: Tensor  # of each row in nats: 0 if it is certain
    example_of: Tensor  # the class that each image is remembered as an example of; -1: none


class Options(BaseModel):
    """Base of a method's own options."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Consultation(Protocol):
    """An exchange with all clients before a round: each reports, the server settles, each adopts what it is told."""

    @property
    def summed(self) -> bool:
        """Whether the server sees only the sum of the reports; if not, each of them."""

    @property
    def shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Of the tensors of a report, for the server's checks."""

    def due(self, round_index: int) -> bool: ...

    def report(self, round_index: int, tensors: Tensors, samples: Samples) -> tuple[Tensors, Tensors]:
        """What a client sends, and the private tensors that it changes; ``tensors`` are the shared ones and its own."""

    def settle(self, round_index: int, total: Tensors, own: Tensors | None) -> Tensors:
        """What the server answers to the sum of all reports; ``own`` is the client's report unless they are summed."""

    def adopt(self, private: Tensors, settlement: Tensors) -> Tensors:
        """The private tensors that a client changes once it has the server's answer."""


class Method:
    """Federated averaging of whatever :meth:`start` returns. Most methods write ``start``, ``predict`` and perhaps ``loss``."""

    options: Options = Options()  # a method annotates it with its own type: ``options: FSTOptions``
    options_type: ClassVar[type[Options]] = Options  # that type; filled in
    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {}}  # settings laid under the user's own

    # --- what it needs and what it can do
    # "features" (unit vectors), "embeddings" (as encoded), "patches" (spatial features as encoded, float16), "pixels" (uint8);
    # for a fused encoder "tokens" (of the text, or of no text), "pixels" and "present" (rows x 2: has text, has image)
    inputs: ClassVar[tuple[str, ...]] = ("features",)
    needs_labels: ClassVar[bool] = True
    takes_candidates: ClassVar[bool] = False  # its loss understands several candidate labels an image (CPL)
    answers_new_classes: ClassVar[bool] = False  # it can be asked about classes that it was not trained on
    uses_target: ClassVar[bool] = False  # clients train with unlabelled images of the user who will ask
    pools_data: ClassVar[bool] = False  # an upper bound that trains on all data in one place
    clusters: bool = False  # it cannot name classes: images are clustered, and true labels name clusters (an oracle)

    # --- what its tensors are
    untrained: ClassVar[tuple[str, ...]] = ()  # patterns of shared names that no gradient moves: "*.running_mean"
    trained_private: ClassVar[tuple[str, ...]] = ()  # private tensors that gradients move
    per_sample: ClassVar[tuple[str, ...]] = ()  # private tensors with one row for each of the client's samples
    private_lasts: bool = True  # whether a client's private tensors outlive the round
    sees_whole_client: ClassVar[bool] = False  # a step needs all the client's inputs (``batch.whole``)
    counts_clients_equally: ClassVar[bool] = False  # in the mean; if not, by the samples that they trained on
    keeps_updates: ClassVar[bool] = (
        False  # the server keeps every client's last update, for ``begin`` and ``client_weights``
    )
    consultation: Consultation | None = None

    def __init_subclass__(cls) -> None:
        cls.options_type = vars(cls).get("__annotations__", {}).get("options", cls.options_type)

    def __init__(self, options: Options, task: Task) -> None:
        self.options, self.task = options, task

    @cached_property
    def scale(self) -> float:
        """What cosines are multiplied by: the option of that name, or else the model's own logit scale."""
        return getattr(self.options, "scale", None) or self.task.clip.logit_scale

    @classmethod
    def forms(cls, options: Any) -> tuple[str, ...]:
        """The forms of images that the method needs with these options (of its ``options_type``)."""
        return cls.inputs

    def notes(self) -> list[str]:
        """Sentences that a report of this method must not lack."""
        return []

    # --- a client

    def start(self, generator: torch.Generator) -> Tensors:
        """The shared tensors before the first round; none if nothing is trained."""
        return {}

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        """The tensors that a client keeps for itself. One named "labels" replaces the labels; -1: not to be trained on."""
        return {}

    def noise(self, generator: torch.Generator) -> Tensors:
        """The random numbers that one step of one client needs."""
        return {}

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        """Of one batch of one client."""
        return label_loss(self.predict(tensors, batch.inputs), batch)

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        """The loss, and those tensors that change other than by gradients: for a method that has such."""
        return self.loss(tensors, batch), {}

    def extras(self, tensors: Tensors, samples: Samples) -> Tensors:
        """What a client sends beside the shared tensors."""
        return {}

    def extra_shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Names and shapes of :meth:`extras`, for the server's checks; None stands for any size."""
        return {}

    # --- the server

    def merge(self, shared: Tensors, updates: Sequence[Update]) -> Tensors:
        """The next shared tensors; ``updates`` are checked and sorted by client."""
        sent = [{name: update.tensors[name] for name in shared} for update in updates]
        return weighted_mean(sent, [update.weight for update in updates])

    def begin(self, shared: Tensors, kept: dict[int, Tensors], client: int) -> Tensors:
        """What one client begins a round with: the shared tensors, or others of their names and shapes made for it."""
        return shared

    # --- a user

    def client_weights(self, kept: dict[int, Tensors]) -> dict[int, float]:
        """How much each client counts in the mean that answers the classes of this task; none: every user gets the same."""
        return {}

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        """Scores (rows x classes), larger is likelier."""
        raise TypeError(f"{type(self).__name__} defines no predict")

    def represent(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        """Vectors (rows x any) that answers are read from: to be clustered, of a method that ``clusters``, or drawn."""
        raise TypeError(f"{type(self).__name__} defines no represent")

    def answer(self, tensors: Tensors, session: Tensors, inputs: Tensors) -> Answer:
        """What is said of the next images of one user; a session begins empty."""
        scores = self.predict(tensors, inputs)
        return Answer(scores, session, entropy(scores), torch.full_like(scores[:, 0], -1, dtype=torch.long))

    # --- not to be overridden

    def trains(self, name: str) -> bool:
        return not any(fnmatch(name, pattern) for pattern in self.untrained)

    def tailor(self, shared: Tensors, kept: dict[int, Tensors]) -> Tensors:
        """The tensors that answer one user's queries, when the method's task is that user's (other class names)."""
        weights = self.client_weights(kept) if kept else {}
        if not weights:
            return shared
        return weighted_mean([{n: kept[c][n] for n in shared} for c in weights], list(weights.values()))


def of_clients(kept: Tensors) -> dict[int, Tensors]:
    """What the server keeps of each client, from CLIENT/NAME."""
    found: dict[int, Tensors] = {}
    for name, tensor in kept.items():
        client, own = name.split("/", 1)
        found.setdefault(int(client), {})[own] = tensor
    return {client: found[client] for client in sorted(found)}
