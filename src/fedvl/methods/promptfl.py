"""PromptFL (Guo et al., 2023): clients learn words before the class name, and the server averages them.

The context of CoOp (Zhou et al., 2022): learned vectors, the same for all classes, stand where "a photo of a" would. Both
towers are frozen; image features are computed once, and class texts once a step for the whole batch. Since it names no
class, the context answers for any class names.

Training on some classes does not mend what a context drawn at random does to others: whoever will be asked about new classes
should begin with words (CoOp's CTX_INIT).

The released code holds live references instead of copies, so that its "average" is the last client's context, and one
optimiser serves all clients, so that momentum leaks from one to the next. Neither is repeated: clients are averaged, equally
as its code means to, and each begins a round with a fresh optimiser. Its crops and flips are not made: features are cached.
"""

import torch
from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Method, Options, Task
from fedvl.methods.parts.prompts import ClassTexts
from fedvl.tensors import Tensors

TRAINING = {"learning_rate": 0.001, "momentum": 0.9, "weight_decay": 5e-4, "batch_size": 32}


class PromptOptions(Options):
    context: int = Field(16, ge=1)  # learned tokens before the class name
    words: str = ""  # what the context begins as, such as "a photo of a", whose length it then has; random if empty


class PromptFL(Method):
    labels = "candidates"
    vocabulary = "any"
    scope = "row"
    options: PromptOptions
    weighting = "clients"  # as the released code
    presets = {
        "paper": {"training": TRAINING},
        "released": {"training": {**TRAINING, "local_epochs": 5}, "federation": {"rounds": 20}},
    }

    def __init__(self, options: PromptOptions, task: Task) -> None:
        super().__init__(options, task)
        self.texts = ClassTexts(task.clip, task.class_names, options.context, words=options.words)

    def start(self, generator: torch.Generator) -> Tensors:
        return {"context": self.texts.start(generator)}

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        return self.texts.scores(tensors["context"], inputs["features"])
