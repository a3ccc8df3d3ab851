"""PromptFolio (Pan et al., 2024): class texts are a fixed mixture of a shared and a local prompt.

Each client learns two contexts: one that the server averages by numbers of samples, and one that
stays local. The text of a class is (1 - theta) T(shared) + theta T(local); the paper's theory says
that such a portfolio has both prompts' signals and less than their noise. Both texts are unit
vectors, and the mixture is not normalised again. Without a local context (a new user) the shared
one answers alone.

The paper's experiments have theta 0.2; the released code defaults to 0.4 and to 8 tokens. Its one
cosine schedule is stepped by every client's epochs, so that rates depend on a client's number: here
the rate falls with the rounds, for all clients alike.
"""

import torch
from pydantic import Field
from torch import Tensor

from fedvl.config import Settings
from fedvl.methods.base import Samples
from fedvl.methods.parts.cosines import cosine_scores
from fedvl.methods.promptfl import PromptFL, PromptOptions
from fedvl.methods.roles import Private, Role
from fedvl.tensors import Tensors

SETTING: dict[str, Settings] = {
    "training": {
        "learning_rate": 0.002,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "batch_size": 32,
        "schedule": "cosine",
    },
    "federation": {"rounds": 10},
    "evaluation": {"protocol": "personal"},
}


class PromptFolioOptions(PromptOptions):
    theta: float = Field(0.2, ge=0, le=1)
    """Share of the local prompt's texts in the mixture."""


class PromptFolio(PromptFL):
    options: PromptFolioOptions
    weighting = "samples"
    presets = {
        "paper": SETTING,
        "released": {
            **SETTING,
            # MAX_EPOCH of the trainer's yaml, and the default of --train_batch_size, which override the script
            "training": {**SETTING["training"], "local_epochs": 5, "batch_size": 16},
            "method": {"theta": 0.4, "context": 8},
        },
    }

    def roles(self) -> dict[str, Role]:
        return {"local_context": Private(trained=True)}

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        return {"local_context": self.texts.start(generator)}

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        if "local_context" not in tensors:
            return super().predict(tensors, inputs)
        contexts = torch.stack([tensors["context"], tensors["local_context"]])
        shared, local = torch.func.vmap(self.texts.features)(contexts)  # one pass for both
        mixture = torch.lerp(shared, local, self.options.theta)
        return cosine_scores(self.scale, inputs["features"], mixture)
