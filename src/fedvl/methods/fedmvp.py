"""FedMVP (Singha et al., 2025): an averaged network makes visual prompts of image and texts.

An image's patches attend to sentences about a client's classes; the mean of what neighbouring
patches found gives a few prompts, which join the patches on their way through the frozen tower. A
class's score is the mean over its sentences. The loss also keeps the prompted feature near the
frozen feature of the mirrored image. Once a client's loss is small, the block of attention is held
and only low-rank changes of its inputs are trained, and the layer that lifts texts to the width of
images.

Where there is a choice:

- Sentences come from a JSON file of the user's, ``{"cat": ["whiskers, which ...", ...], ...}``: the
  paper asked a language model for them. A class that it does not name has its template's text.
- The published code does not run, for a file is missing and only an epoch's last batch is trained
  on; what it leaves open follows PMFLT's repair of it. Attention has no residual there.
- There the low-rank changes are left out until the block is held. Here they are in, and trained,
  from the start, so that all users have one model.
- Like the published client, one trains with sentences of its own classes, and classifies its
  images among these alone (``classes``); a query has those of the queried classes.
- Half of the batches are mirrored for that distance; with ``mirror = "always"`` all of them.
- Clients count equally.
"""

from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool1d, linear, normalize

from fedvl.errors import FedVLError
from fedvl.files import MAX_JSON, parse_json, read_file
from fedvl.methods.base import Batch, Method, Options, Samples, Task
from fedvl.methods.fedtpg import unit_texts
from fedvl.methods.parts.adapters import linear_layer
from fedvl.methods.parts.cosines import cosine_scores, full_precision
from fedvl.methods.parts.cross_attention import HEADS, block, block_start, normalised
from fedvl.methods.parts.losses import label_loss, masked_mean
from fedvl.methods.parts.prompts import CONTEXT_DEVIATION
from fedvl.methods.roles import Private, Role
from fedvl.seeding import Draw, Uniform
from fedvl.tensors import Tensors

TRAINING = {"learning_rate": 0.003, "momentum": 0.9, "weight_decay": 1e-5, "batch_size": 128, "schedule": "cosine"}
PROJECTIONS = ("query", "key", "value")


class FedMVPOptions(Options):
    attributes: str | None = None
    """JSON file of sentences about each class; the template's text if absent."""
    classes: Literal["own", "all"] = "own"
    """Classes whose sentences a client trains with: those that it has images of, or all."""
    mirror: Literal["coin", "always"] = "coin"
    """Whether the images of the distance are mirrored: half of the batches, or always."""
    prompts: int = Field(4, ge=1)
    """Visual prompts per image."""
    rank: int = Field(8, ge=1)
    """Rank of the low-rank changes."""
    alpha: float = Field(10.0, ge=0)
    """Weight of the distance to the frozen feature of the mirrored image."""
    settled_loss: float = Field(0.5, ge=0)
    """Batch loss below which a client freezes the attention block."""


class FedMVP(Method):
    inputs = ("features", "pixels")
    labels = "candidates"
    vocabulary = "any"
    scope = "row"
    through_encoder = True
    weighting = "clients"
    options: FedMVPOptions
    presets = {"paper": {"training": TRAINING, "federation": {"rounds": 100}, "data": {"shots": 8}}}

    def __init__(self, options: FedMVPOptions, task: Task) -> None:
        super().__init__(options, task)
        if not task.clip.vision_layers or task.clip.vision_width % HEADS:
            raise FedVLError(
                f"FedMVP needs an image tower that is a ViT of a width that {HEADS} heads divide, and that of "
                f"{task.clip.name} is not; use another model."
            )
        self.mirrored = 0.5 if options.mirror == "coin" else 1.0  # chance that a batch is mirrored
        sentences = read_sentences(options.attributes, task) if options.attributes else {}
        found = [
            unit_texts(task, sentences[c]) if c in sentences else text[None]
            for c, text in enumerate(task.text_features)
        ]
        self.sentences = torch.cat(found)  # of all classes, unit vectors
        owners = torch.repeat_interleave(torch.tensor([len(each) for each in found])).to(self.sentences.device)
        belongs = owners == torch.arange(len(found), device=owners.device)[:, None]
        self.shares = belongs / belongs.sum(-1, keepdim=True)  # classes x sentences: the mean over a class's own

    def start(self, generator: torch.Generator) -> Tensors:
        width, rank = self.task.clip.vision_width, self.options.rank
        weight, bias = linear_layer(self.sentences.shape[1], width, generator)
        tensors = {"lift.weight": weight, "lift.bias": bias, **block_start(width, width, generator)}
        for name in PROJECTIONS:
            tensors[f"pair.{name}.left"] = CONTEXT_DEVIATION * torch.randn(width, rank, generator=generator)
            tensors[f"pair.{name}.right"] = CONTEXT_DEVIATION * torch.randn(rank, width, generator=generator)
        return {name: tensor.to(self.sentences) for name, tensor in tensors.items()}

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        settled = self.sentences.new_zeros(())  # 1 once the client holds the block
        return {"settled": settled, "own_classes": self.own_classes(samples)}

    def own_classes(self, samples: Samples) -> Tensor:
        """Return 1 for the classes that a client trains with."""
        found = torch.bincount(samples.labels[samples.labels >= 0], minlength=len(self.shares)) > 0
        everything = self.options.classes == "all" or not found.any()
        return torch.ones_like(found) if everything else found

    def roles(self) -> dict[str, Role]:
        return {"own_classes": Private(lasts=False)}  # it follows from the client's data

    def noise(self) -> dict[str, Draw]:
        return {"mirror": Uniform()}

    def generated(self, tensors: Tensors, pixels: Tensor) -> Tensor:
        """Return the prompts of each image: rows x prompts x width."""
        patches = self.task.clip.embed_patches(pixels)
        texts = linear(self.sentences, tensors["lift.weight"], tensors["lift.bias"])
        query, key, value = (
            x + x @ tensors[f"pair.{name}.left"] @ tensors[f"pair.{name}.right"]
            for name, x in zip(PROJECTIONS, (patches, texts, texts), strict=True)
        )
        present = None
        if "own_classes" in tensors:
            present = ((self.shares > 0) & tensors["own_classes"][:, None]).any(0)  # sentences of its classes
        found = block(tensors, query, normalised(tensors, "names", key), value, present)
        return adaptive_avg_pool1d(found.mT, self.options.prompts).mT

    def features(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        pixels = self.task.clip.normalise(inputs["pixels"]).to(self.sentences.dtype)
        images = self.task.clip.encode_image(pixels, tokens=self.generated(tensors, pixels))
        return normalize(images.to(self.sentences.dtype), dim=-1)

    def scores(self, images: Tensor) -> Tensor:
        """Return the mean over each class's sentences of s cos(image, sentence)."""
        with full_precision(images):
            return cosine_scores(self.scale, images, self.sentences) @ self.shares.T

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        """Return the loss, and whether the client holds the block from now on."""
        settled = tensors["settled"]

        held = {
            name: tensor.detach() + (1 - settled) * (tensor - tensor.detach())
            for name, tensor in tensors.items()
            if not name.startswith(("lift.", "pair.", "own_classes"))
        }
        loss = self.loss({**tensors, **held}, batch)
        small = (loss.detach() < self.options.settled_loss).to(settled)
        return loss, {"settled": torch.maximum(settled, small)}

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        images = self.features(tensors, batch.inputs)
        with torch.no_grad():
            pixels = self.task.clip.normalise(batch.inputs["pixels"]).to(images.dtype)
            turned = torch.where(batch.noise["mirror"] < self.mirrored, pixels.flip(-1), pixels)
            frozen = normalize(self.task.clip.encode_image(turned).to(images.dtype), dim=-1)
        apart = masked_mean(1 - (images * frozen).sum(-1), batch.mask)
        scores = self.scores(images)
        scores = scores.masked_fill(~tensors["own_classes"], torch.finfo(scores.dtype).min)
        return label_loss(scores, batch) + self.options.alpha * apart

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        return self.scores(self.features(tensors, inputs))


def read_sentences(file: str, task: Task) -> dict[int, list[str]]:
    """Return the sentences of the classes that a JSON file names, by class."""
    path = Path(file).expanduser()
    try:
        found = parse_json(read_file(path, MAX_JSON))
    except (OSError, ValueError) as error:
        raise FedVLError(f"{path} cannot be read as JSON; name another file as method.attributes.") from error
    if not isinstance(found, dict) or not all(
        isinstance(each, list) and each and all(isinstance(text, str) for text in each) for each in found.values()
    ):
        raise FedVLError(f"{path} must be a JSON object of class names, each with a list of sentences.")
    return {c: found[name] for c, name in enumerate(task.class_names) if name in found}
