"""FedMSplit-P (after Chen and Zhang, 2022): each client starts from a mixture of similar models.

Model and proximal term are FedProx-P's; the parts are the prompts of each kind (3), the pooler and
the classifier. In part m, client k has A_m[k, l] = softmax over l of <theta_k, theta_l> /
sqrt(size); it starts with the mean of the clients' parts weighted by A_m[k, l] times the mean of
A[k, l] over the parts. The global model is the mean of their last tensors by samples, as released.

The released code mixes in place, so a mixture depends on those before it; here all are of what
clients sent. A client that has sent nothing yet starts with the mean of all.
"""

import torch

from fedvl.methods.fedprox_p import FedProxP
from fedvl.methods.roles import Role, Shared
from fedvl.tensors import Tensors


def part_of(name: str) -> str:
    return name if name.startswith("prompts.") else "pooler" if name.startswith("pooler.") else "classifier"


class FedMSplitP(FedProxP):
    def roles(self) -> dict[str, Role]:
        return {"prompts.*": Shared(rate=self.options.prompt_rate, needs="last"), "*": Shared(needs="last")}

    def hand_out(self, shared: Tensors, last: dict[int, Tensors], client: int) -> Tensors:
        if client not in last:
            return shared
        stacked = {name: torch.stack([sent[name] for sent in last.values()]).double() for name in shared}
        own = list(last).index(client)
        likeness: dict[str, torch.Tensor] = {}
        sizes: dict[str, int] = {}
        for name, tensors in stacked.items():
            part, flat = part_of(name), tensors.flatten(1)
            likeness[part] = likeness.get(part, 0) + flat @ flat[own]
            sizes[part] = sizes.get(part, 0) + flat.shape[1]
        seen = {part: torch.softmax(total / sizes[part] ** 0.5, 0) for part, total in likeness.items()}
        mean = torch.stack(list(seen.values())).mean(0)
        weights = {part: row * mean / (row * mean).sum() for part, row in seen.items()}
        return {
            name: torch.einsum("k,k...->...", weights[part_of(name)], tensors).to(shared[name])
            for name, tensors in stacked.items()
        }
