"""FACMIC (Wu et al., 2024): a shared attention on image features, adapted to the asking site.

The attention a(I) = softmax(W1 leaky(norm(W0 I + b0)) + b1) weights the features of an image, with
a batch norm inside. Clients also pull their features to those of unlabelled images of the site that
will query, class by class (LMMD): a client's images belong to their labels, the site's to their
zero-shot predictions.

Where there is a choice, the preset ``released`` follows the code at commit 514c500:

- The code compares each image with the texts of its whole batch, so that two images of one class
  are each other's negatives (``loss = contrastive``); here the loss is that of the label among all
  classes.
- The code's LMMD (``lmmd = released``) is between the client's attended features, of unit length,
  and the site's unit features without attention. The site's attended features say how far an image
  belongs to a class, where the paper has zero-shot predictions. Only classes count that are the
  label of an image of the client's and the likeliest class of one of the site's.
- The code weights clients by their numbers of images, FAA-CLIP's equally (``weights``).
- The code keeps a client's Adam over all rounds; here every round begins with a new one.
- The code reports its best round on the test; here the last one counts.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import leaky_relu, normalize, one_hot

from fedvl.config import Settings
from fedvl.errors import FedVLError
from fedvl.methods.base import Batch, Method, Options, Task
from fedvl.methods.parts.adapters import linear_layer
from fedvl.methods.parts.alignment import class_discrepancy
from fedvl.methods.parts.losses import contrastive, label_loss
from fedvl.methods.roles import Role, Shared
from fedvl.seeding import Draw, Integers
from fedvl.tensors import Tensors

EPSILON, MOMENTUM = 1e-5, 0.1  # of PyTorch's batch norm
SETTING: Settings = {
    "data": {"partition": "domains"},
    "training": {
        "optimiser": "adam",
        "learning_rate": 5e-5,
        "betas": (0.9, 0.98),
        "epsilon": 1e-6,
        "weight_decay": 0.02,
        "batch_size": 32,
    },
    "federation": {"rounds": 50},
    "evaluation": {"protocol": "leave-one-domain-out"},
}


class AttentionOptions(Options):
    loss: Literal["label", "contrastive"] = "label"
    """Cross-entropy over all classes, or contrastive within the batch, as in the released code."""
    weights: Literal["clients", "samples"] = "clients"
    """Weights of clients in the mean: equal, or their numbers of images."""
    target_batch: int = Field(32, ge=2)
    """Unlabelled images of the target site per step."""
    alignment: float = Field(1.0, ge=0)
    """Weight of the loss that aligns the clients' features with the target site's."""


class FACMICOptions(AttentionOptions):
    lmmd: Literal["paper", "released"] = "paper"
    """Features and classes that the distance compares, as in the paper or in the released code."""


class FACMIC(Method):
    vocabulary = "any"
    uses_target = True
    options: FACMICOptions
    presets: ClassVar[dict[str, Settings]] = {
        "paper": SETTING,
        "released": {**SETTING, "method": {"loss": "contrastive", "lmmd": "released", "weights": "samples"}},
    }

    def __init__(self, options: AttentionOptions, task: Task) -> None:
        super().__init__(options, task)
        self.target = (task.target or {}).get("features")
        self.weighting = options.weights

    def roles(self) -> dict[str, Role]:
        return {"norm.running_*": Shared(trained=False)}

    def notes(self) -> list[str]:
        count = 0 if self.target is None else len(self.target)
        return [f"Every client trained with {count} unlabelled images of the asking site, none of the test."]

    def start(self, generator: torch.Generator) -> Tensors:
        width = self.task.text_embeddings.shape[1]
        first, first_bias = linear_layer(width, width, generator)
        second, second_bias = linear_layer(width, width, generator)
        drawn = {
            "attention.0.weight": first,
            "attention.0.bias": first_bias,
            "norm.weight": torch.ones(width),
            "norm.bias": torch.zeros(width),
            "norm.running_mean": torch.zeros(width),
            "norm.running_var": torch.ones(width),
            "attention.1.weight": second,
            "attention.1.bias": second_bias,
        }
        return {name: tensor.to(self.task.text_embeddings) for name, tensor in drawn.items()}

    def noise(self) -> dict[str, Draw]:
        if self.target is None:
            raise FedVLError(
                "This method trains with unlabelled images of the asking site, and there are none; "
                "use --protocol leave-one-domain-out, or open."
            )
        return {"target": Integers(len(self.target), (self.options.target_batch,))}

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        assert self.target is not None
        own, changed = self.learn(tensors, batch.inputs["features"], batch.mask)
        sites = self.target[batch.noise["target"]]
        site, _ = self.learn(tensors, sites, torch.ones_like(sites[:, 0]))
        if self.options.loss == "label":
            loss = label_loss(self.scores(own), batch)
        else:
            loss = contrastive(own, self.task.text_features[batch.labels.clamp(min=0)], self.scale, batch.mask)
        return loss + self.options.alignment * self.distance(tensors, own, site, sites, batch), changed

    def distance(self, tensors: Tensors, own: Tensor, site: Tensor, sites: Tensor, batch: Batch) -> Tensor:
        """Return how far a client's features are from the site's, class by class."""
        classes = len(self.task.class_names)
        labels = one_hot(batch.labels.clamp(min=0), classes).to(own.dtype)
        if self.options.lmmd == "paper":
            guessed = torch.softmax(self.scores(sites), dim=-1)
            return class_discrepancy(own, site, labels, guessed, batch.mask)
        guessed = torch.softmax(self.scores(site), dim=-1)
        named = one_hot(guessed.argmax(-1), classes).amax(0).to(own.dtype)
        return class_discrepancy(normalize(own, dim=-1), normalize(sites, dim=-1), labels, guessed, batch.mask, named)

    def learn(self, tensors: Tensors, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensors]:
        """Return weighted features by the batch's own mean and variance, and the running ones."""
        hidden = self.hidden(tensors, features)
        weight, count = mask[:, None].to(hidden.dtype), mask.sum().clamp(min=1)
        mean = (hidden * weight).sum(0) / count
        variance = ((hidden - mean).square() * weight).sum(0) / count
        unbiased = variance * count / (count - 1).clamp(min=1)
        moved = {"mean": mean, "var": unbiased}
        changed = {
            f"norm.running_{name}": torch.lerp(tensors[f"norm.running_{name}"], value.detach(), MOMENTUM)
            for name, value in moved.items()
        }
        return self.weighted(tensors, hidden, mean, variance) * features, changed

    def hidden(self, tensors: Tensors, features: Tensor) -> Tensor:
        return features @ tensors["attention.0.weight"].T + tensors["attention.0.bias"]

    def weighted(self, tensors: Tensors, hidden: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the attention, of the width of features."""
        normal = (hidden - mean) * (variance + EPSILON).rsqrt() * tensors["norm.weight"] + tensors["norm.bias"]
        scores = leaky_relu(normal) @ tensors["attention.1.weight"].T + tensors["attention.1.bias"]
        return torch.softmax(scores, dim=-1)

    def scores(self, features: Tensor) -> Tensor:
        return self.scale * normalize(features, dim=-1) @ self.task.text_features.T

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        features = inputs["features"]
        mean, variance = tensors["norm.running_mean"], tensors["norm.running_var"]
        return self.scores(self.weighted(tensors, self.hidden(tensors, features), mean, variance) * features)
