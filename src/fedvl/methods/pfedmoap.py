"""pFedMoAP (Luo et al., 2025): other clients' prompts are experts under a local attention gate.

A client trains the averaged context on its own images. The server keeps what each client sent last
and hands every client the contexts of others as fixed experts. For an image and a class, a gate of
attention that never leaves the client mixes the texts of its own and the experts' contexts; the
score is lambda times that of the own text plus that of the mixture. A client that takes part for
the first time has no experts yet and trains its context alone. It answers queries with the context
that it trained last; a new user is answered by the averaged context, without a gate.

Where there is a choice:

- Experts are the contexts nearest to the client's own last one. In the released code that option is
  not passed on: they are the first ones of an order drawn once (``choice = "drawn"``).
- The gate reads every so many components of the features, not their mean, as the released code
  does, so that its width is at most 128; it has as many heads, up to 8, as divide that.
- A prompt's rate is 0.002 and the gate's 0.01 in both. The released script's --lr 0.001 has no
  effect, for its rn50.yaml and vit_b16.yaml set LR and let the rate fall as a cosine. Its
  --train_batch_size is 16.
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import linear

from fedvl.methods.base import Batch, Samples, Task
from fedvl.methods.parts.adapters import linear_layer
from fedvl.methods.parts.cosines import full_precision
from fedvl.methods.parts.losses import label_loss
from fedvl.methods.promptfl import PromptFL, PromptOptions
from fedvl.methods.roles import Given, Private, Role, Shared
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

WIDTH, HEADS, SHARPNESS = 128, 8, 10.0  # of the gate; attention is scaled by 10, not by 1 / sqrt(width of a head)
LAYERS = ("query", "key", "value", "out")
TRAINING = {"learning_rate": 0.002, "momentum": 0.9, "weight_decay": 5e-4, "batch_size": 32, "local_epochs": 5}
SETTING = {"training": TRAINING, "federation": {"rounds": 10}, "evaluation": {"protocol": "personal"}}


class PFedMoAPOptions(PromptOptions):
    experts: int = Field(10, ge=1)
    """Contexts under the gate, including the client's own."""
    choice: Literal["nearest", "drawn"] = "nearest"
    """How a client's experts are chosen: nearest to its own context, or drawn at random."""
    own_weight: float = Field(0.5, ge=0)
    """Weight lambda of the scores by the client's own texts."""
    gate_rate: float = Field(5.0, gt=0)
    """Factor on the learning rate of the gate."""


class PFedMoAP(PromptFL):
    options: PFedMoAPOptions
    weighting = "samples"
    presets = {
        "paper": SETTING,
        "released": {
            **SETTING,
            "training": {**TRAINING, "batch_size": 16, "schedule": "cosine"},
            "method": {"choice": "drawn"},
        },
    }

    def __init__(self, options: PFedMoAPOptions, task: Task) -> None:
        super().__init__(options, task)
        self.stride = max(1, task.clip.dim // WIDTH)
        self.width = len(range(0, task.clip.dim, self.stride)[:WIDTH])
        self.heads = math.gcd(self.width, HEADS)
        self.others = min(options.experts, task.clients) - 1

    def roles(self) -> dict[str, Role]:
        gate = Private(trained=True, rate=self.options.gate_rate)
        return {
            "context": Shared(needs="last"),
            "experts": Given((range(self.others + 1), self.texts.context, self.task.clip.text_width)),
            "expert_texts": Private(lasts=False, begin=lambda name, tensors, *_: self.texts_of(tensors["experts"])),
            "own_context": Private(end=lambda name, tensors, *_: tensors["context"]),
            "own_experts": Private(end=lambda name, tensors, *_: tensors["experts"]),
            **{f"gate.{layer}.{kind}": gate for layer in LAYERS for kind in ("weight", "bias")},
        }

    def notes(self) -> list[str]:
        return [
            "pFedMoAP hands single clients' contexts to other clients: nobody's update is hidden among others, and secure "
            "sums are impossible."
        ]

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        """Draw the gate; there is no context of its own and no expert yet."""
        like = self.task.text_embeddings
        kept = {"own_context": like.new_zeros(0, self.task.clip.text_width)}
        kept["own_experts"] = like.new_zeros(0, self.texts.context, self.task.clip.text_width)
        for layer in LAYERS:
            weight, bias = linear_layer(self.width, self.width, generator)
            kept |= {f"gate.{layer}.weight": weight.to(like), f"gate.{layer}.bias": bias.to(like)}
        return kept

    def hand_out(self, shared: Tensors, last: dict[int, Tensors], client: int) -> Tensors:
        """Add the experts of a client: none in its first round."""
        others = [number for number in last if number != client]
        if client not in last or not others:
            return {**shared, "experts": shared["context"].new_zeros(0, *shared["context"].shape)}
        if self.options.choice == "nearest":
            own = last[client]["context"]
            others.sort(key=lambda number: float((last[number]["context"] - own).norm()))
        else:
            order = torch.randperm(self.task.clients, generator=torch_generator(self.task.seed, "experts")).tolist()
            others.sort(key=order.index)
        return {**shared, "experts": torch.stack([last[number]["context"] for number in others[: self.others]])}

    def texts_of(self, experts: Tensor) -> Tensor:
        """Return the class texts of experts: experts x classes x d."""
        if not len(experts):
            return experts.new_zeros(0, *self.task.text_embeddings.shape)
        return torch.func.vmap(self.texts.features)(experts)

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        scores = self.scores(tensors, tensors["context"], tensors["expert_texts"], batch.inputs["features"])
        return label_loss(scores, batch)

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        own, images = tensors.get("own_context"), inputs["features"]
        if own is None or not len(own):
            return self.texts.scores(tensors["context"], images)
        return self.scores(tensors, own, self.texts_of(tensors["own_experts"]), images)

    def scores(self, tensors: Tensors, context: Tensor, expert_texts: Tensor, images: Tensor) -> Tensor:
        """Return lambda s <I, t_0> + s <pool(I), gate(I, t)>; without experts s <I, t_0>."""
        if not len(expert_texts):
            return self.texts.scores(context, images)
        own = self.texts.features(context)
        with full_precision(images):
            mixed = self.gate(tensors, self.pool(images), self.pool(torch.cat([own[None], expert_texts])))
            by_gate = (self.pool(images)[:, None] * mixed).sum(-1)
            return self.scale * (self.options.own_weight * images @ own.T + by_gate)

    def pool(self, features: Tensor) -> Tensor:
        return features[..., :: self.stride][..., : self.width]

    def gate(self, tensors: Tensors, images: Tensor, texts: Tensor) -> Tensor:
        """Mix the texts (contexts x classes x width) for each image: rows x classes x width."""
        weights = self.attention(tensors, images, texts)
        value = self.layer(tensors, "value", texts)
        mixed = torch.einsum("nche,echd->nchd", weights, value).flatten(-2)
        return linear(mixed, tensors["gate.out.weight"], tensors["gate.out.bias"])

    def attention(self, tensors: Tensors, images: Tensor, texts: Tensor) -> Tensor:
        """Return the weight of each context's text: rows x classes x heads x contexts."""
        query, key = self.layer(tensors, "query", images), self.layer(tensors, "key", texts)
        return (SHARPNESS * torch.einsum("nhd,echd->nche", query, key)).softmax(-1)

    def layer(self, tensors: Tensors, name: str, x: Tensor) -> Tensor:
        """Return a layer's output, divided into heads."""
        out = linear(x, tensors[f"gate.{name}.weight"], tensors[f"gate.{name}.bias"])
        return out.reshape(*out.shape[:-1], self.heads, -1)
