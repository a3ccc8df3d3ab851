"""FedPGP (Cui et al., 2024): a shared context, and a low-rank change of it that stays local.

The context of client i is p_i = p_G + U_i V_i: the server averages p_G by numbers of samples, and
U_i V_i of a small rank never leaves. A contrastive loss pulls the texts of p_G to those of the
frozen model, so that new classes are still known, and pushes the texts of p_i away from them.
Without U_i and V_i (a new user) p_G answers alone.

Where there is a choice:

- The frozen texts are those of the class templates. The released code takes them from a sentence of
  placeholders, "X X ... X NAME." (``frozen = "placeholder"``), which says nothing.
- The released script has rank 8, mu 0.5 and N = 2 contexts, whose texts are 2 C columns; here there
  is one context. The program's own defaults are rank 4 and mu 1.
- The released code gives all clients one optimiser, whose momentum goes from client to client.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import softplus

from fedvl.methods.base import Batch, Samples, Task
from fedvl.methods.parts.cosines import cosine_scores
from fedvl.methods.parts.losses import label_loss
from fedvl.methods.parts.prompts import CONTEXT_DEVIATION, ClassTexts
from fedvl.methods.promptfl import PromptFL, PromptOptions
from fedvl.methods.roles import Private, Role
from fedvl.tensors import Tensors

SETTING = {
    "training": {
        "learning_rate": 0.001,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "batch_size": 16,
        "local_epochs": 2,
    },
    "federation": {"rounds": 25},
    "evaluation": {"protocol": "personal"},
}


class FedPGPOptions(PromptOptions):
    rank: int = Field(8, ge=1)
    """Rank of the local change."""
    mu: float = Field(0.5, ge=0)
    """Weight of the contrastive loss."""
    temperature: float = Field(0.5, gt=0)
    """Temperature of the contrastive loss."""
    frozen: Literal["template", "placeholder"] = "template"
    """Sentence of the frozen texts that p_G is pulled towards."""


class FedPGP(PromptFL):
    options: FedPGPOptions
    weighting = "samples"
    presets = {"paper": SETTING, "released": {**SETTING, "method": {"frozen": "placeholder"}}}

    def __init__(self, options: FedPGPOptions, task: Task) -> None:
        super().__init__(options, task)
        self.frozen = task.text_features
        if options.frozen == "placeholder":
            placeholder = ClassTexts(task.clip, task.class_names, self.texts.context, words="X")
            with torch.no_grad():
                self.frozen = placeholder.features(placeholder.words)

    def roles(self) -> dict[str, Role]:
        return dict.fromkeys(("left", "right"), Private(trained=True))

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        tokens, rank, width = self.texts.context, self.options.rank, self.task.clip.text_width
        shapes = {"left": (tokens, rank), "right": (rank, width)}
        drawn = {name: CONTEXT_DEVIATION * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return {name: tensor.to(self.task.text_embeddings) for name, tensor in drawn.items()}

    def own_context(self, tensors: Tensors) -> Tensor:
        """Return p_i = p_G + U_i V_i, or p_G for who has no U_i."""
        if "left" not in tensors:
            return tensors["context"]
        return tensors["context"] + tensors["left"] @ tensors["right"]

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        """Return the loss of p_i's scores + mu times the contrastive loss."""
        contexts = torch.stack([self.own_context(tensors), tensors["context"]])
        own, shared = torch.func.vmap(self.texts.features)(contexts)  # one pass for both
        scores = cosine_scores(self.scale, batch.inputs["features"], own)
        return label_loss(scores, batch) + self.options.mu * self.contrast(own, shared)

    def contrast(self, own: Tensor, shared: Tensor) -> Tensor:
        """Return the mean of -log(e^(p/t) / (e^(p/t) + e^(n/t))) over the classes.

        p is the cosine of a shared text and the frozen one, n that of the shared and the own one.
        """
        positive, negative = (shared * self.frozen).sum(-1), (shared * own).sum(-1)
        return softplus((negative - positive) / self.options.temperature).mean()

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        return self.texts.scores(self.own_context(tensors), inputs["features"])
