"""FedPHA (Fang et al., 2025): local prompts of any length beside a shared one of fixed length.

Each client learns a context of a length of its own, which stays local and answers its queries, and
the context that the server averages by numbers of samples. Both are trained on the labels. The
local context is pulled to its projection onto the null space of the shared context's main
directions, which is what the other clients do not already say, and its texts are pushed from the
shared ones until they are ``margin`` apart. A new user is answered by the shared context.

Where there is a choice:

- Main directions are right singular vectors of the context as the server hands it out, computed
  once a round. The released code computes them in each step and differentiates through the SVD,
  whose gradient explodes where singular values are near each other.
- The null space has all directions but the main ones. The released code keeps only those that the
  context itself has, 13 of 512 (``space = "rows"``).
- A client draws its length from ``lengths``: 4 to 32 in the paper's comparison, 16 elsewhere. The
  released code reads shorter prompts at the end of the longest; here each at its own end.
- The pull is a mean over all numbers of unit texts, at most 4 / 512: it hardly moves anything.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import mse_loss, relu

from fedvl.errors import FedVLError
from fedvl.methods.base import Batch, Method, Options, Samples, Task
from fedvl.methods.parts.cosines import cosine_scores
from fedvl.methods.parts.losses import label_loss
from fedvl.methods.parts.prompts import ClassTexts
from fedvl.methods.roles import Private, Role
from fedvl.tensors import Tensors

SETTING = {
    "training": {"learning_rate": 0.001, "momentum": 0.9, "weight_decay": 5e-4, "batch_size": 32},
    "federation": {"rounds": 50},
    "evaluation": {"protocol": "personal"},
}


class FedPHAOptions(Options):
    context: int = Field(16, ge=1)
    """Tokens of the shared context."""
    lengths: list[int] = Field([16], min_length=1)
    """Possible lengths of a local context, of which each client draws one."""
    words: str = ""
    """Initial words of all contexts, repeated to their length; random if empty."""
    ratio: float = Field(0.8, ge=0, le=1)
    """Share of the shared context's directions that do not count as principal."""
    space: Literal["null", "rows"] = "null"
    """Directions that a projection keeps: all other ones (null), or those of the context itself
    (rows).
    """
    margin: float = Field(1.0, ge=0)
    """Distance alpha up to which local texts are pushed away from the shared ones."""


class FedPHA(Method):
    labels = "candidates"
    vocabulary = "any"
    scope = "row"
    through_encoder = True
    options: FedPHAOptions
    presets = {"paper": SETTING, "released": {**SETTING, "method": {"space": "rows"}}}

    def __init__(self, options: FedPHAOptions, task: Task) -> None:
        super().__init__(options, task)
        if min(options.lengths) < 1:
            raise FedVLError("method.lengths holds a number below 1; a context has one token at least.")
        self.texts = ClassTexts(
            task.clip, task.class_names, max(options.context, *options.lengths), words=options.words
        )
        directions = min(options.context, task.clip.text_width)
        self.main = int(round(directions * (1 - options.ratio), 6))  # 5 * (1 - 0.8) is just below 1

    def roles(self) -> dict[str, Role]:
        return {"local_context": Private(trained=True), "directions": Private(lasts=False, begin=self.directions)}

    def start(self, generator: torch.Generator) -> Tensors:
        return {"context": self.texts.start(generator)[: self.options.context]}

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        place = int(torch.randint(len(self.options.lengths), (), generator=generator))
        return {"local_context": self.texts.start(generator)[: self.options.lengths[place]]}

    def directions(self, name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
        """Return the rows of V^T that a projection removes or, with ``rows``, those it keeps."""
        rows: Tensor = torch.linalg.svd(tensors["context"], full_matrices=False).Vh  # by falling singular values
        return rows[: self.main] if self.options.space == "null" else rows[self.main :]

    def project(self, context: Tensor, directions: Tensor) -> Tensor:
        along = context @ directions.T @ directions
        return context - along if self.options.space == "null" else along

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        """Return the losses of both contexts' scores, the pull and the push."""
        local, images = tensors["local_context"], batch.inputs["features"]
        contexts = torch.stack([local, self.project(local, tensors["directions"])])
        own, projected = torch.func.vmap(self.texts.features)(contexts)
        shared = self.texts.features(tensors["context"])
        losses = [label_loss(cosine_scores(self.scale, images, texts), batch) for texts in (own, shared)]
        # a distance whose gradient is a number where both texts are the same
        apart = (own - shared).square().sum(-1).clamp(min=1e-12).sqrt()
        return sum(losses) + mse_loss(own, projected) + relu(self.options.margin - apart).mean()

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        return self.texts.scores(tensors.get("local_context", tensors["context"]), inputs["features"])
