"""Fed-PRIME (Phung et al.): prompts for samples without text or image, aligned by the server.

Two pools of prompts precede the tokens of a frozen fused encoder. From each a sample takes the few
whose keys (the normalised prompts) are nearest to its query, a projection of the maximum over its
tokens. Clients train the *inter* pool; the server clusters what means the same in different clients
(``parts/matching.py``), and the centroids are the next pool, of any size. The *intra* pool is
local.

Where the slides leave a choice, or the released code differs:

- The slides' relevance has products of queries and keys; here, as in the code, they are cosines.
- The slides' relevance loss, -(S_pos - S_neg), draws queries to prompts not chosen; the code's
  pushes chosen keys away. ``key_loss = "logistic"``, -(S_pos + S_neg), pulls these and pushes the
  others.
- The slides' table has one global test set and so one intra pool: it is averaged, as in the code.
  With ``intra = "local"`` it stays with its client; users without one have inter prompts only.
- The code's projections are trained by clients, never averaged, and the server tests with its
  first. Here they are averaged or, with ``projections = "frozen"``, random and equal for all.
  ``released`` has no key loss, as the code for MM-IMDB, and so no gradient for them.
- Prompts are aligned if a sample of the client chose them in the round (in the code: its last
  batch). Clients add how often to ``uses``, the number of clients' prompts that each stands for.
- In the code clients hold the same tensors after round 1 and train on from one another; here only
  with ``federation.sequential``. Pools are drawn under their names, so Fed-Inter's and Fed-Intra's
  differ, as Fed-PRIME's two do.
- The slides group "by semantic similarity": ``alignment = "cosine"`` joins the most similar prompts
  first. The code fits a probabilistic model (``"likelihood"``), which no longer joins copies that
  differ by more than half a deviation of the prompts. What is not joined makes the pool grow;
  ``most_prompts`` keeps those of most clients.
- With ``matching = "client"`` each client sends its prompts in the places of the received ones that
  are nearest, and which places it fills. The server needs sums alone; the pool keeps its size. With
  ``"none"`` nothing is matched: this shows what the server's step contributes.
- The slides give no rate, batch size or rounds. SGD at 0.05 without momentum is of the authors'
  notes; batches of 8 suit ten rounds. ``released``: 250 rounds, batches of 64, hours on a CPU.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from fedvl.config import Settings
from fedvl.methods.base import Batch, Mean, Samples, Task, Update
from fedvl.methods.parts.fused import (
    RELEASED_STEPS,
    SETTING,
    EmbeddedSamples,
    FusedMethod,
    FusedOptions,
    classify,
    embed,
    read_prompts,
)
from fedvl.methods.parts.losses import label_loss, masked_mean
from fedvl.methods.parts.matching import align, group_prompts, nearest
from fedvl.methods.roles import Private, Role, Shared
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

USE = 0.01  # what a client adds to the uses of a place that it fills: a small part of what noise is measured by


class FedPrimeOptions(FusedOptions):
    prompts: int = Field(20, ge=1)
    """Prompts in each pool before training."""
    top_k: int = Field(5, ge=1)
    """Prompts that a sample selects from each pool."""
    selection: Literal["sample", "batch"] = "sample"
    """Each sample selects its own prompts, or all take those that most of their batch select."""
    key_loss: Literal["logistic", "pull", "none"] = "logistic"
    """How keys are pulled towards queries; pull is the loss of L2P."""
    key_weight: float = Field(0.01, ge=0)
    """Weight lambda of the key loss."""
    projections: Literal["averaged", "frozen"] = "averaged"
    """Query projections are trained and averaged, or frozen at one random draw shared by all
    clients.
    """
    pooled: Literal["text", "first"] = "text"
    """Output state that is classified: the first text token's, or the first prompt's."""
    intra: Literal["averaged", "local"] = "averaged"
    """Intra pools are averaged, or stay with their clients."""
    alignment: Literal["cosine", "likelihood"] = "cosine"
    """How the server groups prompts: by cosine, or by the released code's probabilistic model."""
    matching: Literal["server", "client", "none"] = "server"
    """Who matches prompts; with client, the server needs sums only. With none, prompts of one position
    are averaged as other tensors are.
    """
    most_prompts: int | None = Field(None, ge=1)
    """Maximum size of the inter pool, which keeps the prompts that most clients share; unlimited if
    absent.
    """


class Choice(NamedTuple):
    """The prompts that samples take from a pool of N."""

    cosines: Tensor  # of query and key, n x N
    taken: Tensor  # n x k x N, one-hot: a sample's k-th prompt

    @property
    def chosen(self) -> Tensor:
        """The prompts that a sample takes as 0 or 1, n x N."""
        return self.taken.sum(1)


class FedPrime(FusedMethod):
    pools: ClassVar[tuple[str, ...]] = ("intra", "inter")  # in their order before the tokens
    options: FedPrimeOptions
    scope = "batch"
    presets: ClassVar[dict[str, Settings]] = {
        "paper": SETTING,
        "released": {
            **SETTING,
            "method": {
                "selection": "batch",
                "key_loss": "none",
                "projections": "frozen",
                "pooled": "first",
                "alignment": "likelihood",
            },
            **RELEASED_STEPS,
        },
    }

    def __init__(self, options: FedPrimeOptions, task: Task) -> None:
        super().__init__(options, task)
        self.local = options.intra == "local" and "intra" in self.pools
        self.matches = options.matching != "none"
        self.places_itself = options.matching == "client" and "inter" in self.pools
        self.frozen = {}
        if options.projections == "frozen":
            self.frozen = self.placed(self.draw_projections())

    def roles(self) -> dict[str, Role]:
        """Align all clients' inter prompts, counting their uses; average the rest."""
        rate = self.options.prompt_rate
        intra: Role = Private(trained=True, rate=rate) if self.local else Shared(rate=rate)
        if not self.matches:
            return {"inter": Shared(rate=rate), "intra": intra}
        if self.places_itself:
            return {
                "inter": Shared(rate=rate, end=self.placed_prompts),
                "uses": Shared(trained=False, end=self.placed_uses),
                "intra": intra,
            }
        return {
            "inter": Shared(rate=rate, needs="each", shape=(None, self.task.fused.width)),
            "uses": Shared(trained=False, needs="each", shape=(None,)),
            "intra": intra,
        }

    def start(self, generator: torch.Generator) -> Tensors:
        tensors = super().start(generator)
        if not self.frozen:
            tensors |= self.placed(self.draw_projections())
        shared = [name for name in self.pools if not (name == "intra" and self.local)]
        drawn = {name: self.draw_pool(torch_generator(self.task.seed, "pool", name)) for name in shared}
        if "inter" in drawn and self.matches:
            drawn["uses"] = torch.zeros(self.options.prompts)
        return tensors | self.placed(drawn)

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        return self.placed({"intra": self.draw_pool(generator)}) if self.local else {}

    def draw_pool(self, generator: torch.Generator) -> Tensor:
        encoder = self.task.fused
        bound = (6 / (3 * encoder.patch**2 + encoder.width)) ** 0.5
        return torch.empty(self.options.prompts, encoder.width).uniform_(-bound, bound, generator=generator)

    def draw_projections(self) -> Tensors:
        """Draw each pool's projection under its name: with one pool it is as with both."""
        drawn = {name: torch.empty((self.task.fused.width,) * 2) for name in self.pools}
        for name, tensor in drawn.items():
            tensor.uniform_(-1, 1, generator=torch_generator(self.task.seed, "projection", name))
        return {f"projection.{name}": tensor for name, tensor in drawn.items()}

    # --- the local step

    def choose(self, tensors: Tensors, name: str, seen: EmbeddedSamples, mask: Tensor) -> Choice:
        """Return the top k of a pool per sample; with batch selection, rows of mask 1 vote."""
        pool, projection = tensors[name], (self.frozen | tensors)[f"projection.{name}"]
        widest = seen.tokens.masked_fill(~seen.mask[..., None], float("-inf")).amax(1)
        cosines = normalize(widest @ projection.T, dim=-1) @ normalize(pool, dim=-1).T
        numbers = torch.arange(len(pool), device=pool.device)
        count = min(self.options.top_k, len(pool))
        taken = (cosines.topk(count).indices[..., None] == numbers).to(cosines)
        if self.options.selection == "batch":
            votes = (taken.sum(1) * mask[:, None]).sum(0)
            most = (votes * len(pool) - numbers).topk(count).indices  # the first of a tie wins
            taken = (most[:, None] == numbers).to(cosines).expand(len(cosines), -1, -1)
        return Choice(cosines, taken)

    def choose_all(self, tensors: Tensors, seen: EmbeddedSamples, mask: Tensor) -> dict[str, Choice]:
        return {name: self.choose(tensors, name, seen, mask) for name in self.pools if name in tensors}

    def state(self, tensors: Tensors, seen: EmbeddedSamples, choices: dict[str, Choice]) -> Tensor:
        """Return the pooled state of [intra prompts, inter prompts, text, image]."""
        prompts = torch.cat([choice.taken @ tensors[name] for name, choice in choices.items()], 1)
        position = prompts.shape[1] if self.options.pooled == "text" else 0
        return read_prompts(self.task.fused, tensors, seen, prompts[None], position)

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        """Return the task loss + lambda R of every pool, and the new uses of the inter prompts."""
        seen = embed(self.task.fused, batch.inputs)
        choices = self.choose_all(tensors, seen, batch.mask)
        loss = label_loss(classify(tensors, self.state(tensors, seen, choices)), batch)
        if self.options.key_loss != "none":
            loss = loss + self.options.key_weight * sum(self.relevance(c, batch.mask) for c in choices.values())
        if "uses" not in tensors:
            return loss, {}
        taken = choices["inter"].chosen * batch.mask[:, None]
        return loss, {"uses": tensors["uses"] + taken.sum(0) / batch.mask.sum().clamp(min=1)}

    def relevance(self, choice: Choice, mask: Tensor) -> Tensor:
        """Return R = -(S_pos + S_neg) as a mean over samples, or L2P's: the chosen cosines only."""
        if self.options.key_loss == "pull":
            return -masked_mean((choice.cosines * choice.chosen).sum(-1), mask)
        signs = 2 * choice.chosen - 1
        return -masked_mean(logsigmoid(signs * choice.cosines).sum(-1), mask)

    def represent(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        seen = embed(self.task.fused, inputs)
        everyone = torch.ones_like(seen.tokens[:, 0, 0])
        return self.state(tensors, seen, self.choose_all(tensors, seen, everyone))

    # --- prompts in the places of those that were received

    def placed_prompts(self, name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
        """Return the prompts that samples chose in their places; elsewhere what was received."""
        chosen, places = self.places(tensors, received)
        return received["inter"].index_copy(0, places, tensors["inter"][chosen])

    def placed_uses(self, name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
        """Return the same small number for each place that the client fills, else 0."""
        return torch.zeros_like(tensors["uses"]).index_fill(0, self.places(tensors, received)[1], USE)

    def places(self, tensors: Tensors, received: Tensors) -> tuple[Tensor, Tensor]:
        """Return the prompts that samples chose, and the places of the nearest received ones."""
        chosen = (tensors["uses"] > 0).nonzero()[:, 0]
        return chosen, nearest(tensors["inter"][chosen], received["inter"])

    # --- the server

    def step(self, shared: Tensors, mean: Mean) -> Tensors:
        """Divide the mean move of each place by the share of clients that filled it."""
        if not self.places_itself:
            return mean
        share = (mean["uses"] / USE).clamp(min=1 / self.task.clients)[:, None]  # fewer cannot be but by noise
        moved = shared["inter"] + (mean["inter"] - shared["inter"]) / share
        return mean | {"inter": moved, "uses": torch.zeros_like(shared["uses"])}

    def merge(self, shared: Tensors, updates: Sequence[Update]) -> Tensors:
        """Make the inter pool the centroids of the prompts that clients' samples chose."""
        pools = [update.tensors["inter"][update.tensors["uses"] > shared["uses"]] for update in updates]
        if not any(len(pool) for pool in pools):
            return shared
        drawn = torch_generator(self.task.seed, "alignment")
        aligned = group_prompts(pools) if self.options.alignment == "cosine" else align(pools, drawn)
        kept = aligned.sizes.argsort(descending=True, stable=True)[: self.options.most_prompts].sort().values
        return {"inter": aligned.centroids[kept], "uses": aligned.sizes[kept]}
