"""What the files of a run may hold, checked when one is read.

A run folder may come from somebody else. Commands use what the files hold without further checks,
so everything that they use has its type, its bounds and its length here.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedvl.config import MAX_CLIENTS, MAX_ROUNDS
from fedvl.federation.records import Budget, Client, Round
from fedvl.files import Bounds, Content, Count, Finite, Hash, Names, Number, Scalar, same_lengths, square

Right = Annotated[str, Field(pattern="^[01-]*$")]  # a letter for each test image
Path_ = Annotated[str, Field(pattern=r"^[^\x00]+$")]
Setting = Scalar | list[Scalar | list[Scalar]]


class Embedding(Content):
    x: list[Finite] = []
    y: list[Finite] = []
    label: list[Annotated[int, Field(ge=0)]] = []
    present: list[Literal["both", "text", "image"]] | None = None

    @model_validator(mode="after")
    def lengths_agree(self) -> Self:
        same_lengths(x=self.x, y=self.y, label=self.label, present=self.present)
        return self


class Condition(Content):
    condition: str
    accuracy: Number | None
    macro_f1: Number | None = None
    macro_f1_interval: Bounds | None = None


class SetFigure(Content):
    """A figure of the base-to-new protocol: of a candidate set, or a mean of several."""

    name: Literal["own", "local", "base", "new", "hm3", "hm2", "cm"]
    accuracy: Finite
    interval: Bounds
    zero_shot_accuracy: Finite | None = None
    zero_shot_interval: Bounds | None = None


class SetsRight(Content):
    """Who was right image by image in the base-to-new protocol; shares of models in thousandths."""

    owner: list[Annotated[int, Field(ge=-1, lt=MAX_CLIENTS)]]
    own: Right
    local: Right
    base: list[Annotated[int, Field(ge=0, le=1000)]]
    new: list[Annotated[int, Field(ge=0, le=1000)]]

    @model_validator(mode="after")
    def lengths_agree(self) -> Self:
        same_lengths(owner=self.owner, own=list(self.own), local=list(self.local), base=self.base)
        return self


class OfDataset(Content):
    """What is said of one of several datasets: the classes among which its images are asked."""

    dataset: str
    class_names: Names
    test_images: Count
    accuracy: Finite | None = None
    zero_shot_accuracy: Finite | None = None


class TailGroup(Content):
    """Classes of a long tail with about as many training images."""

    name: Literal["many", "medium", "few"]
    classes: list[Count]
    training_images: Count
    test_images: Count
    accuracy: Finite | None = None
    zero_shot_accuracy: Finite | None = None


class LongTail(Content):
    by: str
    groups: Annotated[list[TailGroup], Field(max_length=3)]


class Skipped(Content):
    image: str
    reason: str
    split: str | None = None


class Seconds(Content):
    encode: Number | None = None
    train: Number | None = None
    evaluate: Number | None = None


class PartyBytes(Content):
    """A party of a run between machines, and the bytes of its messages."""

    name: str
    bytes_up: Count
    bytes_down: Count


class Answer(Content):
    """When a client's answer came in a round of a run between machines."""

    round: Round
    client: Client
    time: str


class Result(Content):
    """result.json; older runs may lack any key but the method."""

    method: str
    preset: str | None = None
    dataset: str | None = None
    model: str | None = None
    partition: str | None = None
    protocol: str | None = None
    clients: Count | None = None
    rounds: Annotated[int, Field(ge=0, le=MAX_ROUNDS)] | None = None
    seed: Count | None = None
    accuracy: Number | None = None
    zero_shot_accuracy: Number | None = None
    per_round: list[Number | None] | None = None
    per_round_loss: list[Number | None] | None = None
    per_round_validation: list[Number | None] | None = None
    per_round_pseudo_label_accuracy: list[Number | None] | None = None
    validation_accuracy: Number | None = None
    untrained_validation_accuracy: Number | None = None
    validation_images: Count | None = None
    best_round: Round | None = None
    per_client_accuracy: list[Number | None] | None = None
    zero_shot_per_client_accuracy: list[Number | None] | None = None
    per_client_mix_accuracy: list[Number | None] | None = None  # expected, not tested
    zero_shot_per_client_mix_accuracy: list[Number | None] | None = None
    worst_client_accuracy: Number | None = None
    worst_tenth_accuracy: Number | None = None
    client_deviation: Number | None = None
    newcomers_accuracy: Number | None = None
    newcomers_per_client_accuracy: list[Number | None] | None = None
    newcomers_trained_accuracy: Number | None = None
    newcomers_trained_per_client_accuracy: list[Number | None] | None = None
    newcomers_zero_shot_accuracy: Number | None = None
    newcomers_zero_shot_per_client_accuracy: list[Number | None] | None = None
    ece: Number | None = None
    ece_interval: Bounds | None = None
    zero_shot_ece: Number | None = None
    zero_shot_ece_interval: Bounds | None = None
    round_to_target: Round | None = None
    bytes_to_target: Count | None = None
    flops_to_target: Count | None = None
    seconds_to_target: Number | None = None
    memory_bytes_to_target: Count | None = None
    gpu_memory_bytes_to_target: Count | None = None
    peak_memory_bytes: Count | None = None
    peak_gpu_memory_bytes: Count | None = None
    trainable_parameters: Count | None = None
    private_parameters: Count | None = None
    bytes_up_per_client_round: Count | None = None
    bytes_down_per_client_round: Count | None = None
    local_flops: Count | None = None
    chunk: Count | None = None
    seconds: Seconds | None = None
    seconds_per_image: Number | None = None
    class_names: Names | None = None
    templates: Annotated[list[str], Field(max_length=1000)] | None = None
    model_fingerprint: str | None = None
    confusion: list[list[Count]] | None = None
    per_class_recall: list[Number | None] | None = None
    zero_shot_per_class_recall: list[Number | None] | None = None
    test_sha256: str | None = None
    right: Right | None = None
    temperature: Annotated[float, Field(gt=0, le=1e6)] | None = None
    zero_shot_right: Right | None = None
    per_client_test_images: list[Count] | None = None
    conditions: list[Condition] | None = None
    candidate_sets: dict[Literal["own", "base", "new"], list[Names]] | None = None
    base_to_new: Annotated[list[SetFigure], Field(max_length=7)] | None = None
    base_to_new_right: SetsRight | None = None
    datasets: Annotated[list[OfDataset], Field(max_length=1000)] | None = None
    class_lists: Annotated[list[Names], Field(max_length=MAX_CLIENTS)] | None = (
        None  # of clients, where each has its own
    )
    long_tail: LongTail | None = None
    embedding: Embedding | None = None
    partition_counts: list[list[Count]] | None = None
    partition_class_names: Names | None = None
    partition_note: str | None = None
    skipped_images: list[Skipped] | None = None
    notes: list[str] | None = None
    privacy: Budget | None = None
    backdoor_success: Number | None = None
    backdoor_images: Count | None = None  # of other classes than the target
    config: dict[str, Setting | dict[str, Setting]] | None = None
    command: str | None = None
    party: str | None = None  # of whom this is the own model
    parties: Annotated[list[PartyBytes], Field(max_length=MAX_CLIENTS)] | None = None
    answers: list[Answer] | None = None
    files_sha256: dict[Literal["model.safetensors", "kept.safetensors"], Hash] | None = None

    @model_validator(mode="after")
    def lengths_agree(self) -> Self:
        names = self.class_names or None
        same_lengths(
            class_names=names, confusion=self.confusion or None, per_class_recall=self.per_class_recall or None
        )
        square(self.confusion, len(self.confusion or ()), "confusion")
        held = self.partition_class_names or names
        if self.partition_counts:
            square(self.partition_counts, len(held or self.partition_counts[0]), "partition_counts")
        return self


class Status(Content):
    """status.json of a run between machines."""

    parties: Names = []
    connected: list[Client] = []
    waiting_for: list[Client] = []
    last_seen: dict[str, Finite] = {}
    certificate_days: int | None = None
    test_images: Count | None = None  # of the server
    round: Count | None = None
    phase: str | None = None


class Federation(Content):
    """federation.json: where the federation's folder is, and the name of the run."""

    federation: Path_
    run: str
    told: list[Client] = []  # that the run is over


class Measured(Content):
    """One of two runs that a withdrawal compares."""

    folder: Path_
    state_sha256: Hash | None
    accuracy: Finite
    interval: Bounds | None = None


class Joint(Content):
    """What two runs spend together of each unit that is in both."""

    of: str
    epsilon: Annotated[float, Field(ge=0)]
    delta: Annotated[float, Field(gt=0)]


class Withdrawal(Content):
    """A client that withdrew from a run, the run without it, and how far the two differ."""

    client: Client
    party: str | None
    run: Measured
    without: Measured
    images: Count  # of the test
    difference: Finite
    difference_interval: Bounds
    changed: Finite
    changed_interval: Bounds
    distance: Finite
    moved: Finite | None
    same_draws: bool
    privacy: Joint | None = None


class Withdrawals(Content):
    """withdrawals.json, the same record in the folders of both runs."""

    withdrawals: list[Withdrawal]


class Example(Content):
    true: str = ""
    zero_shot: str = ""
    answer: str = ""
    image: str = ""


class Examples(Content):
    gained: list[Example] = []
    lost: list[Example] = []


class ContributionsFile(Content):
    """contributions.json: shares of an accuracy, in the order of the clients."""

    players: list[Client]
    total: Finite
    empty: Finite
    leave_one_out: list[Finite]
    shapley: list[Finite]
    intervals: list[Bounds]  # none where the values are exact
    orders: Count
    valued: Count

    @model_validator(mode="after")
    def lengths_agree(self) -> Self:
        lengths = {len(self.players), len(self.leave_one_out), len(self.shapley), len(self.intervals or self.players)}
        if len(lengths) != 1:
            raise ValueError("each client needs one value of each kind")
        return self
