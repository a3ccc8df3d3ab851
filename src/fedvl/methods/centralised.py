"""The linear classifier trained on all clients' data in one place: an upper bound, not a federated method."""

from fedvl.methods.linear import Linear


class Centralised(Linear, same_loss_as=Linear):
    scope = "pooled"
