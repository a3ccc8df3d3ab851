"""Fed-PRIME (Phung et al.): clients whose samples lack their text or image share prompts that the server aligns.

Two pools of prompts stand before a frozen fused encoder: each sample takes from either pool the few whose keys (the prompts
themselves, as unit vectors) are nearest to its query, a projection of the maximum over its input tokens. The *inter* pool is
common: clients train it, and the server gathers what prompts of different clients mean the same (``parts/matching.py``);
the centroids are the next pool, whose size may change. The *intra* pool is the client's.

Where the slides leave a choice, or the released code has another:

- The slides' relevance loss, -(S_pos - S_neg), would draw queries to the prompts that they did not choose; the code's form
  pushes chosen keys away. ``key_loss = "logistic"`` is -(S_pos + S_neg), which draws to the chosen and pushes off the others.
- The slides' table is of one global test set, for which one intra pool is needed: by default it is averaged, as the released
  code does. With ``intra = "local"`` it never leaves its client; who has none, a user outside, is answered by inter prompts.
- The code's projections are trained by clients, never averaged, and the server tests with its first ones. Here they are
  averaged or, with ``projections = "frozen"``, the same random ones for all. ``released`` has no key loss, as the code for
  MM-IMDB, and then no gradient reaches them anyway.
- A client's prompts take part in the alignment if any of its samples chose them in the round (in the code: its last batch).
  It sends how often as ``uses``, added to what it received there: how many clients' prompts each of the pool stands for.
- In the code all clients hold the same tensors after the first round, so that each trains on from the one before: not so here.
- The slides give no rate, batch or number of rounds. SGD at 0.05 without momentum is of the authors' notes; batches of 8 are
  ours, so that ten rounds suffice. ``released`` has the 250 rounds and batches of 64 of their scripts: hours on a processor.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from fedvl.methods.base import Batch, Options, Samples, Task, Update
from fedvl.methods.parts.fused import RELEASED_STEPS, SETTING, FusedMethod, Seen, classify, embed, read
from fedvl.methods.parts.losses import cross_entropy, masked_mean
from fedvl.methods.parts.matching import align
from fedvl.methods.roles import Private, Role, Shared
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors


class FedPrimeOptions(Options):
    prompts: int = Field(20, ge=1)  # in each pool before training
    top_k: int = Field(5, ge=1)  # prompts that a sample takes from each pool
    selection: Literal["sample", "batch"] = "sample"  # each sample its own, or those that most of its batch choose
    key_loss: Literal["logistic", "pull", "none"] = "logistic"  # how keys are drawn to queries; pull: L2P's
    key_weight: float = Field(0.01, ge=0)  # lambda
    projections: Literal["averaged", "frozen"] = "averaged"
    pooled: Literal["text", "first"] = (
        "text"  # what is classified: the state of the text's first token, or of the first prompt
    )
    intra: Literal["averaged", "local"] = "averaged"  # whether intra pools are averaged or stay with their clients


class Choice(NamedTuple):
    """What samples take from a pool of N prompts."""

    cosines: Tensor  # query and key, n x N
    taken: Tensor  # n x k x N: 1 where the k-th that a sample takes is this one

    @property
    def chosen(self) -> Tensor:
        """n x N: 1 for the prompts that a sample takes."""
        return self.taken.sum(1)


class FedPrime(FusedMethod):
    pools: ClassVar[tuple[str, ...]] = ("intra", "inter")  # in the order in which they stand before the tokens
    options: FedPrimeOptions
    scope = "batch"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": SETTING,
        "released": {
            **SETTING,
            "method": {"selection": "batch", "key_loss": "none", "projections": "frozen", "pooled": "first"},
            **RELEASED_STEPS,
        },
    }

    def __init__(self, options: FedPrimeOptions, task: Task) -> None:
        super().__init__(options, task)
        self.local = options.intra == "local" and "intra" in self.pools
        self.frozen = {}
        if options.projections == "frozen":
            self.frozen = self.placed(self.draw_projections(torch_generator(task.seed, "projections")))

    def roles(self) -> dict[str, Role]:
        """The server aligns every client's inter prompts by how often they were taken; the rest is averaged."""
        inter: dict[str, Role] = {
            "inter": Shared(needs="each", shape=(None, self.task.fused.width)),
            "uses": Shared(trained=False, needs="each", shape=(None,)),
        }
        return {**inter, **({"intra": Private(trained=True)} if self.local else {})}

    def start(self, generator: torch.Generator) -> Tensors:
        tensors = super().start(generator)
        if not self.frozen:
            tensors |= self.placed(self.draw_projections(generator))
        drawn = {name: self.draw_pool(generator) for name in self.pools if not (name == "intra" and self.local)}
        if "inter" in drawn:
            drawn["uses"] = torch.zeros(self.options.prompts)
        return tensors | self.placed(drawn)

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        return self.placed({"intra": self.draw_pool(generator)}) if self.local else {}

    def draw_pool(self, generator: torch.Generator) -> Tensor:
        encoder = self.task.fused
        bound = (6 / (3 * encoder.patch**2 + encoder.width)) ** 0.5
        return torch.empty(self.options.prompts, encoder.width).uniform_(-bound, bound, generator=generator)

    def draw_projections(self, generator: torch.Generator) -> Tensors:
        shape = (self.task.fused.width,) * 2
        return {f"projection.{name}": torch.empty(shape).uniform_(-1, 1, generator=generator) for name in self.pools}

    # --- the local step

    def choose(self, tensors: Tensors, name: str, seen: Seen, mask: Tensor) -> Choice:
        """The top k of a pool for each sample; mask: 1 for samples that have a say where a batch decides."""
        pool, projection = tensors[name], (self.frozen | tensors)[f"projection.{name}"]
        widest = seen.tokens.masked_fill(~seen.mask[..., None], float("-inf")).amax(1)
        cosines = normalize(widest @ projection.T, dim=-1) @ normalize(pool, dim=-1).T
        numbers = torch.arange(len(pool), device=pool.device)
        count = min(self.options.top_k, len(pool))
        taken = (cosines.topk(count).indices[..., None] == numbers).to(cosines)
        if self.options.selection == "batch":
            votes = (taken.sum(1) * mask[:, None]).sum(0)
            most = (votes * len(pool) - numbers).topk(count).indices  # of a tie, the first
            taken = (most[:, None] == numbers).to(cosines).expand(len(cosines), -1, -1)
        return Choice(cosines, taken)

    def choose_all(self, tensors: Tensors, seen: Seen, mask: Tensor) -> dict[str, Choice]:
        return {name: self.choose(tensors, name, seen, mask) for name in self.pools if name in tensors}

    def state(self, tensors: Tensors, seen: Seen, choices: dict[str, Choice]) -> Tensor:
        """The pooled state of [intra prompts, inter prompts, text, image]."""
        prompts = torch.cat([choice.taken @ tensors[name] for name, choice in choices.items()], 1)
        position = prompts.shape[1] if self.options.pooled == "text" else 0
        return read(self.task.fused, tensors, seen, prompts[None], position)

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        """Task loss + lambda R of every pool; and which inter prompts were taken, as a share of the batch."""
        seen = embed(self.task.fused, batch.inputs)
        choices = self.choose_all(tensors, seen, batch.mask)
        loss = cross_entropy(classify(tensors, self.state(tensors, seen, choices)), batch.labels, batch.mask)
        if self.options.key_loss != "none":
            loss = loss + self.options.key_weight * sum(self.relevance(c, batch.mask) for c in choices.values())
        if "inter" not in choices:
            return loss, {}
        taken = choices["inter"].chosen * batch.mask[:, None]
        return loss, {"uses": tensors["uses"] + taken.sum(0) / batch.mask.sum().clamp(min=1)}

    def relevance(self, choice: Choice, mask: Tensor) -> Tensor:
        """R = -(S_pos + S_neg), the mean over samples; or L2P's, the cosines of the chosen alone."""
        if self.options.key_loss == "pull":
            return -masked_mean((choice.cosines * choice.chosen).sum(-1), mask)
        signs = 2 * choice.chosen - 1
        return -masked_mean(logsigmoid(signs * choice.cosines).sum(-1), mask)

    def represent(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        seen = embed(self.task.fused, inputs)
        everyone = torch.ones_like(seen.tokens[:, 0, 0])
        return self.state(tensors, seen, self.choose_all(tensors, seen, everyone))

    # --- the server

    def merge(self, shared: Tensors, updates: Sequence[Update]) -> Tensors:
        """Make the inter pool the centroids of the prompts that clients' samples chose."""
        pools = [update.tensors["inter"][update.tensors["uses"] > shared["uses"]] for update in updates]
        if not any(len(pool) for pool in pools):
            return shared
        aligned = align(pools, torch_generator(self.task.seed, "alignment"))
        return {"inter": aligned.centroids, "uses": aligned.sizes}
