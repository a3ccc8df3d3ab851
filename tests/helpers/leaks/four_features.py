"""The features of four images in one long vector, as a sent tensor."""

from fedvl.methods.roles import Role, Sent
from helpers.quiet import Quiet, features, head


class Leak(Quiet):
    def roles(self) -> dict[str, Role]:
        return {"gist": Sent(lambda name, tensors, received, samples: head(features(samples), 4).flatten(), (256,))}
