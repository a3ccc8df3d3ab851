"""pFedPrompt (Guo et al., 2023): PromptFL's context and a local memory of each client's images.

No code is public; this is re-implemented from its description: a consensus prompt for language, and
personalisation without parameters by attention over local visual features. The memory is read as in
Tip-Adapter (Zhang et al., 2022): each training image of the client adds exp(-beta (1 - cos)) to the
score of its class. It is private, never sent, and rebuilt each round, to follow its labels. In
training an image does not read its own entry, which has its label. Without a memory (the global
model, a new user) it predicts as PromptFL.
"""

import torch
from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Batch, Samples
from fedvl.methods.parts.cosines import full_precision
from fedvl.methods.parts.losses import label_loss
from fedvl.methods.promptfl import PromptFL, PromptOptions
from fedvl.methods.roles import Private, Role
from fedvl.tensors import Tensors


class PFedPromptOptions(PromptOptions):
    alpha: float = Field(1.0, ge=0)
    """Weight of the memory; Tip-Adapter starts from alpha 1 and beta 5.5."""
    beta: float = Field(5.5, gt=0)
    """Sharpness of the comparison between an image and the memory."""


class PFedPrompt(PromptFL):
    vocabulary = "trained"
    scope = "batch"  # a row reads the memory of other rows
    options: PFedPromptOptions

    def roles(self) -> dict[str, Role]:
        return dict.fromkeys(("memory", "memory_classes"), Private(per_sample=True, lasts=False))

    def notes(self) -> list[str]:
        return ["pFedPrompt is re-implemented from its description: its authors published no code."]

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        """Return keys and values: unit features, and classes counted from 1, for padding is 0."""
        return {"memory": samples.inputs["features"].clone(), "memory_classes": samples.labels + 1}

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        """Return the loss of the scores with the memory of the client's other images."""
        others = torch.arange(len(tensors["memory"]), device=batch.position.device) != batch.position[:, None]
        scores = super().predict(tensors, batch.inputs) + self.remembered(tensors, batch.inputs, others)
        return label_loss(scores, batch)

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        scores = super().predict(tensors, inputs)
        return scores + self.remembered(tensors, inputs) if "memory" in tensors else scores

    def remembered(self, tensors: Tensors, inputs: Tensors, readable: Tensor | None = None) -> Tensor:
        """Return alpha exp(-beta (1 - cos)) summed over each class's entries (rows x classes)."""
        features = inputs["features"]
        classes = torch.arange(1, len(self.task.class_names) + 1, device=features.device)
        says = tensors["memory_classes"][:, None] == classes  # entries x classes
        with full_precision(features):  # sums over many entries
            near = torch.exp(self.options.beta * (features @ tensors["memory"].T - 1))
            return self.options.alpha * (near if readable is None else near * readable) @ says.to(near)
