"""A finished run, opened for queries: any images, and any class names that its method can predict.

Queries go through ``evaluation/predict.py``, as in a test: the same images in the same batches get
the same predictions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.data.encoding import NOT_FINITE, encode_images
from fedvl.data.features import encode_each
from fedvl.data.given import GivenImages, ImageSource
from fedvl.data.images import BadImage, decode
from fedvl.data.imported import ImportedEncoder, encoding_in, open_model
from fedvl.data.inputs import embed_names
from fedvl.errors import FedVLError
from fedvl.evaluation.predict import Conversation
from fedvl.methods import load_method
from fedvl.methods.base import Method, Options, Task
from fedvl.methods.parts.losses import entropy
from fedvl.methods.zero_shot import ZeroShot
from fedvl.models.clip import DualEncoder
from fedvl.runs.evaluation import read_thresholds
from fedvl.runs.folder import RunFolder
from fedvl.tensors import Tensors, pick_device

IMAGES_AT_ONCE = 32  # images per batch of a method without memory; for one with a memory it is in the run's settings

ENCODED_TOGETHER = 256
UNSURE = "unsure"


class Ranked(TypedDict):
    """A name and its share."""

    name: str
    score: float


class Line(TypedDict, total=False):
    """The line of JSON of one image: its prediction, or why it was refused."""

    number: int
    image: str
    refused: str
    ranked: list[Ranked]
    entropy: float
    unsure: bool
    prototype_of: str | None
    above_threshold: list[str]
    zero_shot: list[Ranked]


class Reply(NamedTuple):
    """The prediction for one image."""

    ranked: list[tuple[str, float]]  # likeliest names first, with their shares
    entropy: float  # of the shares of all names
    example_of: str | None  # class that it is remembered as an example of
    zero_shot: list[tuple[str, float]]  # the pretrained model's prediction
    above: list[str] | None = None  # names whose share reaches their threshold, if the run has thresholds
    unsure: bool | None = None  # whether the likeliest name's share is below what the user asks for

    def write(self, line: Line) -> None:
        """Write the prediction into the line of its image."""
        line["ranked"] = [{"name": name, "score": score} for name, score in self.ranked]
        line["entropy"] = self.entropy
        if self.unsure is not None:
            line["unsure"] = self.unsure
        line["prototype_of"] = self.example_of
        if self.above is not None:
            line["above_threshold"] = self.above
        line["zero_shot"] = [{"name": name, "score": score} for name, score in self.zero_shot]


class User:
    """A user who queries some class names: the model for them, and what it remembers."""

    def __init__(
        self,
        method: Method,
        tensors: Tensors,
        client_weights: dict[int, float],
        temperature: float = 1.0,
        thresholds: Mapping[str, float] | None = None,
        unsure: float | None = None,
    ) -> None:
        self.names = method.task.class_names
        self.unsure = unsure  # share of the likeliest name below which the answer is "unsure"
        self.client_weights = client_weights
        self.temperature = temperature
        self.thresholds = thresholds if thresholds and thresholds.keys() == set(self.names) else None
        self.remembers = method.role.remembers
        self.conversation = Conversation(method, tensors)
        self._zero_shot = Conversation(ZeroShot(Options(), method.task), {})

    def ask(self, images: Sequence[Tensors], top: int) -> list[Reply]:
        """Predict the next images as one batch, with ``top`` names each."""
        inputs = {form: torch.stack([image[form] for image in images]) for form in images[0]}
        answer = self.conversation.ask(inputs)
        scores = answer.scores / self.temperature
        ranked = self._ranked(scores, top)
        columns = (
            ranked,
            entropy(scores).tolist(),
            [self.names[c] if c >= 0 else None for c in answer.example_of.tolist()],
            self._ranked(self._zero_shot.ask(inputs).scores, top),
            self._above(scores),
            [None if self.unsure is None else row[0][1] < self.unsure for row in ranked],
        )
        return [Reply(*row) for row in zip(*columns, strict=True)]

    def _above(self, scores: Tensor) -> list[list[str]] | list[None]:
        """Return the names whose shares reach their thresholds, image by image."""
        if self.thresholds is None:
            return [None] * len(scores)
        least = torch.tensor([self.thresholds[name] for name in self.names], dtype=torch.float64)
        reached = scores.double().softmax(-1).cpu() >= least
        return [[name for name, above in zip(self.names, row, strict=True) if above] for row in reached.tolist()]

    def _ranked(self, scores: Tensor, top: int) -> list[list[tuple[str, float]]]:
        """Rank the classes; the first wins a tie, as in evaluation."""
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top]
        shares = scores.softmax(-1).gather(-1, order)
        return [
            [(self.names[c], share) for c, share in zip(*row, strict=True)]
            for row in zip(order.tolist(), shares.tolist(), strict=True)
        ]


class TrainedModel:
    """The model of a run folder; files are read once and verified, and nothing is written."""

    def __init__(self, folder: RunFolder, device: str | None = None) -> None:
        self.folder, self.result, self.experiment = folder, folder.result, folder.experiment
        self.device = pick_device(device or self.experiment.device)
        model = self.experiment.model
        encoder = encoding_in(open_model(model.name, self.device), model.encoding)
        if isinstance(encoder, ImportedEncoder):
            raise FedVLError(
                f"The run was trained on vectors imported as '{encoder.name}', and FedVL cannot encode new images with that "
                "encoder; serve a run of a model that FedVL runs."
            )
        if not isinstance(encoder, DualEncoder):
            raise FedVLError(
                f"Method '{self.name}' reads an image and a text together, but queries have images only; "
                "serve a run of a CLIP-like model."
            )
        shared, last = folder.tensors()
        if encoder.fingerprint != self.result.model_fingerprint:
            raise FedVLError(
                f"The model '{encoder.name}' is not the one that this run was trained with; put that one back."
            )
        self.encoder = encoder
        self.thresholds = read_thresholds(folder)
        self._type = load_method(self.experiment.method.name)
        self._options = self._type.options_type.model_validate(self.experiment.method.options)
        self._shared = self._placed(shared)
        self._last = {client: self._placed(sent) for client, sent in last.items()}
        self.forms = self._type.forms(self._options)
        clusters = self._type.vocabulary == "clusters"
        if (self._type.uses_target and self._type.vocabulary != "any") or (
            clusters and self.experiment.evaluation.protocol == "open"
        ):
            raise FedVLError(
                f"Method '{self.name}' sorted images into clusters without names; serve a run of another method or protocol."
            )
        self.answers_new_classes = self._type.vocabulary == "any"

    @property
    def name(self) -> str:
        """Name of the method, packaged or from a file."""
        return Path(self.experiment.method.name).stem

    @property
    def class_names(self) -> list[str]:
        """Class names that the run was tested with."""
        return list(self.result.class_names)

    @property
    def templates(self) -> list[str]:
        return list(self.result.templates)

    @property
    def temperature(self) -> float | None:
        """Calibration temperature, fitted on images that are not tested; None if there is none."""
        return self.result.temperature

    def user(
        self,
        names: Sequence[str] | None = None,
        templates: Sequence[str] | None = None,
        client: int | None = None,
        unsure: float | None = None,
    ) -> User:
        """Return a user of class names (default: the run's) or of a client's personal model.

        Answers with a share below ``unsure`` are marked; if absent, the run's setting is used.
        """
        if unsure is not None and not 0 < unsure < 1:
            raise FedVLError(f"--unsure is a share between 0 and 1, such as 0.8, and not {unsure:g}.")
        names = list(names or self.class_names)
        if len(set(names)) < len(names):
            raise FedVLError("A class name is given twice; give each once.")
        if not all(name.strip() for name in names):
            raise FedVLError("A class name is empty; leave it out.")
        if any(name != name.encode(errors="replace").decode() for name in (*names, *(templates or []))):
            raise FedVLError("A class name or template has a lone surrogate (half a character); remove it.")
        if any("{}" not in template for template in templates or []):
            raise FedVLError("A template has {} where the class name goes, for example 'a photo of a {}.'.")
        if set(names) == set(self.class_names):
            names = self.class_names  # in the order in which the method was trained on them
        if not self.answers_new_classes and (names != self.class_names or templates):
            shown = ", ".join(self.class_names[:20]) + (", ..." if len(self.class_names) > 20 else "")
            raise FedVLError(
                f"Method '{self.name}' knows only the classes that it was trained on ({shown}), with its own templates; "
                "leave out names and templates."
            )
        method = self._method(names, self.experiment.evaluation.protocol, templates)
        tensors = method.tailor(self._shared, self._last)
        if client is not None:
            tensors = {**tensors, **self._private(client)}
        weights = method.client_weights(self._last) if self._last else {}
        thresholds = self.thresholds.shares if self.thresholds else None
        least = self.experiment.evaluation.unsure if unsure is None else unsure
        return User(method, tensors, weights, self.temperature or 1.0, thresholds, least)

    def read(self, image: bytes | Path, name: str = "") -> Tensor:
        """Return an image file as the encoder's input; raise `BadImage` if it cannot be used."""
        return self.encoder.preprocess(decode(image, name))

    def encode(self, pixels: Sequence[Tensor]) -> list[Tensors | BadImage]:
        """Return the inputs of each image for the method and for zero-shot."""
        if not pixels:
            return []
        kinds = ("features", *self._further)
        rows = {kind: encode_images(self.encoder, kind, pixels) for kind in kinds}
        finite = rows["features"].isfinite().all(1).tolist()
        inputs = self._inputs({kind: tensor.to(self.device) for kind, tensor in rows.items()})
        return [row if fine else BadImage(NOT_FINITE) for row, fine in zip(inputs, finite, strict=True)]

    def encode_files(self, sources: Sequence[ImageSource]) -> list[Tensors | BadImage]:
        """Return the same of files, by way of the feature cache: an image is encoded once."""
        images = GivenImages(sources)
        read = {kind: encode_each(images, self.encoder, kind) for kind in ("features", *self._further)}
        kept = read["features"].kept
        refused = (BadImage(reason, name) for name, reason in read["features"].bad)
        found: list[Tensors | BadImage] = []
        rows = iter(
            self._inputs({kind: each.tensor.to(self.device) for kind, each in read.items()}) if len(kept) else []
        )
        for usable in np.isin(np.arange(len(sources)), kept).tolist():
            found.append(next(rows) if usable else next(refused))
        return found

    @property
    def _further(self) -> list[str]:
        return sorted({"pixels", "patches"}.intersection(self.forms))

    def _inputs(self, rows: Tensors) -> list[Tensors]:
        """Return the method's inputs, and those of zero-shot, of each image."""
        embeddings = rows["features"].float()
        forms = {**rows, "embeddings": embeddings, "features": normalize(embeddings, dim=-1)}
        wanted = {*self.forms, "features"}
        return [{form: forms[form][row] for form in forms if form in wanted} for row in range(len(embeddings))]

    def batch_size(self, user: User) -> int:
        return self.experiment.evaluation.batch_size if user.remembers else IMAGES_AT_ONCE

    def _method(self, names: Sequence[str], protocol: str, templates: Sequence[str] | None = None) -> Method:
        task = Task(
            tuple(names),
            embed_names(names, templates or self.templates, self.encoder, self.device),
            self.encoder,
            self.experiment.data.clients,
            self.experiment.seed,
            protocol=protocol,
            templates=tuple(templates or self.templates),
            training=self.experiment.training,
        )
        return self._type(self._options, task)

    def _private(self, client: int) -> Tensors:
        """Return a client's private tensors of a personal run; only a simulation has them."""
        if self.experiment.evaluation.protocol != "personal":
            raise FedVLError("This run's clients have no model of their own; leave out the client.")
        owners = self.folder.state(self.device).private
        if client not in owners:
            known = ", ".join(map(str, owners)) or "none"
            raise FedVLError(f"This run has no private tensors of client {client}; it has those of: {known}.")
        return owners[client]

    def _placed(self, tensors: Tensors) -> Tensors:
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}


class QueryBatch:
    """Images that are predicted together, as in the run's evaluation, with a line of JSON each."""

    def __init__(self, user: User, size: int, top: int) -> None:
        self.user, self.size, self.top = user, size, top
        self.lines: list[Line] = []
        self._rows: list[tuple[Line, Tensors]] = []

    def add(self, line: Line, encoded: Tensors | BadImage) -> bool:
        """Add an image, or why it was refused; return whether the batch is full."""
        self.lines.append(line)
        if isinstance(encoded, BadImage):
            line["refused"] = encoded.reason
        else:
            self._rows.append((line, encoded))
        return len(self._rows) == self.size

    def predict(self) -> list[Line]:
        """Return the lines with their predictions, and begin the next batch."""
        lines, rows = self.lines, self._rows
        self.lines, self._rows = [], []
        replies = self.user.ask([row for _, row in rows], self.top) if rows else []
        for (line, _), reply in zip(rows, replies, strict=True):
            reply.write(line)
        return lines


def answer_of(line: Line) -> str | None:
    """Return the likeliest name, "unsure" if its share is too small, None for a refused image."""
    if "ranked" not in line:
        return None
    return UNSURE if line.get("unsure") else line["ranked"][0]["name"]


def predict_images(
    model: TrainedModel,
    user: User,
    sources: Sequence[ImageSource],
    top: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Line]:
    """Predict images in their order; yield a line for each as soon as it is known."""
    batch = QueryBatch(user, model.batch_size(user), top)
    for first in range(0, len(sources), ENCODED_TOGETHER):
        for number, row in enumerate(model.encode_files(sources[first : first + ENCODED_TOGETHER]), first):
            if batch.add({"number": number, "image": sources[number][0]}, row):
                yield from batch.predict()
        progress(min(first + ENCODED_TOGETHER, len(sources)), len(sources))
    yield from batch.predict()
