"""FedTPG (Qiu et al., 2024): an averaged network generates the context for any class names.

Learned queries attend to the text embeddings of the bare class names; the output is the context of
these classes. A client's comes from the names of its own classes, among which alone it is trained;
a user's from the queried names. So classes that nobody trained on can be queried.

The released code fixes widths to 512; here they follow the model (text tower and joint). At 512 the
network has the same 4,206,080 numbers. Clients count equally, as there; not its 16-bit arithmetic.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.errors import FedVLError
from fedvl.methods.base import Batch, Method, Options, Samples, Task
from fedvl.methods.parts.cross_attention import HEADS, block, block_start, normalised
from fedvl.methods.parts.losses import label_loss
from fedvl.methods.parts.prompts import CONTEXT_DEVIATION, ClassTexts
from fedvl.methods.roles import Private, Role
from fedvl.tensors import Tensors

TRAINING = {"learning_rate": 0.003, "momentum": 0.9, "weight_decay": 1e-5, "batch_size": 200, "schedule": "cosine"}
GENERATED_AT_ONCE = 256


class FedTPGOptions(Options):
    context: int = Field(4, ge=1)
    """Tokens that the network generates."""
    classes: Literal["own", "all"] = "own"
    """Class names that a client trains with: those of its own images, or all."""


class FedTPG(Method):
    labels = "candidates"
    vocabulary = "any"
    scope = "row"
    through_encoder = True
    options: FedTPGOptions
    weighting = "clients"  # as the released code
    presets = {
        "paper": {"training": TRAINING},
        "released": {"training": TRAINING, "federation": {"rounds": 500}, "data": {"shots": 8}},
    }

    def __init__(self, options: FedTPGOptions, task: Task) -> None:
        super().__init__(options, task)
        if task.clip.text_width % HEADS:
            raise FedVLError(
                f"FedTPG's attention has {HEADS} heads, which do not divide the text width of {task.clip.name}, "
                f"{task.clip.text_width}; use another model."
            )
        self.texts = ClassTexts(task.clip, task.class_names, options.context)
        self.names = unit_texts(task, task.class_names)

    def roles(self) -> dict[str, Role]:
        return {"own_classes": Private(lasts=False)}  # it follows from the client's data

    def start(self, generator: torch.Generator) -> Tensors:
        width = self.task.clip.text_width
        queries = CONTEXT_DEVIATION * torch.randn(self.options.context, width, generator=generator)
        tensors = {"queries": queries, **block_start(width, self.names.shape[1], generator)}
        return {name: tensor.to(self.names.device) for name, tensor in tensors.items()}

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        every = torch.ones(len(self.names), dtype=torch.bool, device=self.names.device)
        if self.options.classes == "all":  # without a look at the labels, which record-level privacy relies on
            return {"own_classes": every}
        own = torch.bincount(samples.labels[samples.labels >= 0], minlength=len(self.names)) > 0
        return {"own_classes": own if own.any() else every}

    def generated(self, tensors: Tensors, present: Tensor | None = None) -> Tensor:
        """Return the context (P x width) for the class names, or for those that are ``present``."""
        names = normalised(tensors, "names", self.names)
        return block(tensors, tensors["queries"], names, names, present)

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        scores = self.predict(tensors, batch.inputs)
        return label_loss(scores.masked_fill(~tensors["own_classes"], torch.finfo(scores.dtype).min), batch)

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        return self.texts.scores(self.generated(tensors, tensors.get("own_classes")), inputs["features"])


def unit_texts(task: Task, texts: Sequence[str]) -> Tensor:
    """Return unit text embeddings."""
    device = task.clip.positional_embedding.device
    with torch.no_grad():
        parts = [
            task.clip.encode_text(task.clip.tokenise(texts[first : first + GENERATED_AT_ONCE]).to(device))
            for first in range(0, len(texts), GENERATED_AT_ONCE)
        ]
    return normalize(torch.cat(parts), dim=-1)
