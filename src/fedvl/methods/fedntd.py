"""FedNTD (Lee et al., 2022): a linear classifier with distillation on the not-true classes."""

import torch
from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Batch
from fedvl.methods.linear import Linear, LinearOptions
from fedvl.methods.parts.losses import masked_mean
from fedvl.tensors import Tensors


class FedNTDOptions(LinearOptions):
    beta: float = Field(1.0, ge=0)
    """Weight of the distillation loss."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the distillation."""


class FedNTD(Linear):
    options: FedNTDOptions

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        beta, temperature = self.options.beta, self.options.temperature
        local, server = (self.predict(model, batch.inputs) for model in (tensors, batch.received))
        distance = not_true_distance(local, server, batch.labels, temperature)
        return super().loss(tensors, batch) + beta * temperature**2 * masked_mean(distance, batch.mask)


def not_true_distance(local: Tensor, server: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return KL(server || local) of each row over the classes other than its label."""
    true = labels[:, None] == torch.arange(local.shape[-1], device=labels.device)
    hidden = torch.finfo(local.dtype).min
    ours, theirs = (
        torch.log_softmax(torch.where(true, hidden, scores / temperature), dim=-1) for scores in (local, server)
    )
    return (theirs.exp() * torch.where(true, 0.0, theirs - ours)).sum(-1)
