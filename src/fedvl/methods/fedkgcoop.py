"""FedKgCoOp (FedTPG's baseline): KgCoOp's prompt (Yao et al., 2023), averaged over the clients.

PromptFL with a pull towards what the frozen model knows. The loss is L_ce + lambda L_kg, where L_kg
is the mean over the classes of |T(context) - T_0|^2, the distance of a class's text to that of its
template. So classes that nobody trained on stay near where they were. The context
begins with the words "a photo of a".

The public code of KgCoOp and FedTPG has 1 - cos in place of the distance, which is half of it for
unit vectors: preset ``released`` has half of lambda. Clients count equally, as in FedTPG's code.
"""

from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Batch
from fedvl.methods.promptfl import TRAINING, PromptFL, PromptOptions
from fedvl.tensors import Tensors


class FedKgCoOpOptions(PromptOptions):
    words: str = "a photo of a"
    """Initial context, which also sets its length; random if empty."""
    pull: float = Field(8.0, ge=0)
    """Weight lambda of the squared distance to the template texts."""


class FedKgCoOp(PromptFL):
    options: FedKgCoOpOptions
    presets = {
        "paper": {"training": {**TRAINING, "learning_rate": 0.002}},
        "released": {"training": {**TRAINING, "learning_rate": 0.002}, "method": {"pull": 4.0}},
    }

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        """Return L_ce + lambda L_kg."""
        texts = self.texts.features(tensors["context"])
        return super().loss(tensors, batch) + self.options.pull * self.distance(texts)

    def distance(self, texts: Tensor) -> Tensor:
        """Return L_kg, the mean squared distance of class texts to those of the templates."""
        return (texts - self.task.text_features).square().sum(-1).mean()
