"""FedYogi (Reddi et al., 2021): FedAvg of a linear classifier with Yogi on the server."""

import torch
from torch import Tensor

from fedvl.methods.fedadam import Adaptive, FedAdamOptions
from fedvl.methods.linear import Linear


class Yogi(Adaptive):
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Return v <- v - (1 - beta_2) move^2 sign(v - move^2) (algorithm 2)."""
        return v - (1 - self.options.server_betas[1]) * square * torch.sign(v - square)


class FedYogi(Yogi, Linear, same_loss_as=Linear):
    options: FedAdamOptions
