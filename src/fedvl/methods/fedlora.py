"""LoRA in a federation: low-rank changes of attention's projections, shared in one of six ways.

Every adapted projection W becomes W + s B A with A (r x width), B (width x r) and s = alpha / r of
the largest rank (Hu et al., 2022). A starts uniform within 1/sqrt(width), B at 0, so that a run
starts as zero-shot. The text tower alone is adapted by default: image features are computed once.
The variants are classes of `methods/parts/lora_variants.py`:

- fedit (Zhang et al., 2024): A and B are averaged apart;
- ffa (Sun et al., 2024): A stays as drawn, B is averaged;
- fedsa (Guo et al., 2025): A is averaged, each client keeps its own B;
- flora (Wang et al., 2024): the server stacks all factors;
- hetlora (Cho et al., 2024): factors of different ranks, weighted by the norm of their product;
- flexlora (Bai et al., 2024): the products are averaged and factorised again.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.errors import FedVLError
from fedvl.methods.base import Method, Options, Samples, Task, Update
from fedvl.methods.parts.cosines import cosine_scores
from fedvl.methods.parts.lora_variants import VARIANTS, Factors
from fedvl.methods.parts.prompts import CLASSES_AT_ONCE, recomputed
from fedvl.methods.roles import Role
from fedvl.models.transformer import Change, Deltas
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

RANKED = tuple(name for name, variant in VARIANTS.items() if variant.ranked)


class FedLoRAOptions(Options):
    variant: Literal["fedit", "ffa", "fedsa", "flora", "hetlora", "flexlora"] = "fedit"
    """How clients' low-rank factors are merged."""
    rank: int = Field(8, ge=1, le=4096)
    """Rank of the change of each adapted projection."""
    ranks: tuple[int, ...] = ()
    """Ranks that clients take in turn under flora, hetlora and flexlora; every client has `rank` if
    empty.
    """
    alpha: float = Field(16.0, gt=0)
    """Scaling of the change: its factor is alpha / rank."""
    targets: tuple[Literal["q", "k", "v", "o"], ...] = Field(("q", "v"), min_length=1)
    """Attention projections that are adapted."""
    towers: Literal["text", "both"] = "text"
    """Adapted towers; with both, images pass through the model in every step."""

    @model_validator(mode="after")
    def ranks_fit(self) -> "FedLoRAOptions":
        if self.ranks and (self.variant not in RANKED or min(self.ranks) < 1 or max(self.ranks) > 4096):
            raise ValueError(f"ranks from 1 to 4096 are for {', '.join(RANKED)}")
        return self


class FedLoRA(Method):
    labels = "candidates"
    vocabulary = "any"
    scope = "row"
    through_encoder = True
    options: FedLoRAOptions
    presets = {
        "paper": {
            "training": {"optimiser": "adamw", "learning_rate": 2e-4, "weight_decay": 0.01, "batch_size": 32},
        }
    }

    def __init__(self, options: FedLoRAOptions, task: Task) -> None:
        super().__init__(options, task)
        clip = task.clip
        self.towers = {"text": (clip.text_layers, clip.text_width)}
        if options.towers == "both":
            if not clip.vision_layers:
                raise FedVLError(f"The image tower of {clip.name} is no ViT; use --set method.towers=text.")
            self.towers["image"] = (clip.vision_layers, clip.vision_width)
        device = task.text_embeddings.device
        texts = [template.replace("{}", name) for template in task.templates for name in task.class_names]
        self.tokens = clip.tokenise(texts).to(device)
        ranks = options.ranks or (options.rank,)
        self.factors = Factors(self.towers, len(options.targets), ranks, task.text_embeddings, task.seed)
        self.variant = VARIANTS[options.variant](self.factors)
        # as all parties draw them, where A does not travel
        self.same = self.factors.drawn(self.factors.largest, torch_generator(task.seed, "fedlora"))

    @classmethod
    def forms(cls, options: FedLoRAOptions) -> tuple[str, ...]:
        return ("features",) if options.towers == "text" else ("pixels",)

    def roles(self) -> dict[str, Role]:
        return self.variant.roles()

    def notes(self) -> list[str]:
        if "B" in self.variant.shared:
            return []
        return ["Every client keeps its own B: without one, as in the closed protocol, the model is zero-shot."]

    def start(self, generator: torch.Generator) -> Tensors:
        drawn = self.factors.drawn(self.factors.largest, generator)
        return {name: factor for name, factor in drawn.items() if name.endswith(self.variant.shared)}

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        return self.variant.join(generator)

    def hand_out(self, shared: Tensors, last: dict[int, Tensors], client: int) -> Tensors:
        return self.variant.hand_out(shared, client)

    def merge(self, shared: Tensors, updates: Sequence[Update]) -> Tensors:
        weights = torch.tensor([update.weight for update in updates], dtype=torch.float64)
        shares = [float(share) for share in weights / weights.sum()]
        merged: Tensors = {}
        for a, b in ((f"{tower}.A", f"{tower}.B") for tower in self.towers):
            pairs = [(update.tensors[a], update.tensors[b]) for update in updates]
            merged[a], merged[b] = self.variant.merge((shared[a], shared[b]), pairs, shares)
        return merged

    def deltas(self, tensors: Tensors, tower: str) -> list[Deltas]:
        """Return the changes of each layer of a tower; none where B is unknown."""
        if f"{tower}.B" not in tensors:
            return []
        a, b = tensors.get(f"{tower}.A", self.same[f"{tower}.A"]), tensors[f"{tower}.B"]
        if f"stack.{tower}.A" in tensors:
            a = torch.cat([a, tensors[f"stack.{tower}.A"]], -2)
            b = torch.cat([b, tensors[f"stack.{tower}.B"]], -1)
        b = b * (self.options.alpha / self.factors.largest)
        return [
            {target: (a[layer, place], b[layer, place]) for place, target in enumerate(self.options.targets)}
            for layer in range(len(a))
        ]

    def texts(self, tensors: Tensors) -> Tensor:
        """Return the class texts as unit vectors, the mean over templates."""
        deltas = self.deltas(tensors, "text")
        if not deltas:
            return self.task.text_features
        flat = [part for layer in deltas for pair in layer.values() for part in pair]
        read = partial(self.read, list(deltas[0]))
        parts = torch.split(self.tokens, CLASSES_AT_ONCE)
        found = [recomputed(partial(read, part), *flat) if len(parts) > 1 else read(part, *flat) for part in parts]
        embedded = torch.cat(found)
        embedded = embedded.reshape(len(self.task.templates), -1, embedded.shape[-1])
        return normalize((embedded if len(embedded) == 1 else normalize(embedded, dim=-1)).mean(0), dim=-1)

    def read(self, targets: Sequence[str], tokens: Tensor, *flat: Tensor) -> Tensor:
        """Return text embeddings, given the factors of all layers in a row."""
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        count = len(targets)
        deltas = [dict(zip(targets, pairs[at : at + count], strict=True)) for at in range(0, len(pairs), count)]
        return self.task.clip.encode_text(tokens, changes=[Change(deltas=layer) for layer in deltas])

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        texts = self.texts(tensors)
        if self.options.towers == "text":
            images = inputs["features"]
        else:
            pixels = self.task.clip.normalise(inputs["pixels"]).to(texts.dtype)
            changes = [Change(deltas=layer) for layer in self.deltas(tensors, "image")]
            images = normalize(self.task.clip.encode_image(pixels, changes=changes), dim=-1)
        kind = next(iter(tensors.values())).dtype
        return cosine_scores(self.scale, images.to(kind), texts.to(kind))
