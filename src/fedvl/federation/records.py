"""What is recorded of a round: its line in metrics.jsonl and its manifest in the journal."""

from typing import Annotated, Literal

from pydantic import Field

from fedvl.config import MAX_CLIENTS, MAX_ROUNDS
from fedvl.files import Content, Count, Hash, Number

Round = Annotated[int, Field(ge=1, le=MAX_ROUNDS)]
Client = Annotated[int, Field(ge=0, lt=MAX_CLIENTS)]


class Refused(Content):
    client: Client
    reason: str


class Beside(Content):
    """Something that a private run releases beside its noisy sums, or withholds."""

    name: str
    keys: Annotated[list[str], Field(max_length=100)]  # patterns of its fields
    state: Literal["covered", "withheld", "not covered"]
    why: str


class Group(Content):
    """A column that says whose an image is, and the most images that one has at a client."""

    column: str
    largest: Count


class Budget(Content):
    """What a run has spent of its privacy budget."""

    unit: Literal["client", "record"]
    epsilon: Annotated[float, Field(ge=0)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    sampling: str
    of: str | None = None  # client, image, or a column that says whose images are
    group: Group | None = None
    simulated: bool = False  # whether its noise follows from the seed, which is published
    released: Annotated[list[Beside], Field(max_length=100)] = []
    sums: Annotated[list[str], Field(max_length=100)] = []  # of a training-free method, to which noise was added
    # of a round, to go on counting
    rate: Annotated[float, Field(gt=0, le=1)] | None = None
    sigma: Annotated[float, Field(ge=0)] | None = None
    counts: Annotated[float, Field(ge=0)] | None = None  # noise multiplier of clients' reports before the round
    planned: Round | None = None


class Record(Content):
    """A line of metrics.jsonl, and the record of a round in the journal."""

    round: Round
    accuracy: Number | None = None
    validation: Number | None = None
    loss: Number | None = None
    cohort: list[Client] = []
    dropped: list[Client] = []
    refused: list[Refused] = []
    void: str = ""  # why a round has no update though its clients were asked
    bytes_up: Count = 0
    bytes_down: Count = 0
    seconds: Number = 0.0
    privacy: Budget | None = None


class Manifest(Content):
    """The manifest of a round in the journal, without its own hash."""

    tensors_sha256: Hash
    earlier: list[Annotated[int, Field(ge=1, le=MAX_ROUNDS)]] = []
    record: Record
