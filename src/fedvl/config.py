"""One typed description of an experiment.

Settings are merged, later ones winning: the defaults below, the method's preset (``paper`` or
``released``), the TOML file, then flags and ``--set a.b=c``. The result is the run's
``config.toml``, which suffices to run it again.
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from fedvl.errors import FedVLError
from fedvl.files import SHORTENED, read_file

MAX_TOML = 2**20  # bytes
MAX_DOTS = 200
MAX_ROUNDS = 999_999  # the journal names rounds with six digits
Settings = dict[str, Any]  # nested, as TOML has them
MAX_CLIENTS = 10_000_000
MAX_TEXT = 4096  # characters of a name or path
MANY = 10**9  # more than there is of anything that is counted


Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, str_max_length=MAX_TEXT, use_attribute_docstrings=True
    )


class MethodConfig(BaseModel):
    """The method; further keys are its options (``fedvl methods NAME`` lists them)."""

    model_config = ConfigDict(extra="allow", frozen=True, str_max_length=MAX_TEXT, use_attribute_docstrings=True)
    name: str = "linear"
    """A method of the package (fedvl methods lists them), or the path of your own Python file."""
    preset: str = "paper"
    """Preset of the method: paper, released where public code differs, embedded for the model and
    images in the package, or another of its own.
    """
    sha256: str | None = None
    """SHA-256 of that Python file, so that a run does not resume with a changed one."""

    @property
    def label(self) -> str:
        """Short name of the method."""
        return Path(self.name).stem if self.name.endswith(".py") else self.name.partition("@")[0]

    @property
    def is_own(self) -> bool:
        """Whether it is the user's: a file, or a class that was given in Python."""
        return self.name.endswith(".py") or "@" in self.name

    @property
    def options(self) -> Settings:
        return dict(self.model_extra or {})


class DataConfig(Section):
    dataset: str = "cifar10-mini"
    """An embedded set, a catalogue name, hf:OWNER/NAME, a folder, a Parquet file or a manifest;
    join several with a plus.
    """
    root: str | None = None
    """Folder of catalogue datasets; the user's cache folder if absent."""
    classes: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of the classes to keep, all if absent, or one name of a list of the catalogue, such as
    coop100 of caltech101; for a folder of images without labels, the names of its classes. On the
    command line a,b,c, or @FILE with one name per line.
    """
    additions: tuple[str, ...] = ()
    """Images that were added later, each as CLIENT=SOURCE, or new=SOURCE for a new client, the last
    ones; the other images are split as if these were not there. Written by fedvl update.
    """
    corrections: str | None = None
    """CSV file with the columns file and label (or truth, as in test.csv of a run): labels that
    replace those of the dataset; an image with a blank one is left out.
    """
    templates: Literal["default", "bare", "coop", "ensemble"] = "default"
    """Prompt templates that turn class names into texts."""
    partition: str = "dirichlet:0.5"
    """How training images are split among clients: iid, even, dirichlet:ALPHA, shards:COUNT,
    quantity:FRACTION, pachinko:BETA, disjoint, domains, domains+dirichlet:ALPHA, domains+disjoint,
    or a .csv or .json file of rows.
    """
    clients: int = Field(10, ge=1, le=MAX_CLIENTS)
    """Number of clients."""
    asked_classes: int | None = Field(None, ge=1, le=MANY)
    """Classes that the open protocol queries, the same for any number of clients; if absent, as
    many as are left when each of K clients has one of K + 1 equal parts.
    """
    newcomers: int = Field(0, ge=0, le=MAX_CLIENTS)
    """Number of clients, the last ones, that join only when training is over."""
    minimum: int = Field(10, ge=0, le=MANY)
    """Minimum number of samples of a client under a Dirichlet partition."""
    shots: int | None = Field(None, ge=1, le=MANY)
    """Training images kept per class, drawn before the partition; all if absent."""
    unit: str | None = None
    """Column that says whom an image belongs to: patient, subject, person, user or case.
    Record-level privacy then hides all images of one person at a client; if absent, one image.
    """
    client_shots: int | None = Field(None, ge=1, le=MANY)
    """Training images of each class at each client, drawn after the partition; all if absent."""
    long_tail: float | None = Field(None, ge=1, le=MANY)
    """Ratio of the training images of the first class to those of the last; the classes between
    follow a geometric scale. Classes are not reduced if absent.
    """
    label_noise: str | None = None
    """Wrong training labels of each client, as KIND:SHARE; symmetric draws any other class, pair
    the next class.
    """
    test_shots: int | None = Field(None, ge=1, le=MANY)
    """Test images kept per class, the same for every seed; all if absent."""
    target_domain: str | None = None
    """Domain that leave-one-domain-out tests on. If absent, seed 0 leaves out the first by name,
    seed 1 the second, and so on.
    """
    missing: str | None = None
    """Missing modalities, as text:RATE, image:RATE or both:RATE; none if absent."""
    missing_by: Literal["all", "client", "whole-client"] = "all"
    """What RATE is a share of: all training samples, each client's samples, or clients that lack
    the modality in every sample.
    """
    labels: Literal["true", "zero-shot", "upl", "fpl", "cpl", "cps"] = "true"
    """Training labels: the true ones, or pseudo-labels of each client from its zero-shot
    predictions.
    """
    pseudo_shots: int = Field(16, ge=1, le=MANY)
    """Images per class that a client labels under upl, fpl and cpl."""
    cpl_alpha: float = Field(0.6, ge=0, le=1)
    """Under cpl, quantile of confidences up to which an image has candidate labels."""
    cpl_beta: float = Field(0.9, ge=0, le=1)
    """Under cpl, quantile of a class's probabilities from which it is a candidate label."""


class ModelConfig(Section):
    name: str = "fedvl-tiny"
    """The pretrained model: fedvl-tiny, a folder, a safetensors file, or a name on the Hugging Face
    Hub.
    """
    encoding: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products that encode images before training; each has its own features in
    the cache.
    """
    text_length: int | None = Field(None, ge=2, le=4096)
    """Positions of a fused model's texts, to which its own are interpolated, as in Fed-PRIME; the
    model's own number if absent.
    """


class TrainingConfig(Section):
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    """Optimiser of the clients' local training."""
    learning_rate: float = Field(0.01, gt=0)
    """Learning rate."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum, for sgd only."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay rates of the moments, for adam and adamw only."""
    epsilon: float = Field(1e-8, gt=0)
    """Term added to the denominator, for adam and adamw only."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay: decoupled under adamw, added to the gradient under sgd and adam."""
    batch_size: int = Field(50, ge=1, le=MANY)
    """Images per training step."""
    local_epochs: int = Field(1, ge=1, le=10_000)
    """Epochs over a client's own images in each round."""
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = "float32"
    """Precision of matrix products on a GPU, where trained tensors stay float32; auto is resolved
    when a run begins.
    """
    schedule: Literal["constant", "cosine", "step", "cosine-restarts"] = "constant"
    """Schedule of the learning rate over rounds."""
    restart_rounds: int = Field(5, ge=1, le=MAX_ROUNDS)
    """Rounds between restarts under cosine-restarts, which decays over epochs."""
    step_factor: float = Field(0.99, gt=0, le=1)
    """Factor on the learning rate after each round under step."""

    start_from: str | None = None
    """Folder of a finished run, such as one of ridge, whose class weights training starts from in
    place of the class texts; in a simulation only.
    """

    def steps(self, samples: int) -> int:
        """Return the steps of a round of a client that trains on so many samples."""
        return self.local_epochs * -(-samples // self.batch_size)


class FederationConfig(Section):
    rounds: int = Field(10, ge=0, le=MAX_ROUNDS)
    """Number of rounds."""
    per_round: int | None = Field(None, ge=1, le=MAX_CLIENTS)
    """Clients sampled each round; all if absent."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability that a sampled client does not answer."""
    quorum: int = Field(1, ge=1, le=MAX_CLIENTS)
    """Valid updates that a round needs to count."""
    attempts: int = Field(3, ge=1, le=1000)
    """Samples of clients for a round before the run stops for lack of a quorum."""
    patience: int | None = Field(None, ge=1, le=MAX_ROUNDS)
    """Rounds without a better validation accuracy before a run stops; it does not stop early if
    absent.
    """
    withdrawn: tuple[Annotated[int, Field(ge=0, lt=MAX_CLIENTS)], ...] = ()
    """Clients that no longer take part."""
    drift: bool = False
    """Record the drift of the clients in each round; secure aggregation does not reveal it."""
    chunk: int | None = Field(None, ge=1, le=MAX_CLIENTS)
    """Clients trained in one kernel; if absent, as many as fit into a fixed share of memory,
    independent of what is free.
    """
    sequential: bool = False
    """From round 2 on, each client continues from the tensors of the one before, and only the last
    one's are merged: a fault of Fed-PRIME's released code, for study.
    """
    one_step: bool = False
    """Train clients of one local step each in one backward pass, without separate updates; for very
    large cohorts.
    """
    one_by_one: bool = False
    """Train clients one after another: the reference for batched training."""
    threads: int = Field(2, ge=1, le=256)
    """CPU threads for training. A setting, since it changes the order of sums."""
    max_update_norm: float = Field(1e4, gt=0)
    """Updates with a larger norm are refused."""
    max_norm_ratio: float = Field(6.0, gt=1)
    """Updates whose norm exceeds the others' by more than this factor are refused."""
    max_examples: float = Field(1e6, gt=0)
    """Clients that declare more samples are refused."""
    robust: Literal["mean", "median", "trimmed", "multi-krum", "geometric-median", "centred-clipping", "root"] = "mean"
    """Rule that merges updates, some of which may be hostile; root trusts those that agree with the
    server's own images.
    """
    root_images: int = Field(100, ge=1, le=100_000)
    """Training images held by the server instead of a client, for robust = root and
    privacy.subspace.
    """
    attack: str | None = None
    """Simulated hostile clients, as KIND:SHARE; none if absent. Kinds are sign-flip, label-flip,
    scaled, alie, ipm, backdoor, overstated and adaptive.
    """
    secure_sum: bool = False
    """Secure aggregation: the server learns only sums over clients, computed in integers."""
    least_clients: int = Field(3, ge=2)
    """Minimum number of clients in a secure sum."""
    sum_threshold: float = Field(2 / 3, gt=0.5, le=1)
    """Share of a sum's clients that must sign its list of survivors and help to open it; always
    more than half.
    """
    deadline: float = Field(600.0, gt=0, le=1e7)
    """Seconds that clients have to answer; later answers are left out of the round. Between
    machines only.
    """
    max_message_bytes: int = Field(2**28, ge=2**16, le=2**40)
    """Larger messages are not read. Between machines only."""


class PrivacyConfig(Section):
    """Differential privacy: whose presence the trained model hides, and how well."""

    unit: Literal["none", "client", "record"] = "none"
    """Whose presence is hidden: a client with all its images, or one image of a client."""
    epsilon: float = Field(8.0, gt=0, le=100)
    """Privacy budget of all planned rounds; the noise follows from it."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """Probability with which the guarantee may fail."""
    clip: float | None = Field(None, gt=0)
    """Norm to which a client's update, or an image's gradient, is clipped. If absent, it follows
    the median of the updates' norms, estimated with noise; 1 for images.
    """
    subspace: int | None = Field(None, ge=1, le=4096)
    """Directions, estimated from the server's own images (federation.root_images), to which updates
    are restricted: fewer directions need less noise. All directions if absent.
    """
    images: int | None = Field(None, ge=1, le=10**12)
    """Public number of all clients' images, about; a training-free method chooses by it which sums
    are released. If absent, a simulation counts them; between machines it must be given.
    """
    public: str | None = None
    """Images of the server whose covariance stands for the clients' where only class sums are
    released: the name of a dataset or a folder. If absent, an embedded set of other classes.
    """


BY_CLIENT = ("personal", "base-to-new")  # protocols whose accuracy is a mean over clients


class EvaluationConfig(Section):
    protocol: Literal["closed", "open", "personal", "missing", "base-to-new", "leave-one-domain-out"] = "closed"
    """How the model is tested. closed: one test set. open: a new user queries classes that no
    client has. personal: every client queries its own test part. missing: the test has the missing
    modalities of training, and is repeated under six further conditions. base-to-new: clients train
    on disjoint parts of the first half of the classes, and query these, all of that half, and the
    other half. leave-one-domain-out: a user queries images of a domain that no client has.
    """
    validation: float | None = Field(None, gt=0, lt=1)
    """Share of each client's training images that chooses the best round; the test set is then used
    once. Not held out if absent.
    """
    target_accuracy: float | None = Field(None, gt=0, le=100)
    """Accuracy in percent; the result says what it cost to reach it. Not reported if absent."""
    unsure: float | None = Field(None, gt=0, lt=1)
    """Share of the likeliest class below which the answer is "unsure", such as 0.8. Every answer
    names a class if absent.
    """
    test: bool = True
    """Evaluate on the test set; a sweep does so for the chosen setting only."""
    batch_size: int = Field(4096, ge=1, le=MANY)
    """Images predicted together."""
    every: int = Field(1, ge=1, le=MAX_ROUNDS)
    """Rounds between evaluations; the last round is always evaluated."""
    examples: int = Field(8, ge=0, le=1000)
    """Test images in the report that training corrected, and as many that it got wrong."""


class Experiment(Section):
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of all random numbers."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")
    """Device for training: auto, cpu, cuda or cuda:NUMBER."""
    method: MethodConfig = MethodConfig()
    """The method; further keys are its options."""
    data: DataConfig = DataConfig()
    """Images, their classes and their partition among clients."""
    model: ModelConfig = ModelConfig()
    """The frozen pretrained encoder."""
    training: TrainingConfig = TrainingConfig()
    """Local training at a client."""
    federation: FederationConfig = FederationConfig()
    """Rounds, clients, merging and limits."""
    privacy: PrivacyConfig = PrivacyConfig()
    """Differential privacy. The flag takes client:eps=3 or record:eps=8,delta=1e-6,clip=0.5;
    subspace can be given in the same way.
    """
    evaluation: EvaluationConfig = EvaluationConfig()
    """How the model is tested."""

    @property
    def absent(self) -> tuple[int, ...]:
        """Clients that take no part in training: those who withdrew, and newcomers."""
        clients = self.data.clients
        return (*self.federation.withdrawn, *range(clients - self.data.newcomers, clients))

    def to_toml(self) -> str:
        return write_toml(self.model_dump(mode="json", exclude_none=True))


def resolve(layers: Iterable[Mapping[str, Any]]) -> Experiment:
    """Merge nested settings (later ones win) and check the whole."""
    merged: Settings = {}
    for layer in layers:
        overlay(merged, layer)
    try:
        return Experiment.model_validate(merged)
    except ValidationError as error:
        raise FedVLError(explain(error, Experiment)) from error


def overlay(base: Settings, layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            overlay(base[key], value)
        else:
            base[key] = dict(value) if isinstance(value, Mapping) else value


def read_toml(path: Path) -> Settings:
    if path.is_dir():
        raise FedVLError(
            f"{path} is a folder, and an experiment is a TOML file; to use a folder of images, say --dataset {path}."
        )
    try:
        text = read_file(path, MAX_TOML).decode()
        if any(line.count(".") > MAX_DOTS for line in text.splitlines()):  # which takes the parser hours
            raise FedVLError(f"{path} has a line of more than {MAX_DOTS} dots; break it.")
        return tomllib.loads(text)
    except FileNotFoundError as error:
        raise FedVLError(f"There is no experiment file {path}; check the path.") from error
    except OSError as error:
        raise FedVLError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, or of an integer without end
        raise FedVLError(f"{path} is not valid TOML: {error}.") from error


# What other programs call some settings.
ELSEWHERE = {
    "lr": "training.learning_rate",
    "optim": "training.optimiser",
    "optimizer": "training.optimiser",
    "batch": "training.batch_size",
    "bs": "training.batch_size",
    "epochs": "training.local_epochs",
    "wd": "training.weight_decay",
    "alpha": "data.partition",
    "num_clients": "data.clients",
    "num_rounds": "federation.rounds",
    "clients_per_round": "federation.per_round",
}
# The setting of each flag of ``fedvl run``, which is also a keyword argument of ``fedvl.run``
FLAGS = {
    "method": "method.name",
    "preset": "method.preset",
    "dataset": "data.dataset",
    "classes": "data.classes",
    "labels": "data.corrections",
    "partition": "data.partition",
    "clients": "data.clients",
    "shots": "data.shots",
    "missing": "data.missing",
    "unit": "data.unit",
    "model": "model.name",
    "local_epochs": "training.local_epochs",
    "precision": "training.precision",
    "start_from": "training.start_from",
    "rounds": "federation.rounds",
    "per_round": "federation.per_round",
    "dropout": "federation.dropout",
    "secure_sum": "federation.secure_sum",
    "robust": "federation.robust",
    "attack": "federation.attack",
    "privacy": "privacy",
    "chunk": "federation.chunk",
    "one_by_one": "federation.one_by_one",
    "protocol": "evaluation.protocol",
    "unsure": "evaluation.unsure",
    "seed": "seed",
    "device": "device",
}


def gather_settings(file: Path | None, flags: Mapping[str, Any], assignments: Iterable[str] = ()) -> Settings:
    """Lay flags over a TOML file, and ``--set`` over both; a flag that is None is absent."""
    given = read_toml(file) if file else {}
    for flag, value in flags.items():
        if value is not None:
            overlay(given, nested(FLAGS[flag], value))
    for assignment in assignments:
        overlay(given, parse_assignment(assignment))
    return given


def nested(key: str, value: Any) -> Settings:
    """Return settings with one value at section.key; a text for ``privacy`` is a whole section."""
    if key == "privacy" and isinstance(value, str):
        value = parse_privacy(value)
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def parse_assignment(text: str) -> Settings:
    """Return ``a.b=c`` of ``--set`` as nested settings; the value is TOML or else plain text."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) > 2 or not all(part.isidentifier() for part in parts):
        raise FedVLError(f"--set takes SECTION.KEY=VALUE, for example --set training.learning_rate=0.1, not '{text}'.")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    return nested(".".join(parts), parsed)


def parse_privacy(text: str) -> Settings:
    """Return ``client:eps=3,delta=1e-6,clip=0.5`` of ``--privacy`` as a section."""
    unit, _, rest = text.partition(":")
    found: Settings = {"unit": unit.strip()}
    try:
        for part in rest.split(",") if rest else ():
            name, _, value = part.partition("=")
            key = {"eps": "epsilon", "delta": "delta", "clip": "clip", "subspace": "subspace"}[name.strip()]
            found[key] = int(value) if key == "subspace" else float(value)
        if unit not in ("none", "client", "record") or ("epsilon" in found) == (unit == "none"):
            raise ValueError
    except (KeyError, ValueError):
        raise FedVLError(
            "--privacy takes client or record and an epsilon, for example client:eps=3 or "
            f"record:eps=8,delta=1e-6,clip=0.5, not '{text[:100]}'."
        ) from None
    return found


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """Return a pydantic error as one sentence about its first problem."""
    problem = error.errors()[0]
    location = ".".join(str(part) for part in problem["loc"])[:100]
    if problem["type"] == "extra_forbidden":
        return f"There is no setting '{prefix}{location}'; {nearest_setting(prefix + location, model, prefix)}"
    if problem["type"] in ("model_type", "model_attributes_type"):
        of_section = [name for name in setting_names(model) if name.startswith(f"{location}.")]
        return f"'{location}' is a section; name one of its settings: {', '.join(of_section)}."
    message = problem["msg"][0].lower() + problem["msg"][1:]
    message = (
        message.replace("input should be", "it must be").replace("string should", "it must").split(", unable to")[0]
    )
    message = "it must be auto, cpu, cuda or cuda:NUMBER" if location == "device" else message
    return f"Setting '{prefix}{location}' is {SHORTENED.repr(problem['input'])}, but {message}."


def nearest_setting(name: str, model: type[BaseModel], prefix: str) -> str:
    """Return a hint: the setting that is meant, by its usual name elsewhere or by its spelling."""
    section, _, last = name.rpartition(".")
    known = [prefix + other for other in setting_names(model)]
    everywhere = list(dict.fromkeys([*known, *setting_names(Experiment)]))
    alike = [other for other in everywhere if other.rpartition(".")[2] == last]
    of_section = [other for other in known if other.startswith(f"{section}.")] if section else []
    lasts = {other.rpartition(".")[2]: other for other in of_section or known}
    close = [lasts[other] for other in difflib.get_close_matches(last, lasts, n=1, cutoff=0.5)]
    if meant := ELSEWHERE.get(last) or next(iter([*close, *alike]), None):
        return f"did you mean '{meant}'?"
    return f"known are {', '.join(of_section or known)}."


def setting_field(name: str) -> FieldInfo:
    """Return the field of a setting (``data.clients``) or of a section (``privacy``)."""
    section, _, key = name.partition(".")
    field = Experiment.model_fields[section]
    return sections()[section].model_fields[key] if key else field


def sections() -> dict[str, type[BaseModel]]:
    """Return the sections of an experiment by name."""
    kinds = {name: field.annotation for name, field in Experiment.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def field_type(field: FieldInfo) -> Any:
    """Return the type of a setting; what may be absent is a type and None."""
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    return kinds[0] if get_origin(field.annotation) in (Union, UnionType) else field.annotation


def field_help(field: FieldInfo) -> str:
    """Return the choices of a setting or option, and its description."""
    choices = [str(choice) for choice in get_args(field.annotation) if isinstance(choice, str)]
    description = " ".join((field.description or "").split())
    return f"One of {', '.join(choices)}. {description}" if choices else description


def setting_names(model: type[BaseModel], prefix: str = "") -> list[str]:
    names: list[str] = []
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            names += setting_names(annotation, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def write_toml(settings: Mapping[str, Any]) -> str:
    """Return settings of at most one level of sections as TOML."""
    lines = [f"{key} = {toml_value(value)}" for key, value in settings.items() if not isinstance(value, Mapping)]
    for name, section in settings.items():
        if isinstance(section, Mapping):
            lines += ["", f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Return a scalar or list as TOML, which is JSON but for an escaped DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
