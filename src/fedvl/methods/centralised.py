"""The linear classifier trained on the pooled data of clients: an upper bound, not federated."""

from fedvl.methods.linear import Linear


class Centralised(Linear, same_loss_as=Linear):
    scope = "pooled"
