"""FAA-CLIP (Wu et al., 2025): FACMIC's attention with an adversary in place of the kernels.

A discriminator that stays with its client tells the client's features from those of the site that
will query; through reversed gradients the attention learns to deceive it. In the released code the
site's features have no gradient, so that the reversal reaches the client's alone
(``both_sides = false``).
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import leaky_relu

from fedvl.config import Settings
from fedvl.methods.base import Batch, Samples
from fedvl.methods.facmic import EPSILON, FACMIC, SETTING, AttentionOptions
from fedvl.methods.parts.adapters import linear_layer
from fedvl.methods.parts.alignment import domain_loss, reverse_gradient
from fedvl.methods.roles import Private, Role
from fedvl.tensors import Tensors


class AdversaryOptions(AttentionOptions):
    alignment: float = Field(0.5, ge=0)
    """Weight of the adversary's loss."""
    hidden: int = Field(512, ge=1)
    """Width of the discriminator's hidden layer."""
    both_sides: bool = True
    """Whether gradients also flow through the target site's features."""


class FAACLIP(FACMIC):
    options: AdversaryOptions  # type: ignore[assignment]  # its distance has no second form to choose
    presets: ClassVar[dict[str, Settings]] = {
        "paper": SETTING,
        "released": {
            **SETTING,
            "method": {"loss": "contrastive", "both_sides": False},
            "federation": {"rounds": 2},  # main.py --iters 2
        },
    }

    def roles(self) -> dict[str, Role]:
        return {**super().roles(), **{name: Private(trained=True) for name in self.discriminator()}}

    def discriminator(self) -> dict[str, tuple[int, int]]:
        """Return the inputs and outputs of each layer's tensors."""
        width, hidden = self.task.text_embeddings.shape[1], self.options.hidden
        sizes = ((width, hidden), (hidden, hidden), (hidden, 1))
        return {f"domain.{layer}.{part}": size for layer, size in enumerate(sizes) for part in ("weight", "bias")}

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        drawn: Tensors = {}
        for name, size in self.discriminator().items():
            if name.endswith("weight"):
                pair = linear_layer(*size, generator)
                drawn[name], drawn[name.replace("weight", "bias")] = (
                    part.to(self.task.text_embeddings) for part in pair
                )
        return drawn

    def distance(self, tensors: Tensors, own: Tensor, site: Tensor, sites: Tensor, batch: Batch) -> Tensor:
        """Return the discriminator's loss, whose gradients reach the attention reversed."""
        full = torch.ones_like(batch.mask[0])
        left = self.discriminate(tensors, reverse_gradient(own, full), batch.mask)
        site = reverse_gradient(site, full) if self.options.both_sides else site.detach()
        return domain_loss(left, self.discriminate(tensors, site, torch.ones_like(site[:, 0])), batch.mask)

    def discriminate(self, tensors: Tensors, features: Tensor, mask: Tensor) -> Tensor:
        """Return a score for each row, above 0 for features like the site's."""
        x, weight, count = features, mask[:, None], mask.sum().clamp(min=1)
        for layer in range(3):
            x = x @ tensors[f"domain.{layer}.weight"].T + tensors[f"domain.{layer}.bias"]
            if layer < 2:  # a batch norm without weights of its own: nobody asks it after training
                mean = (x * weight).sum(0) / count
                variance = ((x - mean).square() * weight).sum(0) / count
                x = leaky_relu((x - mean) * (variance + EPSILON).rsqrt())
        return x[:, 0]
