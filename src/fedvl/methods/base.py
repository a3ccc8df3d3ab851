"""The contract of a method: pure functions on named tensors, independent of where they run.

A method is one file in this folder with one subclass of :class:`Method`. It is written for ONE
client and ONE batch, as its paper is; the engine trains all clients of a round in one kernel
(``torch.func.vmap``). So never write in place, never branch on a tensor's value, and take random
numbers from :meth:`Method.noise`.

The smallest method is ``start`` and ``predict``, trained with cross-entropy and averaged. The rest
has defaults: twelve declarations and nineteen hooks, all in :class:`Method`.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, cast, final

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fedvl.config import Settings, TrainingConfig
from fedvl.errors import FedVLError
from fedvl.methods.parts.losses import entropy, label_loss
from fedvl.methods.roles import Role, Roles, Shapes
from fedvl.seeding import Draw, torch_generator
from fedvl.tensors import Tensors, weighted_mean

if TYPE_CHECKING:
    from fedvl.data.imported import ImportedEncoder
    from fedvl.methods.parts.heads import Head
    from fedvl.models.clip import DualEncoder
    from fedvl.models.vilt import FusedEncoder


@dataclass(frozen=True)
class Samples:
    """Rows of data: the encoded inputs of each image, and its label (-1: unlabelled)."""

    inputs: Tensors
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> "Samples":
        return Samples({name: tensor[rows] for name, tensor in self.inputs.items()}, self.labels[rows])


def nothing_held_out() -> Samples:
    raise FedVLError(
        "Images that no client holds are known only where all data are on one machine; "
        "name a folder of images as method.synthetic."
    )


def no_public_images() -> Tensor:
    raise FedVLError("Public images are known only at the server of a run.")


class SumNoise(NamedTuple):
    """Noise on sums of statistics, as far as every party knows it before the first exchange."""

    multiplier: float  # its deviation on a sum over all clients, in units of the sensitivity
    images: int  # public number of all clients' images, about
    clip: float | None = None  # norm to which each client's statistics are clipped; it is then the sensitivity

    def deviation(self, norms: Iterable[float]) -> float:
        """Return the deviation on a sum to which a sample adds statistics of these norms."""
        return self.multiplier * (self.clip or math.hypot(*norms))


@dataclass(frozen=True)
class Task:
    """What every party knows before the first round."""

    class_names: tuple[str, ...]
    # classes x d, from the text tower (mean of unit vectors for several templates); d is 0 for a fused encoder
    text_embeddings: Tensor
    encoder: "DualEncoder | FusedEncoder | ImportedEncoder"
    clients: int
    seed: int = 0  # for draws that must be the same for all parties
    stage: Callable[[str], Callable[[int, int], None]] = lambda name: lambda done, total: None  # shows progress
    protocol: str = "closed"  # "open": a user queries classes that nobody trains on
    target: Tensors | None = None  # that user's own images, unlabelled; only for a method that ``uses_target``
    templates: tuple[str, ...] = ("a photo of a {}",)  # of the texts that the embeddings are of
    held_out: Callable[[], Samples] = nothing_held_out  # training images that no client holds, in a simulation
    origins: tuple[
        str, ...
    ] = ()  # the dataset of each class, where there are several: one's image is asked among its own
    training: TrainingConfig = field(
        default_factory=TrainingConfig
    )  # learning rate, epochs, optimiser ..., which are read only
    noise: SumNoise | None = None  # on the sums of statistics, under --privacy
    public: Callable[[], Tensor] = no_public_images  # features of images of other classes, for the server
    head: "Callable[[], Head] | None" = None  # class weights of a finished run, to start from

    # The encoder as the kind that a method was written for; preparation refuses a model of the other kind.

    @property
    def clip(self) -> "DualEncoder":
        return cast("DualEncoder", self.encoder)

    @property
    def fused(self) -> "FusedEncoder":
        return cast("FusedEncoder", self.encoder)

    @cached_property
    def has_texts(self) -> bool:
        """Whether class texts are known: not of a fused encoder, nor of some imported vectors."""
        return bool(self.text_embeddings.any())

    @cached_property
    def text_features(self) -> Tensor:
        """The class texts as unit vectors."""
        if self.text_embeddings.numel() and not self.has_texts:
            raise FedVLError(
                f"No texts of class names were imported with '{self.encoder.name}'; import them too, or use linear, fedprox, "
                "fedntd or centralised with --set method.initial=zeros."
            )
        return torch.nn.functional.normalize(self.text_embeddings, dim=-1)


class Batch(NamedTuple):
    """One client's batch; rows beyond the client's samples are padding with ``mask`` 0."""

    inputs: Tensors
    labels: Tensor
    mask: Tensor
    position: Tensor  # among the client's samples; padding points one past the last
    received: Tensors  # what the server handed out this round
    noise: Tensors = {}
    whole: Tensors = {}  # inputs of all the client's samples, padded by at least one row, if ``scope`` is "client"


class Update(NamedTuple):
    """What a client sends after its local training."""

    client: int
    tensors: Tensors
    weight: float


class Mean(dict[str, Tensor]):
    """The mean of clients' updates, by tensor, and of which share of all clients it is."""

    def __init__(self, tensors: Tensors, share: float = 1.0) -> None:
        super().__init__(tensors)
        self.share = share


class Answer(NamedTuple):
    """The predictions for one user's next images."""

    scores: Tensor  # rows x classes, larger is likelier
    session: Tensors  # what is remembered of that user from now on
    entropy: Tensor  # of each row in nats: 0 if it is certain
    example_of: Tensor  # the class that each image is remembered as an example of; -1: none


class Options(BaseModel):
    """Base of a method's own options; the docstring below an option is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Consultation(Protocol):
    """Exchange with all clients before a round: each reports, the server settles, each adopts."""

    @property
    def summed(self) -> bool:
        """Whether the server needs only the sum of the reports; if not, it needs each."""

    @property
    def sensitivity(self) -> int | None:
        """Norm that reports, then of whole numbers, never exceed; None: noise cannot cover them."""

    @property
    def report_shapes(self) -> Shapes:
        """Shapes of the tensors of a report."""

    @property
    def settlement_shapes(self) -> Shapes:
        """Shapes of the tensors of the server's answer."""

    def due(self, round_index: int) -> bool: ...

    def report(self, round_index: int, tensors: Tensors, samples: Samples) -> tuple[Tensors, Tensors]:
        """Return what a client sends and the private tensors it changes, given all its tensors."""

    def settle(self, round_index: int, total: Tensors, own: Tensors | None) -> Tensors:
        """Answer the sum of all reports; ``own`` is the client's report unless they are summed."""

    def adopt(self, private: Tensors, settlement: Tensors) -> Tensors:
        """Return the private tensors that the server's answer changes."""


# Gradients, losses and changed tensors of stacked clients (clients first), for the very class that wrote the loss:
# a subclass, whose loss may differ, has none unless it says ``same_loss_as``
ClosedForm = Callable[[Any, Tensors, Batch], tuple[Tensors, Tensor, Tensors]]
LOSS_HOOKS = ("predict", "loss", "objective")
CLOSED_FORMS: "dict[type[Method], tuple[ClosedForm, tuple[Callable[..., Any], ...]]]" = {}  # with these hooks
HOOKS: dict[str, Callable[..., Any]] = {}  # those of Method, by name
Form = TypeVar("Form", bound=ClosedForm)
CHOICES = {
    "labels": ("one", "candidates", "none"),
    "vocabulary": ("trained", "any", "clusters"),
    "scope": ("row", "batch", "client", "pooled"),
    "weighting": ("samples", "clients"),
}


class Method:
    """Federated averaging of whatever :meth:`start` returns."""

    # --- declarations

    options: Options = Options()  # annotate it with the method's own type: ``options: FSTOptions``
    presets: ClassVar[dict[str, Settings]] = {"paper": {}}  # settings laid under the user's own
    # "features" (unit vectors), "embeddings" (as encoded), "patches" (spatial features, float16), "pixels" (uint8);
    # for a fused encoder "tokens" (of the text), "pixels" and "present" (rows x 2: has text, has image)
    inputs: ClassVar[tuple[str, ...]] = ("features",)
    # what it trains on: one label per image, one or several candidates (CPL), or no labels from outside
    labels: ClassVar[str] = "one"
    # which classes it can be queried about: those it was trained on, any by name, or new ones by clustering only
    # (true labels then name the clusters: an oracle)
    vocabulary: ClassVar[str] = "trained"
    uses_target: ClassVar[bool] = False  # clients train with unlabelled images of the user who will query
    # what the loss of one row depends on: that row, its batch, the whole client (``batch.whole``), or the data of
    # all clients pooled in one place, which is not federated
    scope: ClassVar[str] = "batch"
    weighting: str = "samples"  # of clients in the mean: by size, or equally
    through_encoder: ClassVar[bool] = False  # whether a step runs through the encoder: bfloat16 then pays on a GPU
    requires: ClassVar[Mapping[str, str | float]] = {}  # values of settings of [training] that it is derived for
    starts_from_head: ClassVar[bool] = (
        False  # whether training can start from the class weights of a run (``task.head``)
    )
    # how many exchanges of sums a training-free method needs, each with every client; None: as many as there are rounds
    exchanges: ClassVar[int | None] = None

    # --- hooks that describe it

    @classmethod
    def forms(cls, options: Any) -> tuple[str, ...]:
        """Return the ``inputs`` that are needed with these options."""
        return cls.inputs

    def roles(self) -> Mapping[str, Role]:
        """Describe tensors that are not trained shared ones, by name or pattern (``roles.py``)."""
        return {}

    def consultation(self) -> Consultation | None:
        """Return the exchange that is due before some rounds, if any."""
        return None

    def notes(self) -> list[str]:
        """Return caveats that are printed in the report."""
        return []

    # --- hooks of a client

    def start(self, generator: torch.Generator) -> Tensors:
        """Return the shared tensors before the first round; none if nothing is trained."""
        return {}

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        """Return the client's private tensors; "labels" replaces its labels (-1: not trained)."""
        return {}

    def noise(self) -> Mapping[str, Draw]:
        """Return which random numbers one step of one client needs (``seeding.py``)."""
        return {}

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        """Return the loss of one batch of one client."""
        return label_loss(self.predict(tensors, batch.inputs), batch)

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        """Return the loss, and tensors that change other than by gradients."""
        return self.loss(tensors, batch), {}

    def correct(self, gradients: Tensors, tensors: Tensors, received: Tensors) -> Tensors:
        """Return the gradients that the optimiser takes, given those of the loss, by tensor."""
        return gradients

    def statistics(self, shared: Tensors, samples: Samples) -> Tensors:
        """Return what a training-free method sends: sums over samples, in float64.

        Two clients' statistics add up to those of their samples together.
        """
        return {}

    # --- hooks of the server

    def solve(self, shared: Tensors, sums: Tensors) -> Tensors:
        """Return the next shared tensors, given the sums of all clients' statistics."""
        return shared

    def merge(self, shared: Tensors, updates: Sequence[Update]) -> Tensors:
        """Merge the shared tensors that the server needs of each client; updates by client."""
        sent = [{name: update.tensors[name] for name in shared} for update in updates]
        return weighted_mean(sent, [update.weight for update in updates])

    def step(self, shared: Tensors, mean: Mean) -> Tensors:
        """Return the next tensors of ``start``, given the present ones and the mean of the updates.

        What it does not return stays as it is.
        """
        return mean

    def hand_out(self, shared: Tensors, last: dict[int, Tensors], client: int) -> Tensors:
        """Return what one client begins a round with, given every client's ``last`` update."""
        return shared

    # --- hooks of a query

    def client_weights(self, last: dict[int, Tensors]) -> dict[int, float]:
        """Weight the clients' ``last`` updates for this task; none: use the shared tensors."""
        return {}

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        """Return scores (rows x classes), larger is likelier."""
        raise TypeError(f"{type(self).__name__} defines no predict")

    def represent(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        """Return vectors (rows x any) that predictions are read from, to be clustered or drawn."""
        raise TypeError(f"{type(self).__name__} defines no represent")

    def answer(self, tensors: Tensors, session: Tensors, inputs: Tensors) -> Answer:
        """Predict one user's next images; a session begins empty."""
        scores = self.predict(tensors, inputs)
        return Answer(scores, session, entropy(scores), torch.full_like(scores[:, 0], -1, dtype=torch.long))

    # --- what follows from these

    options_type: ClassVar[type[Options]] = Options  # the annotated type of ``options``

    def __init_subclass__(cls, same_loss_as: "type[Method] | None" = None) -> None:
        cls.options_type = inspect.get_annotations(cls, eval_str=True).get("options", cls.options_type)
        for name, choices in CHOICES.items():
            if (value := getattr(cls, name)) not in choices:
                raise TypeError(f"{cls.__name__}.{name} is {value!r}; it must be one of {', '.join(choices)}")
        if len(inspect.signature(cls.noise).parameters) > 1:
            raise TypeError(
                f"{cls.__name__}.noise draws nothing itself: it takes no generator and returns which numbers a step "
                'needs, such as {"z": Normal((50, 512))} of fedvl.seeding'
            )
        for name, hook in HOOKS.items():
            check_arguments(cls, name, hook)
        if same_loss_as is not None and same_loss_as in CLOSED_FORMS:
            if loss_hooks(cls) != CLOSED_FORMS[same_loss_as][1]:
                raise TypeError(
                    f"{cls.__name__} has its own {' or '.join(LOSS_HOOKS)}; leave out same_loss_as={same_loss_as.__name__}"
                )
            CLOSED_FORMS[cls] = CLOSED_FORMS[same_loss_as]

    def __init__(self, options: Options, task: Task) -> None:
        self.options, self.task = options, task

    @final
    @cached_property
    def scale(self) -> float:
        """The factor on cosines: the option of that name, or the model's own logit scale."""
        return getattr(self.options, "scale", None) or self.task.clip.logit_scale

    @final
    @cached_property
    def role(self) -> Roles:
        """The roles, ready to be looked up."""
        declared = self.roles()
        for name, role in declared.items():
            if not isinstance(role, Role):
                raise FedVLError(
                    f"{type(self).__name__}.roles says {role!r} of {name!r}; say Shared(...), Private(...) or another "
                    "role of docs/contract.md."
                )
            for field_name in ("begin", "end", "make"):
                check_maker(f"{field_name} of {name!r} in {type(self).__name__}", getattr(role, field_name, None))
        return Roles(declared)

    @final
    def first_shared(self, seed: int) -> Tensors:
        """Return what the server hands out in the first round, unless ``hand_out`` says more."""
        return self.role.split(self.start(torch_generator(seed, "start")))[0]

    @final
    def first_private(self, samples: Samples, generator: torch.Generator) -> Tensors:
        """Return the private tensors that a client of these samples begins with."""
        made = {name: first(samples) for name, first in self.role.firsts.items()}
        return {**made, **self.join(samples, generator)}

    @final
    @property
    def clusters(self) -> bool:
        """Whether queries are answered by clustering."""
        return self.vocabulary == "clusters" and self.task.protocol == "open"

    @final
    def tailor(self, shared: Tensors, last: dict[int, Tensors]) -> Tensors:
        """Return the tensors that answer queries about this task's classes."""
        weights = self.client_weights(last) if last else {}
        if not weights:
            return shared
        return weighted_mean([{name: last[c][name] for name in shared} for c in weights], list(weights.values()))


HOOKS.update(
    (name, hook)
    for name, hook in vars(Method).items()
    if inspect.isfunction(hook) and not name.startswith("_") and not hasattr(hook, "__final__")
)


def check_arguments(method: type[Method], name: str, hook: Callable[..., Any]) -> None:
    """Refuse a method whose own hook cannot be called as the contract says."""
    wanted, own = inspect.signature(hook), vars(method).get(name)
    if not inspect.isfunction(own):
        return
    try:
        inspect.signature(own).bind(*wanted.parameters)
    except TypeError:
        expected = f"{name}({', '.join(wanted.parameters)})"
        raise TypeError(f"{method.__name__}.{name} must take the arguments of {expected}") from None


def check_maker(what: str, make: Callable[..., Any] | None) -> None:
    """Refuse a function of a role that cannot be called as the contract says."""
    if make is None:
        return
    try:
        inspect.signature(make).bind("name", {}, {}, None)
    except TypeError:
        raise FedVLError(f"The {what} must take the arguments (name, tensors, received, samples).") from None


def closed_form(method: type[Method]) -> Callable[[Form], Form]:
    """Register gradients in closed form for exactly this method."""

    def register(form: Form) -> Form:
        CLOSED_FORMS[method] = form, loss_hooks(method)
        return form

    return register


def loss_hooks(method: type[Method]) -> tuple[Callable[..., Any], ...]:
    return tuple(getattr(method, name) for name in LOSS_HOOKS)


def closed_form_of(method: Method) -> ClosedForm | None:
    """Return the method's closed form, if its loss is still the one that the form was written for.

    A hook may have been replaced since, on the object, its class or a base of it.
    """
    form, hooks = CLOSED_FORMS.get(type(method), (None, ()))
    return None if vars(method).keys() & set(LOSS_HOOKS) or loss_hooks(type(method)) != hooks else form


def overrides(method: Method, hook: str) -> bool:
    """Return whether a method has a hook of its own, in its class or on the object."""
    return hook in vars(method) or getattr(type(method), hook) is not getattr(Method, hook)
