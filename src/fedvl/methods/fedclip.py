"""FedCLIP (Lu et al., 2023): a gate on the frozen image embedding, trained with CLIP's loss."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.methods.base import Batch, Method
from fedvl.methods.parts.adapters import gate_start, gated
from fedvl.methods.parts.losses import contrastive
from fedvl.tensors import Tensors


class FedCLIP(Method):
    inputs = ("embeddings",)
    vocabulary = "any"
    weighting = "clients"  # as the released code
    presets = {
        "paper": {
            "training": {
                "optimiser": "adam",
                "learning_rate": 5e-5,
                "betas": (0.9, 0.98),
                "epsilon": 1e-6,
                "weight_decay": 0.2,
                "batch_size": 32,
            }
        }
    }

    def start(self, generator: torch.Generator) -> Tensors:
        return gate_start(self.task.text_embeddings.shape[1], generator)

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        texts = self.task.text_embeddings[batch.labels.clamp(min=0)]
        images = gated(tensors, batch.inputs["embeddings"])
        return contrastive(images, texts, self.scale, batch.mask)

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        images = normalize(gated(tensors, inputs["embeddings"]), dim=-1)
        return self.scale * images @ self.task.text_features.T
