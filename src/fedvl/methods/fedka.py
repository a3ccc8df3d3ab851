"""FedKA (Sun et al., 2022) on a ResNet: aligns clients' features with unlabelled target images.

Besides the cross-entropy a client minimises two distances between its features of its own images
and the received model's features of target images: MK-MMD, and a discriminator's loss (DANN, with
gradient reversal). Target images are the 20 % of the querying user's images that the open protocol
sets aside; every client gets them, without labels.

This is FedKA as Fed-MP can have compared with it. Voting, its third part, is left out: clients with
disjoint classes have no common label. The public notebook has MMD in every eighth batch; here it is
in each. Discriminators stay with clients as heads do: Fed-MP averages the feature extractor only.
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedvl.config import Settings
from fedvl.errors import FedVLError
from fedvl.methods.base import Batch, Samples, Task
from fedvl.methods.fedavg_nn import FedAvgNN, NetworkOptions
from fedvl.methods.parts.adapters import linear_layer
from fedvl.methods.parts.alignment import domain_loss, kernel_discrepancy, reverse_gradient
from fedvl.methods.roles import Private, Role, Shared
from fedvl.models.resnet import forward
from fedvl.seeding import Draw, Integers
from fedvl.tensors import Tensors

DISCRIMINATOR = ("domain.0.weight", "domain.0.bias", "domain.1.weight", "domain.1.bias")
DISCRIMINATOR_WIDTH = 100  # width of the discriminator, Ganin and Lempitsky's


class FedKAOptions(NetworkOptions):
    alignment: float = Field(1.0, ge=0)
    """Weight of the MK-MMD loss."""
    adversarial: float = Field(1.0, ge=0)
    """Weight of the discriminator's loss."""
    ramp: int = Field(100, ge=1)
    """Local steps over which the reversed gradient grows from zero to nearly full strength."""
    target_batch: int = Field(16, ge=1)
    """Unlabelled target images per step."""


class FedKA(FedAvgNN):
    uses_target = True
    options: FedKAOptions
    presets: ClassVar[dict[str, Settings]] = {
        "paper": {
            "training": {**FedAvgNN.presets["paper"]["training"], "local_epochs": 2},
            "evaluation": {"protocol": "open", "batch_size": 256},
        }
    }

    def __init__(self, options: FedKAOptions, task: Task) -> None:
        super().__init__(options, task)
        if task.target is None:
            raise FedVLError(
                "fedka trains with unlabelled images of the querying user, and there are none; "
                "use --protocol open, with at least 5 test images of the queried classes."
            )
        self.target = task.target["pixels"]

    def roles(self) -> dict[str, Role]:
        own: dict[str, Role] = dict.fromkeys(DISCRIMINATOR, Private(trained=True, lasts=False))
        return {**super().roles(), **own, "steps": Shared(trained=False)}

    def notes(self) -> list[str]:
        return [
            *super().notes(),
            f"Every client trained with {len(self.target)} unlabelled images of the querying user, none of the test.",
        ]

    def start(self, generator: torch.Generator) -> Tensors:
        return {**super().start(generator), "steps": self._placed(torch.zeros(()))}

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        layers = (
            linear_layer(self.feature_width, DISCRIMINATOR_WIDTH, generator),
            linear_layer(DISCRIMINATOR_WIDTH, 1, generator),
        )
        discriminator = zip(DISCRIMINATOR, (self._placed(part) for layer in layers for part in layer), strict=True)
        return {**super().join(samples, generator), **dict(discriminator)}

    def noise(self) -> dict[str, Draw]:
        return {"target": Integers(len(self.target), (self.options.target_batch,))}

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        loss, own, changed = self.learn(tensors, batch)
        images = self._images({"pixels": self.target[batch.noise["target"]]})
        # Batch statistics, as for the client's images: before the first round there are no others.
        target, _ = forward(batch.received, images, training=True)
        progress = tensors["steps"] / self.options.ramp
        strength = 2 / (1 + torch.exp(-5 * progress)) - 1
        scores = discriminate(tensors, reverse_gradient(own, strength)), discriminate(tensors, target)
        loss = loss + self.options.adversarial * domain_loss(*scores, batch.mask)
        loss = loss + self.options.alignment * kernel_discrepancy(own, target, batch.mask)
        return loss, {**changed, "steps": tensors["steps"] + 1}


def discriminate(tensors: Tensors, features: Tensor) -> Tensor:
    """Return one score per row, above 0 for target-like features."""
    first, first_bias, second, second_bias = (tensors[name] for name in DISCRIMINATOR)
    return (torch.relu(features @ first.T + first_bias) @ second.T + second_bias)[:, 0]
