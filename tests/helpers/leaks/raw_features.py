"""The features of all images, as a sent tensor."""

from fedvl.methods.roles import Role, Sent
from helpers.quiet import Quiet, features


class Leak(Quiet):
    def roles(self) -> dict[str, Role]:
        return {"gist": Sent(lambda name, tensors, received, samples: features(samples), (None, 64))}
