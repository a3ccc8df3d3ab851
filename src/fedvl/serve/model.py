"""A finished run, opened to be asked: about any class names that its method can answer, and any images.

Questions go through ``evaluation/predict.py``, as those of a test do: the same images in the same batches get the same answers.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.data.features import encode_images
from fedvl.data.images import BadImage, decode
from fedvl.errors import FedVLError
from fedvl.evaluation.predict import Conversation
from fedvl.experiment import read_experiment
from fedvl.federation.journal import Journal
from fedvl.federation.round import read_state
from fedvl.methods import load_method
from fedvl.methods.base import Method, Options, Task
from fedvl.methods.zero_shot import ZeroShot
from fedvl.models.checkpoint import load_model
from fedvl.models.clip import DualEncoder
from fedvl.preparation import embed_names, pick_device
from fedvl.tensors import Tensors, load, unflatten

BATCH = 32  # images that a method without a memory is asked about together; for one with a memory it is in the run's settings


class Reply(NamedTuple):
    """What is said of one image."""

    ranked: list[tuple[str, float]]  # the likeliest names first, with their share of the softmax
    entropy: float
    example_of: str | None  # the class that it is remembered as an example of
    zero_shot: list[tuple[str, float]]  # what the pretrained model says by itself

    def told(self) -> dict[str, Any]:
        """As JSON has it, in the service and on the command line."""
        return {
            "ranked": [{"name": name, "score": score} for name, score in self.ranked],
            "entropy": self.entropy,
            "prototype_of": self.example_of,
            "zero_shot": [{"name": name, "score": score} for name, score in self.zero_shot],
        }


class User:
    """Somebody who asks about some class names: the model made for them, and what it remembers of their images."""

    def __init__(self, method: Method, tensors: Tensors, client_weights: dict[int, float]) -> None:
        self.names = method.task.class_names
        self.client_weights = client_weights
        self.remembers = method.role.remembers
        self.conversation = Conversation(method, tensors)
        self._zero_shot = Conversation(ZeroShot(Options(), method.task), {})

    def ask(self, images: Sequence[Tensors], top: int) -> list[Reply]:
        """Replies to the next images, which the method sees as one batch; ``top`` names each."""
        inputs = {form: torch.stack([image[form] for image in images]) for form in images[0]}
        answer = self.conversation.ask(inputs)
        columns = (
            self._ranked(answer.scores, top),
            answer.entropy.tolist(),
            [self.names[c] if c >= 0 else None for c in answer.example_of.tolist()],
            self._ranked(self._zero_shot.ask(inputs).scores, top),
        )
        return [Reply(*row) for row in zip(*columns, strict=True)]

    def _ranked(self, scores: Tensor, top: int) -> list[list[tuple[str, float]]]:
        """The first class wins a tie, as in evaluation."""
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top]
        shares = scores.softmax(-1).gather(-1, order)
        return [
            [(self.names[c], share) for c, share in zip(*row, strict=True)]
            for row in zip(order.tolist(), shares.tolist(), strict=True)
        ]


class FinishedRun:
    """The model of a run folder. Files are read once and verified; nothing is written."""

    def __init__(self, folder: Path, device: str | None = None) -> None:
        self.folder = folder
        self.result = read_result(folder)
        self.experiment = read_experiment(folder)
        self.device = pick_device(device or self.experiment.device)
        encoder = load_model(self.experiment.model.name, self.device)
        if not isinstance(encoder, DualEncoder):
            raise FedVLError(
                f"Method '{self.name}' reads an image and a text together, and here images alone are asked about; "
                "serve a run of a CLIP-like model."
            )
        if encoder.fingerprint != self.result["model_fingerprint"]:
            raise FedVLError(
                f"The model '{encoder.name}' is not the one that this run was trained with; put that one back."
            )
        self.encoder = encoder
        self._type = load_method(self.experiment.method.name)
        self._options = self._type.options_type.model_validate(self.experiment.method.options)
        tensors = {name: load(folder / name, sha256) for name, sha256 in self.result["files_sha256"].items()}
        self._shared = self._placed(tensors["model.safetensors"])
        self._last = unflatten(self._placed(tensors.get("kept.safetensors", {})))
        self.forms = self._type.forms(self._options)
        if self._type.uses_target or self._method(self.class_names[:1], self.experiment.evaluation.protocol).clusters:
            raise FedVLError(
                f"Method '{self.name}' sorted images into clusters without names; serve a run of another method or protocol."
            )
        # a network that clusters what is new to it can name none but its own classes
        names_anything = not self._method(self.class_names[:1], "open").clusters
        self.answers_new_classes = self._type.vocabulary != "trained" and names_anything

    @property
    def name(self) -> str:
        """The method's, whether it is FedVL's or a file of one's own."""
        return Path(self.experiment.method.name).stem

    @property
    def class_names(self) -> list[str]:
        """The names that the run itself was asked about."""
        return list(self.result["class_names"])

    @property
    def templates(self) -> list[str]:
        return list(self.result["templates"])

    def user(
        self, names: Sequence[str] | None = None, templates: Sequence[str] | None = None, client: int | None = None
    ) -> User:
        """A new user who asks about these names (the run's own if none); ``client``: with that client's personal model."""
        names = list(names or self.class_names)
        if len(set(names)) < len(names):
            raise FedVLError("A class name is given twice; give each once.")
        if not all(name.strip() for name in names):
            raise FedVLError("A class name is empty; leave it out.")
        if any(name != name.encode(errors="replace").decode() for name in (*names, *(templates or []))):
            raise FedVLError("A class name or template holds half a character (a lone surrogate); mend it.")
        if any("{}" not in template for template in templates or []):
            raise FedVLError("A template has {} where the class name goes, for example 'a photo of a {}.'.")
        if set(names) == set(self.class_names):
            names = self.class_names  # in the order in which the method was trained on them
        if not self.answers_new_classes and (names != self.class_names or templates):
            shown = ", ".join(self.class_names[:20]) + (", ..." if len(self.class_names) > 20 else "")
            raise FedVLError(
                f"Method '{self.name}' knows only the classes that it was trained on ({shown}), in its own templates; "
                "leave out names and templates."
            )
        method = self._method(names, self.experiment.evaluation.protocol, templates)
        tensors = method.tailor(self._shared, self._last)
        if client is not None:
            tensors = {**tensors, **self._private(client)}
        return User(method, tensors, method.client_weights(self._last) if self._last else {})

    def read(self, image: bytes | Path, name: str = "") -> Tensor:
        """An image file as the encoder reads it; raises `BadImage`."""
        return self.encoder.preprocess(decode(image, name))

    def encode(self, pixels: Sequence[Tensor]) -> list[Tensors | BadImage]:
        """The forms of each image that the method wants, and those that zero-shot does."""
        if not pixels:
            return []
        embeddings = encode_images(self.encoder, "features", pixels).float().to(self.device)
        forms = {"embeddings": embeddings, "features": normalize(embeddings, dim=-1)}
        for kind in {"pixels", "patches"}.intersection(self.forms):
            forms[kind] = encode_images(self.encoder, kind, pixels).to(self.device)
        return [
            {form: tensor[row] for form, tensor in forms.items() if form in (*self.forms, "features")}
            if finite
            else BadImage("the model gives numbers for it that are not finite.")
            for row, finite in enumerate(embeddings.isfinite().all(1).tolist())
        ]

    def batch_size(self, user: User) -> int:
        return self.experiment.evaluation.batch_size if user.remembers else BATCH

    def _method(self, names: Sequence[str], protocol: str, templates: Sequence[str] | None = None) -> Method:
        task = Task(
            tuple(names),
            embed_names(names, templates or self.templates, self.encoder, self.device),
            self.encoder,
            self.experiment.data.clients,
            self.experiment.seed,
            protocol=protocol,
        )
        return self._type(self._options, task)

    def _private(self, client: int) -> Tensors:
        """What a client of a personal run trained for itself, which only a simulated federation has in one place."""
        if self.experiment.evaluation.protocol != "personal":
            raise FedVLError("This run's clients have no model of their own; leave out the client.")
        rounds = self.result["rounds"]
        tensors = Journal(self.folder / "journal").tensors(rounds) if rounds else {}
        owners = read_state(tensors, self.device).private
        if client not in owners:
            known = ", ".join(map(str, owners)) or "none"
            raise FedVLError(f"This run has kept nothing of client {client}'s own; it has that of: {known}.")
        return owners[client]

    def _placed(self, tensors: Tensors) -> Tensors:
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}


def read_result(folder: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_bytes())
    except (OSError, ValueError) as error:
        raise FedVLError(f"There is no finished run in {folder}; give the folder of one, such as runs/NAME.") from error
    if "files_sha256" not in result:
        raise FedVLError(f"The run in {folder} was made by an older FedVL, without hashes; run it again.")
    return result
