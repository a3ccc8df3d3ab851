"""The Gram matrix of the features, in which leverage finds every image."""

from fedvl.methods.roles import Role, Sent
from helpers.quiet import Quiet, features


class Leak(Quiet):
    def roles(self) -> dict[str, Role]:
        return {
            "gram": Sent(lambda name, tensors, received, samples: features(samples).T @ features(samples), (64, 64))
        }
