"""FedAvg of a whole ResNet on pixels (McMahan et al., 2017), as compared in Fed-MP and CacheFL.

CacheFL trains it from scratch (``depth`` 50); Fed-MP starts from ImageNet (``weights``: a file) and
gives each client a new head for its own classes, which is not averaged. The network cannot name
classes without training data: test images are clustered, and the true labels name the clusters.
"""

from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedvl.config import Settings
from fedvl.errors import FedVLError
from fedvl.methods.base import Batch, Method, Options, Samples
from fedvl.methods.parts.adapters import linear_layer
from fedvl.methods.parts.losses import label_loss
from fedvl.methods.roles import Private, Role, Shared
from fedvl.models.resnet import forward, head_scores, initial
from fedvl.tensors import Tensors, load

LAST_LAYER = ("fc.weight", "fc.bias")
NOT_MINE = -1e9  # score of a class that the client has no image of: its head has no such output


class NetworkOptions(Options):
    depth: Literal[18, 50] = 18
    """Number of layers of the ResNet."""
    width: int = Field(64, ge=1)
    """Channels after the stem: 64 in a standard ResNet, fewer for small machines."""
    weights: str | None = None
    """Initial weights: a safetensors file with torchvision's tensor names; random if absent."""


class FedAvgNN(Method):
    inputs = ("pixels",)
    vocabulary = "clusters"
    options: NetworkOptions
    presets: ClassVar[dict[str, Settings]] = {
        "paper": {
            "training": {"optimiser": "adamw", "learning_rate": 5e-4, "weight_decay": 0.01, "batch_size": 32},
            "evaluation": {"batch_size": 256},
        }
    }

    def roles(self) -> dict[str, Role]:
        """Give clients heads of their own where they have classes of their own."""
        heads: dict[str, Role] = dict.fromkeys(LAST_LAYER, Private(trained=True, lasts=False)) if self.clusters else {}
        running: dict[str, Role] = dict.fromkeys(("*running_mean", "*running_var"), Shared(trained=False))
        return {**heads, "mine": Private(lasts=False), **running}

    def notes(self) -> list[str]:
        if not self.clusters:
            return []
        return [
            "This network cannot name classes that it was not trained on: the test images were clustered by k-means "
            "and the clusters named by the true labels (an optimal assignment), so its accuracy is what the best "
            "naming of these clusters would give, and cannot be reached without labels."
        ]

    def start(self, generator: torch.Generator) -> Tensors:
        tensors = initial(self.options.depth, len(self.task.class_names), generator, self.options.width)
        if self.options.weights is not None:
            tensors |= read_weights(Path(self.options.weights), tensors)
        return {
            name: self._placed(tensor) for name, tensor in tensors.items() if not (self.clusters and name in LAST_LAYER)
        }

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        if not self.clusters:
            return {}
        classes = len(self.task.class_names)
        head = zip(LAST_LAYER, linear_layer(self.feature_width, classes, generator), strict=True)
        mine = torch.zeros(classes, device=samples.labels.device).index_fill(0, torch.unique(samples.labels), 1.0)
        return {"mine": mine, **{name: self._placed(tensor) for name, tensor in head}}

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        loss, _, changed = self.learn(tensors, batch)
        return loss, changed

    def learn(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensor, Tensors]:
        """Return the cross-entropy, the pooled features and the new running statistics."""
        features, changed = forward(tensors, self._images(batch.inputs), training=True, present=batch.mask)
        scores = head_scores(tensors, features)
        if self.clusters:
            scores = torch.where(tensors["mine"] > 0, scores, NOT_MINE)
        return label_loss(scores, batch), features, changed

    def represent(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        return forward(tensors, self._images(inputs), training=False)[0]

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        if self.clusters:
            raise FedVLError(
                "A network without a head for these classes cannot name them; use a method that reads names, as fed-mp."
            )
        return head_scores(tensors, self.represent(tensors, inputs))

    @property
    def feature_width(self) -> int:
        return self.options.width * (32 if self.options.depth == 50 else 8)

    def _images(self, inputs: Tensors) -> Tensor:
        return self.task.clip.normalise(inputs["pixels"])

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.task.text_embeddings.device)


def read_weights(path: Path, network: Tensors) -> Tensors:
    """Return the network's tensors from a file, without the head."""
    found = load(path)
    wanted = {name: tensor for name, tensor in network.items() if name not in LAST_LAYER}
    for name, tensor in wanted.items():
        if name not in found:
            raise FedVLError(f"{path} has no tensor '{name}'; give a ResNet of this depth under torchvision's names.")
        if found[name].shape != tensor.shape:
            raise FedVLError(
                f"'{name}' in {path} has shape {tuple(found[name].shape)}, not {tuple(tensor.shape)}; "
                "give a ResNet of the depth and width in method.depth and method.width."
            )
    return {name: found[name].float() for name in wanted}
