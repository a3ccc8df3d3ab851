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
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

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


class Method:
    """Base of all methods: federated averaging of whatever :meth:`start` returns."""

    # "features" (unit vectors), "embeddings" (as encoded), "patches" (spatial features as encoded, float16), "pixels" (uint8);
    # for a fused encoder "tokens" (of the text, or of no text), "pixels" and "present" (rows x 2: has text, has image)
    inputs: ClassVar[tuple[str, ...]] = ("features",)
    needs_labels: ClassVar[bool] = True
    takes_candidates: ClassVar[bool] = False  # whether its loss understands several candidate labels an image (CPL)
    answers_new_classes: ClassVar[bool] = False  # whether it can be asked about classes that it was not trained on
    uses_target: ClassVar[bool] = False  # whether clients train with unlabelled images of the user who will ask
    clusters: bool = False  # it cannot name classes: images are clustered, and true labels name clusters (an oracle)
    pools_data: ClassVar[bool] = False  # an upper bound that trains on all data in one place
    sees_whole_client: ClassVar[bool] = False  # whether a step needs all the client's inputs, not only its batch
    per_sample: ClassVar[tuple[str, ...]] = ()  # private tensors with one row for each of the client's samples
    trained_private: ClassVar[tuple[str, ...]] = ()  # private tensors that gradients move
    sums_reports: bool = True  # whether the server sees only the sum of the clients' reports; if not, each of them
    private_lasts: bool = True  # whether a client's private tensors outlive the round
    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {}}  # settings laid under the user's own
    catalogue_options: ClassVar[
        dict[str, str]
    ] = {}  # options that the catalogue sets by dataset, and its field for each
    options_type: ClassVar[type[Options]] = Options

    # For a method whose speed matters more than its brevity: gradients, losses and changed tensors of stacked clients (clients
    # first) in closed form. None: they are derived from the objective, which stays the oracle in the tests.
    gradients: ClassVar[Callable[[Any, Tensors, Batch], tuple[Tensors, Tensor, Tensors]] | None] = None

    def __init__(self, options: Options, task: Task) -> None:
        self.task = task

    @classmethod
    def forms(cls, options: Any) -> tuple[str, ...]:
        """The forms of images that the method needs with these options (of its ``options_type``)."""
        return cls.inputs

    def start(self, generator: torch.Generator) -> Tensors:
        """The shared tensors before the first round; none if nothing is trained."""
        return {}

    def notes(self) -> list[str]:
        """Sentences that a report of this method must not lack."""
        return []

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        """The tensors that a client keeps for itself, made when it first takes part."""
        return {}

    def positions(self, private: Tensors) -> Tensor | None:
        """Which of its samples a client trains on this round; all if None. A client with none sits the round out."""
        return None

    def pseudo_labels(self, private: Tensors) -> Tensor | None:
        """The label of each of a client's samples (-1: none) where the method makes its own, to be told how true they are."""
        return None

    # An exchange with all clients before a round: each reports, the server settles, each adopts.

    def consults(self, round_index: int) -> bool:
        """Whether there is such an exchange before this round (counted from 0)."""
        return False

    def report(self, round_index: int, tensors: Tensors, samples: Samples) -> tuple[Tensors, Tensors]:
        """What a client sends, and the private tensors that it changes; ``tensors`` are the shared ones and its own."""
        return {}, {}

    def report_shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Names and shapes of :meth:`report`, for the server's checks."""
        return {}

    def settle(self, round_index: int, total: Tensors, own: Tensors | None) -> Tensors:
        """What the server answers to the sum of all reports: the same to everyone, or to each if it saw its ``own``."""
        return {}

    def adopt(self, private: Tensors, settlement: Tensors) -> Tensors:
        """The private tensors that a client changes once it has the server's answer."""
        return {}

    def diagnose(self, before: Sequence[Tensors], after: Sequence[Tensors]) -> dict[str, float]:
        """Figures for the record of a round: the tensors of the merged clients before and after their training.

        Private tensors are among them only where clients are simulated in this process.
        """
        return {}

    def noise(self, generator: torch.Generator) -> Tensors:
        """The random numbers that one step of one client needs."""
        return {}

    def trains(self, name: str) -> bool:
        """Whether gradients move this shared tensor; one that they do not move changes by what the objective returns."""
        return True

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        """The loss of one batch, and those tensors that it changed other than by gradients."""
        raise TypeError(f"{type(self).__name__} trains tensors but defines no objective")

    def weight(self, size: int, private: Tensors) -> float:
        """How much the update of a client that trained on ``size`` samples counts in :meth:`merge`."""
        return float(size)

    def extras(self, tensors: Tensors, samples: Samples) -> Tensors:
        """What a client sends beside the shared tensors."""
        return {}

    def extra_shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Names and shapes of :meth:`extras`, for the server's checks; None stands for any size."""
        return {}

    def merge(self, shared: Tensors, updates: Sequence[Update]) -> Tensors:
        """The next shared tensors; ``updates`` are checked and sorted by client."""
        sent = [{name: update.tensors[name] for name in shared} for update in updates]
        return weighted_mean(sent, [update.weight for update in updates])

    def remember(self, kept: Tensors, updates: Sequence[Update]) -> Tensors:
        """What the server keeps of the updates for itself, to answer queries with; clients get what :meth:`send` makes of it."""
        return {}

    def send(self, shared: Tensors, kept: Tensors, client: int) -> Tensors:
        """What one client begins a round with: the shared tensors, or others of their names and shapes made for it."""
        return shared

    def client_weights(self, kept: Tensors) -> dict[int, float]:
        """How much each client counts in what answers the classes of this task; none if every user gets the same."""
        return {}

    def tailor(self, shared: Tensors, kept: Tensors) -> Tensors:
        """The tensors that answer one user's queries, when the method's task is that user's (other class names)."""
        return shared

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


def entropy(logits: Tensor) -> Tensor:
    """Of the softmax of each row, in nats."""
    log_likelihood = torch.log_softmax(logits, dim=-1)
    return -(log_likelihood.exp() * log_likelihood).sum(-1)  # p log p by itself is NaN where p underflows


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over real rows; 0 for a batch of nothing but padding."""
    return (values * mask).sum() / mask.sum().clamp(min=1)
