"""FedNTD (Lee et al., 2022): the linear classifier, held to the server's opinion on the classes that an image is not of."""

import torch
from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Batch, Task, masked_mean
from fedvl.methods.linear import Linear, LinearOptions
from fedvl.tensors import Tensors


class FedNTDOptions(LinearOptions):
    beta: float = Field(1.0, ge=0)  # weight of the distillation
    temperature: float = Field(1.0, gt=0)


class FedNTD(Linear):
    options_type = FedNTDOptions
    gradients = None  # type: ignore[assignment]  # the objective has a term more than the linear classifier's

    def __init__(self, options: FedNTDOptions, task: Task) -> None:
        super().__init__(options, task)
        self.beta, self.temperature = options.beta, options.temperature

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        loss, _ = super().objective(tensors, batch)
        distance = not_true_distance(
            self.predict(tensors, batch.inputs),
            self.predict(batch.received, batch.inputs),
            batch.labels,
            self.temperature,
        )
        return loss + self.beta * self.temperature**2 * masked_mean(distance, batch.mask), {}


def not_true_distance(local: Tensor, server: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """KL(server || local) of each row over the classes that are not its label."""
    true = labels[:, None] == torch.arange(local.shape[-1], device=labels.device)
    hidden = torch.finfo(local.dtype).min
    ours, theirs = (
        torch.log_softmax(torch.where(true, hidden, scores / temperature), dim=-1) for scores in (local, server)
    )
    return (theirs.exp() * torch.where(true, 0.0, theirs - ours)).sum(-1)
