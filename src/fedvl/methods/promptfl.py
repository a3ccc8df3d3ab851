"""PromptFL (Guo et al., 2023): clients learn a context for class names; the server averages it.

The context of CoOp (Zhou et al., 2022): learned vectors, the same for all classes, replace "a photo
of a". Both towers are frozen; image features are computed once, class texts once per step. The
context names no class, so any class names can be queried.

Training does not repair what a random context does to other classes: to query new classes, start
with words (CoOp's CTX_INIT).

The released code holds references, not copies, so its "average" is the last client's context, and
momentum leaks between clients through one optimiser. Here clients are averaged, equally as it
intends, with fresh optimisers each round; crops and flips are left out, as features are cached.
"""

import torch
from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Method, Options, Task
from fedvl.methods.parts.prompts import ClassTexts
from fedvl.tensors import Tensors

TRAINING = {"learning_rate": 0.001, "momentum": 0.9, "weight_decay": 5e-4, "batch_size": 32}


class PromptOptions(Options):
    context: int = Field(16, ge=1)
    """Learned tokens before the class name."""
    words: str = ""
    """Initial context, such as "a photo of a", which also sets its length; random if empty."""


class PromptFL(Method):
    labels = "candidates"
    vocabulary = "any"
    scope = "row"
    through_encoder = True
    options: PromptOptions
    weighting = "clients"  # as the released code
    presets = {
        "paper": {"training": TRAINING},
        "released": {"training": {**TRAINING, "local_epochs": 5}, "federation": {"rounds": 20}},
    }

    def __init__(self, options: PromptOptions, task: Task) -> None:
        super().__init__(options, task)
        length = None if options.words else options.context
        self.texts = ClassTexts(task.clip, task.class_names, length, words=options.words)

    def start(self, generator: torch.Generator) -> Tensors:
        return {"context": self.texts.start(generator)}

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        return self.texts.scores(tensors["context"], inputs["features"])
