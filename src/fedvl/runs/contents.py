"""What the files of a run may hold, checked when one is read.

A run folder may come from somebody else. Commands use what the files hold without further checks,
so everything that they use has its type, its bounds and its length here.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fedvl.config import MAX_CLIENTS, MAX_ROUNDS
from fedvl.evaluation.contents import Condition, LongTail, Right, SetFigure, SetsRight, ShareBin, SureAnswers
from fedvl.federation.records import Budget, ClientIndex, RoundNumber
from fedvl.files import Bounds, Content, Count, Finite, Hash, Names, Number, Scalar, same_lengths, square

Path_ = Annotated[str, Field(pattern=r"^[^\x00]+$")]
TensorFile = Literal["model.safetensors", "kept.safetensors"]
Setting = Scalar | list[Scalar | list[Scalar]]


class Embedding(Content):
    """A t-SNE map of test samples: of each, its place, class and modalities."""

    x: list[Finite] = []
    """Horizontal position."""
    y: list[Finite] = []
    """Vertical position."""
    label: list[Annotated[int, Field(ge=0)]] = []
    """Number of the class."""
    present: list[Literal["both", "text", "image"]] | None = None
    """Modalities of the sample."""

    @model_validator(mode="after")
    def lengths_agree(self) -> Self:
        same_lengths(x=self.x, y=self.y, label=self.label, present=self.present)
        return self


class OfDataset(Content):
    """One of several datasets: the classes among which its images are asked, and percentages."""

    dataset: str
    """Name or path of the dataset."""
    class_names: Names
    """Names of its classes."""
    test_images: Count
    """Number of its test images."""
    accuracy: Finite | None = None
    """Accuracy on them, in percent."""
    zero_shot_accuracy: Finite | None = None
    """Accuracy of the pretrained model on them, in percent."""


class Skipped(Content):
    """An image that could not be used, and why."""

    image: str
    """Name of the image."""
    reason: str
    """Why it was skipped."""
    split: str | None = None
    """Its split."""


class Seconds(Content):
    """Seconds of the parts of a run."""

    encode: Number | None = None
    """Seconds of encoding images."""
    train: Number | None = None
    """Seconds of training."""
    evaluate: Number | None = None
    """Seconds of evaluation."""


class PartyBytes(Content):
    """A party of a run between machines, and the bytes of its messages."""

    name: str
    """Name of the party."""
    bytes_up: Count
    """Bytes from it to the server."""
    bytes_down: Count
    """Bytes from the server to it."""
    revoked: str | None = None
    """Time at which its key was revoked (UTC), if that was not undone."""

    @property
    def took_part(self) -> bool:
        """Whether it has sent anything, or is still admitted."""
        return self.bytes_up > 0 or self.revoked is None


class Answer(Content):
    """When a client's answer came in a round of a run between machines (UTC)."""

    round: RoundNumber
    """Number of the round."""
    client: ClientIndex
    """Number of the client."""
    time: str
    """Time of its answer (UTC)."""


class Figures(Content):
    """Some keys of result.json, in the order in which they are written.

    A key that does not apply is left out, and one that could not be measured is null.
    """

    schema_version: int | None = Field(None, alias="schema")
    """Version of this schema."""
    fedvl_version: str | None = None
    """Version of FedVL that wrote the file."""
    method: str | None = None
    """Name of the method."""
    method_sha256: str | None = None
    """SHA-256 of the method's file, if it is the user's own."""
    preset: str | None = None
    """Preset of the method."""
    dataset: str | None = None
    """Name or path of the dataset."""
    model: str | None = None
    """Name or path of the pretrained model."""
    partition: str | None = None
    """Partition of the images among clients; null if parties hold their own."""
    clients: Count | None = None
    """Number of clients."""
    rounds: Annotated[int, Field(ge=0, le=MAX_ROUNDS)] | None = None
    """Number of committed rounds."""
    seed: Count | None = None
    """Seed of all random numbers."""
    protocol: str | None = None
    """Evaluation protocol."""
    accuracy: Number | None = None
    """Test images that the trained model classifies correctly, in percent; by client, the mean over clients."""
    macro_precision: Number | None = None
    """Mean over classes of the precision, in percent."""
    macro_recall: Number | None = None
    """Mean over classes of the recall, in percent."""
    macro_f1: Number | None = None
    """Mean over classes of the F1 score, in percent."""
    worst_client_accuracy: Number | None = None
    """Lowest accuracy of a client, in percent."""
    worst_tenth_accuracy: Number | None = None
    """Mean accuracy of the worst tenth of the clients, in percent."""
    client_deviation: Number | None = None
    """Standard deviation of the accuracy over clients, in points."""
    weighted_accuracy: Number | None = None
    """Accuracy of all clients' test images together, in percent."""
    per_client_accuracy: list[Number | None] = []
    """Accuracy of each client's model on its own test images, in percent; null without images."""
    per_client_test_images: list[Count] = []
    """Number of test images of each client."""
    zero_shot_accuracy: Number | None = None
    """Accuracy of the pretrained model, in percent; null if it cannot name classes."""
    zero_shot_worst_client_accuracy: Number | None = None
    """worst_client_accuracy of the pretrained model, in percent."""
    zero_shot_worst_tenth_accuracy: Number | None = None
    """worst_tenth_accuracy of the pretrained model, in percent."""
    zero_shot_weighted_accuracy: Number | None = None
    """weighted_accuracy of the pretrained model, in percent."""
    zero_shot_per_client_accuracy: list[Number | None] = []
    """per_client_accuracy of the pretrained model, in percent."""
    zero_shot_per_class_recall: list[Number | None] = []
    """per_class_recall of the pretrained model, in percent."""
    best_round: RoundNumber | None = None
    """Round with the highest validation accuracy; its model is kept."""
    validation_accuracy: Number | None = None
    """Accuracy of that round on validation images, in percent."""
    validation_images: Count | None = None
    """Number of validation images."""
    per_round_validation: list[Number | None] = []
    """Validation accuracy of each evaluated round, in percent."""
    pseudo_labels_used: Count | None = None
    """Number of training images with a pseudo-label."""
    pseudo_label_accuracy: Number | None = None
    """Pseudo-labels that are true, in percent; null if unknown."""
    temperature: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Divisor of scores before the softmax of a query; null if none was fitted."""
    temperature_from: str | None = None
    """Images to which temperature was fitted."""
    ece: Number | None = None
    """Expected calibration error, in points."""
    ece_interval: Bounds | None = None
    """95 % interval of ece, in points."""
    uncalibrated_ece: Number | None = None
    """ece without temperature, in points."""
    uncalibrated_ece_interval: Bounds | None = None
    """95 % interval of uncalibrated_ece, in points."""
    reliability: Annotated[list[ShareBin], Field(max_length=100)] = []
    """Test images by the share of the predicted class."""
    uncalibrated_reliability: Annotated[list[ShareBin], Field(max_length=100)] = []
    """reliability without temperature."""
    sure: Annotated[list[SureAnswers], Field(max_length=100)] = []
    """Unsure answers below some shares, and the accuracy of the others."""
    zero_shot_ece: Number | None = None
    """ece of the pretrained model, in points."""
    zero_shot_ece_interval: Bounds | None = None
    """95 % interval of zero_shot_ece, in points."""
    round_to_target: RoundNumber | None = None
    """First round that reached evaluation.target_accuracy; null if none did."""
    bytes_to_target: Count | None = None
    """Bytes up and down until then."""
    flops_to_target: Count | None = None
    """Floating-point operations of the largest client until then."""
    seconds_to_target: Number | None = None
    """Seconds of training until then."""
    datasets: Annotated[list[OfDataset], Field(max_length=1000)] = []
    """Figures of each of several datasets."""
    class_lists: Annotated[list[Names], Field(max_length=MAX_CLIENTS)] = []
    """Class names of each client, if each has its own."""
    long_tail: LongTail | None = None
    """Accuracy on classes with many, medium and few training images."""
    per_round: list[Number | None] = []
    """Accuracy of each evaluated round, in percent."""
    per_round_loss: list[Number | None] = []
    """Mean training loss of each round; null under differential privacy."""
    per_round_pseudo_label_accuracy: list[Number | None] = []
    """pseudo_label_accuracy of each evaluated round, in percent."""
    trainable_parameters: Count | None = None
    """Number of trained shared parameters."""
    private_parameters: Count | None = None
    """Number of parameters that the largest client trains for itself."""
    bytes_up_per_client_round: Count | None = None
    """Mean bytes from a client to the server in a round."""
    bytes_down_per_client_round: Count | None = None
    """Mean bytes from the server to a client in a round."""
    local_flops: Count | None = None
    """Floating-point operations of the largest client in a round."""
    chunk: Count | None = None
    """Number of clients that were trained together; null between machines."""
    seconds: Seconds | None = None
    """Seconds of encoding, training and evaluation."""
    seconds_per_image: Number | None = None
    """Seconds to predict one image."""
    privacy: Budget | None = None
    """Privacy budget that the run has spent; null without differential privacy."""
    refused_updates: Count | None = None
    """Number of refused updates."""
    state_sha256: str | None = None
    """SHA-256 of the trained tensors."""
    class_names: Names = []
    """Names of the tested classes, in the order of their numbers."""
    templates: Annotated[list[str], Field(max_length=1000)] = []
    """Text templates of the class names."""
    model_fingerprint: str | None = None
    """SHA-256 of the pretrained model's weights and preprocessing."""
    confusion: list[list[Count]] = []
    """Number of test images by true class (row) and predicted class (column)."""
    per_class_recall: list[Number | None] = []
    """Recall of each class, in percent; null without test images."""
    per_client_mix_accuracy: list[Number | None] = []
    """Expected accuracy on each client's mix of classes, in percent; not tested."""
    zero_shot_per_client_mix_accuracy: list[Number | None] = []
    """per_client_mix_accuracy of the pretrained model, in percent."""
    test_sha256: str | None = None
    """SHA-256 of the test images and labels."""
    right: Right | None = None
    """A letter for each test image: 1 correct, 0 wrong, - not asked."""
    zero_shot_right: Right | None = None
    """right of the pretrained model."""
    conditions: list[Condition] = []
    """Figures under each condition of missing modalities."""
    embedding: Embedding | None = None
    """t-SNE map of test samples."""
    candidate_sets: dict[Literal["own", "base", "new"], list[Names]] = {}
    """Class names of each candidate set of the base-to-new protocol."""
    base_to_new: Annotated[list[SetFigure], Field(max_length=7)] = []
    """Figures of the base-to-new protocol, in percent."""
    base_to_new_right: SetsRight | None = None
    """Per-image correctness of the base-to-new protocol."""
    backdoor_success: Number | None = None
    """Images with the trigger that are classified as the attacker's target, in percent."""
    backdoor_images: Count | None = None
    """Number of these images, which are of other classes than the target."""
    partition_counts: list[list[Count]] = []
    """Number of training images by client (row) and class (column)."""
    partition_class_names: Names = []
    """Names of the training classes."""
    partition_note: str | None = None
    """How the partition was drawn."""
    skipped_images: list[Skipped] = []
    """Images that could not be used."""
    notes: list[str] = []
    """Remarks on the run, in sentences."""
    device: str | None = None
    """Device of the computation."""
    machine: str | None = None
    """Kind of processor and its vector instructions, of which the last bits of results depend."""
    torch_version: str | None = None
    """Version of PyTorch."""
    precision: str | None = None
    """Precision of training."""
    started: str | None = None
    """Time of the start (UTC), in files of version 0.1."""
    finished: str | None = None
    """Time of the end (UTC)."""
    config: dict[str, Setting | dict[str, Setting]] = {}
    """All settings of the run, by section."""
    command: str | None = None
    """Command that repeats the run."""
    peak_memory_bytes: Count | None = None
    """Peak memory of the process, in bytes."""
    peak_gpu_memory_bytes: Count | None = None
    """Peak memory of the GPU, in bytes."""
    memory_bytes_to_target: Count | None = None
    """peak_memory_bytes until a round reached the target."""
    gpu_memory_bytes_to_target: Count | None = None
    """peak_gpu_memory_bytes until a round reached the target."""
    newcomers_accuracy: Number | None = None
    """Mean accuracy of clients that join after the last round, in percent."""
    newcomers_per_client_accuracy: list[Number | None] = []
    """Accuracy of each of them, in percent."""
    newcomers_trained_accuracy: Number | None = None
    """newcomers_accuracy after one local round, in percent."""
    newcomers_trained_per_client_accuracy: list[Number | None] = []
    """Accuracy of each of them after one local round, in percent."""
    newcomers_zero_shot_accuracy: Number | None = None
    """newcomers_accuracy of the pretrained model, in percent."""
    newcomers_zero_shot_per_client_accuracy: list[Number | None] = []
    """Accuracy of the pretrained model for each of them, in percent."""
    untrained_validation_accuracy: Number | None = None
    """Validation accuracy before the first round, in percent."""
    party: str | None = None
    """Name of the party whose own model this is."""
    parties: Annotated[list[PartyBytes], Field(max_length=MAX_CLIENTS)] = []
    """Parties of a run between machines, and their bytes."""
    answers: list[Answer] = []
    """Time of each answer in a run between machines."""
    files_sha256: dict[TensorFile, Hash] = {}
    """SHA-256 of the files of tensors."""

    @model_validator(mode="before")
    @classmethod
    def null_is_empty(cls, content: Any) -> Any:
        """Take null in place of a list or table as empty."""
        if not isinstance(content, dict):
            return content
        empty = {name for name, field in cls.model_fields.items() if field.default in ([], {})}
        return {name: value for name, value in content.items() if value is not None or name not in empty}

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


class Result(Figures):
    """result.json; older runs may lack any key but the method."""

    method: str
    """Name of the method."""

    def setting(self, section: str, key: str) -> Setting:
        """Return a setting of the run; None if it is not recorded."""
        found = self.config.get(section)
        return found.get(key) if isinstance(found, dict) else None


class Status(Content):
    """status.json of a run between machines."""

    parties: Names = []
    connected: list[ClientIndex] = []
    waiting_for: list[ClientIndex] = []
    last_seen: dict[str, Finite] = {}
    certificate_days: int | None = None
    test_images: Count | None = None  # of the server
    round: Count | None = None
    phase: str | None = None


class Federation(Content):
    """federation.json: where the federation's folder is, and the name of the run."""

    federation: Path_
    run: str
    told: list[ClientIndex] = []  # that the run is over


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

    client: ClientIndex
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
    distance_by_tensor: dict[str, Number] = {}
    same_draws: bool
    privacy: Joint | None = None

    @property
    def compared(self) -> tuple[int, str, str]:
        """The client and the two runs."""
        return self.client, self.run.folder, self.without.folder


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
