"""The linear classifier trained on pooled data by gradient descent, which is not federated."""

from fedvl.methods.linear import Linear


class Centralised(Linear, same_loss_as=Linear):
    scope = "pooled"
