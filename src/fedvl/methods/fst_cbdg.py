"""FST-CBDG (Yan and Guo, 2024): a linear head without labels, from pseudo-labels and class texts.

The head starts at the class texts. Each image's soft pseudo-label follows the head slowly (eq. 4);
features drawn around the texts of a client's rare classes keep it balanced (eq. 5 to 7).

Algorithm 1 renews *each image's* label in each iteration. This matters: if only the batch's are
renewed (``update = "batch"``), the counts of eq. 7 lag behind the head, clients keep pushing the
same rare classes, and the head overshoots where clients are alike (iid).

Eq. 6 is a sum over all synthetic features, sum n_k of them: ``reduction = "sum"``. The default is
the mean over ``synthetic`` of them, whose step does not grow with a client's images, and which ends
higher here. The paper gives no sigma and no batch size: both are ours, as is the rate's factor of
0.99 after each round.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Batch, Method, Options, Samples
from fedvl.methods.parts.heads import linear_start
from fedvl.methods.parts.losses import masked_mean
from fedvl.methods.roles import Private, Role, Shared
from fedvl.seeding import Draw, Normal, Uniform
from fedvl.tensors import Tensors

TRAINING = {"learning_rate": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "batch_size": 50, "schedule": "step"}


class FSTOptions(Options):
    scale: float = Field(1.0, gt=0)
    """Factor on the scores; eq. 2 has none."""
    beta: float = Field(0.9, ge=0, le=1)
    """Share of the previous pseudo-label that is kept, eq. 4."""
    gamma: float = Field(0.0, ge=0)
    """Synthetic share of the largest class, eq. 7."""
    sigma: float = Field(0.02, gt=0)
    """Standard deviation of synthetic features, eq. 5; the paper does not give it."""
    estimate_sigma: bool = False
    """Estimate sigma from the client's pseudo-classes instead."""
    trade_off: float = Field(1.0, ge=0)
    """Weight lambda of eq. 8."""
    self_training: bool = True
    """Use the self-training loss L_iST, eq. 3."""
    sampling: Literal["balanced", "equal", "none"] = "balanced"
    """Synthetic features per class, L_tSamp: n_k of eq. 7, the same number for each, or none."""
    reduction: Literal["mean", "sum"] = "mean"
    """L_tSamp as the mean over synthetic features, or their sum as in eq. 6."""
    synthetic: int = Field(50, ge=1)
    """Features drawn per step, distributed over the classes as n_k."""
    update: Literal["client", "batch"] = "client"
    """Pseudo-labels that a step updates: the batch's, or all of the client's."""


class FSTCBDG(Method):
    labels = "none"
    scope = "client"  # eq. 4 renews the pseudo-label of every image
    weighting = "clients"
    starts_from_head = True
    options: FSTOptions
    presets = {"paper": {"training": TRAINING}}

    def roles(self) -> dict[str, Role]:
        return {
            "weight": Shared(features=True),
            "soft_labels": Private(per_sample=True, first=self.zero_shot),
            "sigma": Private(first=self.spread),
        }

    def start(self, generator: torch.Generator) -> Tensors:
        return linear_start(self.task, self.task.text_features.clone(), self.options.scale)

    def zero_shot(self, samples: Samples) -> Tensor:
        """Return q^0 = p, the zero-shot prediction (eq. 2)."""
        return torch.softmax(self.options.scale * (samples.inputs["features"] @ self.task.text_features.T), dim=-1)

    def spread(self, samples: Samples) -> Tensor:
        """Return the features' spread around the texts of their pseudo-classes, sigma."""
        features, text = samples.inputs["features"], self.task.text_features
        spread = (features - text[(features @ text.T).argmax(-1)]).pow(2).mean().sqrt()
        return spread if self.options.estimate_sigma else torch.full_like(spread, self.options.sigma)

    def noise(self) -> dict[str, Draw]:
        return {"normal": Normal((self.options.synthetic, self.task.text_features.shape[1])), "place": Uniform()}

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        soft_labels = self.renewed(tensors, batch)
        loss = self.options.trade_off * self.sampling_loss(tensors, soft_labels, batch.noise)
        if self.options.self_training:
            log_likelihood = torch.log_softmax(self.predict(tensors, batch.inputs), dim=-1)
            loss = loss - masked_mean((soft_labels[batch.position] * log_likelihood).sum(-1), batch.mask)  # eq. 3
        return loss, {"soft_labels": soft_labels}  # eq. 8

    def renewed(self, tensors: Tensors, batch: Batch) -> Tensor:
        """Return q^t = beta q^(t-1) + (1 - beta) f(I) (eq. 4); rows of padding stay 0."""
        old = tensors["soft_labels"]
        fresh = torch.softmax(self.predict(tensors, batch.whole).detach(), dim=-1)
        new = self.options.beta * old + (1 - self.options.beta) * fresh
        if self.options.update == "batch":
            new = old.index_copy(0, batch.position, new[batch.position])
        return torch.where(old.sum(-1, keepdim=True) > 0, new, 0.0)

    def synthetic_counts(self, soft_labels: Tensor) -> Tensor:
        """Return n_k = (1 + gamma) max m - m_k for m_k images of likeliest class k (eq. 7)."""
        likeliest = soft_labels.argmax(-1, keepdim=True) == torch.arange(
            len(self.task.text_features), device=soft_labels.device
        )
        found = (likeliest & (soft_labels > 0)).sum(0)  # a row of padding is 0 everywhere
        wanted = (1 + self.options.gamma) * found.max() - found
        return torch.ones_like(wanted) if self.options.sampling == "equal" else wanted

    def sampling_loss(self, tensors: Tensors, soft_labels: Tensor, noise: Tensors) -> Tensor:
        """Return eq. 6 over z ~ N(T_k, sigma^2 I), with k distributed as n_k (eq. 5)."""
        if self.options.sampling == "none":
            return noise["normal"].new_zeros(())
        counts = self.synthetic_counts(soft_labels)
        drawn = len(noise["normal"])
        places = (torch.arange(drawn, device=counts.device) + noise["place"]) / drawn * counts.sum()
        classes = (places[:, None] >= counts.cumsum(0)).sum(-1).clamp(max=len(counts) - 1)
        scores = self.predict(
            tensors, {"features": self.task.text_features[classes] + tensors["sigma"] * noise["normal"]}
        )
        log_likelihood = torch.log_softmax(scores, dim=-1).gather(-1, classes[:, None]).mean()
        if self.options.reduction == "sum":
            log_likelihood = log_likelihood * counts.sum()  # the sum's expectation, from fewer draws
        return torch.where(counts.sum() > 0, -log_likelihood, 0.0)  # a client with balanced classes needs none

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        return self.options.scale * (inputs["features"] @ tensors["weight"].T) + tensors["bias"]
