"""What is recorded of a round: its line in metrics.jsonl and its manifest in the journal."""

from typing import Annotated, Literal

from pydantic import Field

from fedvl.config import MAX_CLIENTS, MAX_ROUNDS
from fedvl.files import Content, Count, Hash, Number

RoundNumber = Annotated[int, Field(ge=1, le=MAX_ROUNDS)]
Unit = Literal["client", "record"]  # that differential privacy protects
ClientIndex = Annotated[int, Field(ge=0, lt=MAX_CLIENTS)]


class Refused(Content):
    client: ClientIndex
    """Number of the client."""
    reason: str
    """Why its update was refused."""


class Beside(Content):
    """Something that a private run releases beside its noisy sums, or withholds."""

    name: str
    """What is released or withheld."""
    keys: Annotated[list[str], Field(max_length=100)]
    """Patterns of its keys."""
    state: Literal["covered", "withheld", "not covered"]
    """Whether the budget covers it."""
    why: str
    """The reason."""


class UnitColumn(Content):
    """A column that says whose an image is, and the most images that one has at a client."""

    column: str
    """Column of the manifest."""
    largest: Count
    """Most images of one value at a client."""


class Budget(Content):
    """What a run has spent of its privacy budget."""

    unit: Unit
    """What is protected: each client or each record."""
    epsilon: Annotated[float, Field(ge=0)]
    """Epsilon spent."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """Delta."""
    sampling: str
    """How clients or records were sampled."""
    of: str | None = None
    """Unit in words: client, image, or a column that says whose images are."""
    simulated: bool | None = None
    """Whether the noise follows from the seed, which is published; older runs do not say."""
    group: UnitColumn | None = None
    """Images of one person, if the unit is the image."""
    released: Annotated[list[Beside], Field(max_length=100)] = []
    """What leaves beside the noisy sums, or is withheld."""
    sums: Annotated[list[str], Field(max_length=100)] = []
    """Sums of a training-free method that were released with noise."""
    rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sampling rate of a round."""
    sigma: Annotated[float, Field(ge=0)] | None = None
    """Noise multiplier of a round."""
    counts: Annotated[float, Field(ge=0)] | None = None
    """Noise multiplier of clients' reports before a round."""
    planned: RoundNumber | None = None
    """Rounds for which the noise was chosen."""
    round: RoundNumber | None = None
    """Round of an entry of a client's ledger, where `of` is the kind of message."""

    @property
    def step(self) -> tuple[float, float]:
        """Sampling rate and noise multiplier, which an entry of a ledger has."""
        assert self.rate is not None
        assert self.sigma is not None
        return self.rate, self.sigma


class RoundFigures(Content):
    """Some keys of the record of a round, in the order in which they are written."""

    round: RoundNumber | None = None
    """Number of the round, from 1."""
    cohort: list[ClientIndex] = []
    """Clients that were asked."""
    dropped: list[ClientIndex] = []
    """Clients of these that did not answer."""
    refused: list[Refused] = []
    """Updates that were refused, and why."""
    loss: Number | None = None
    """Mean training loss; null under differential privacy."""
    bytes_up: Count = 0
    """Bytes from clients to the server."""
    bytes_down: Count = 0
    """Bytes from the server to clients."""
    seconds: Number = 0.0
    """Seconds of the round, without evaluation."""
    usual_move: Number | None = None
    """Median length of the clients' updates, with which later ones are compared."""
    declared: dict[str, Count] = {}
    """Examples that clients declared when they first counted."""
    clip: Number | None = None
    """Norm to which updates were clipped."""
    void: str = ""
    """Why a round has no update though its clients were asked."""
    privacy: Budget | None = None
    """Privacy budget that was spent up to this round."""
    accuracy: Number | None = None
    """Accuracy on the test images, in percent."""
    validation: Number | None = None
    """Accuracy on the validation images, in percent."""
    pseudo_labels_used: Count | None = None
    """Number of training images with a pseudo-label."""
    pseudo_label_accuracy: Number | None = None
    """Pseudo-labels that are true, in percent; null if unknown."""


class Record(RoundFigures):
    """A line of metrics.jsonl, and the record of a round in the journal."""

    round: RoundNumber
    """Number of the round, from 1."""


class Manifest(Content):
    """The manifest of a round in the journal, without its own hash."""

    format: int | None = None
    experiment: str = ""
    round: RoundNumber | None = None
    tensors_sha256: Hash
    fedvl_version: str = ""
    earlier: list[RoundNumber] = []
    record: Record
