"""Losses that several methods share. ``mask`` is 1 for real rows of a batch and 0 for padding."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.tensors import Tensors

if TYPE_CHECKING:
    from fedvl.methods.base import Batch

CLASS_LIST = "class_list"  # rows x classes: whether the client of a row knows of a class; all are known if absent

UNIT = "unit"  # number of a row's unit, such as a patient, whose gradients record-level privacy clips together


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each row's softmax, in nats."""
    log_likelihood = torch.log_softmax(logits, dim=-1)
    return -(log_likelihood.exp() * log_likelihood).sum(-1)  # p log p by itself is NaN where p underflows


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over real rows; 0 for a batch of padding only."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def cross_entropy(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    log_likelihood = torch.log_softmax(scores, dim=-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return -masked_mean(log_likelihood, mask)


def candidate_loss(scores: Tensor, candidates: Tensor, mask: Tensor) -> Tensor:
    """Return -log P(class among the candidates); candidates are 0 or 1, rows x classes."""
    hidden = torch.where(candidates > 0, 0.0, torch.finfo(scores.dtype).min)
    log_likelihood = torch.logsumexp(torch.log_softmax(scores, dim=-1) + hidden, dim=-1)
    return -masked_mean(log_likelihood, mask)


def on_class_list(scores: Tensor, batch: "Batch") -> Tensor:
    """Hide the scores of classes that the client does not know of; a wrong label stays in sight."""
    if CLASS_LIST not in batch.inputs:
        return scores
    labelled = torch.arange(scores.shape[-1], device=scores.device) == batch.labels[..., None]
    return scores.masked_fill(~(batch.inputs[CLASS_LIST] | labelled), torch.finfo(scores.dtype).min)


def label_loss(scores: Tensor, batch: "Batch") -> Tensor:
    """Return the loss of a batch's labels, or of its candidate sets (``data.labels = "cpl"``)."""
    scores = on_class_list(scores, batch)
    if "candidates" in batch.inputs:
        return candidate_loss(scores, batch.inputs["candidates"], batch.mask)
    return cross_entropy(scores, batch.labels, batch.mask)


def contrastive(images: Tensor, texts: Tensor, scale: float, mask: Tensor) -> Tensor:
    """Return CLIP's loss, the mean of both directions; equal rows are the pairs."""
    scores = scale * normalize(images, dim=-1) @ normalize(texts, dim=-1).T
    hidden = (1 - mask) * torch.finfo(scores.dtype).min  # padding has no partner
    to_text = torch.log_softmax(scores + hidden, dim=1).diagonal()
    to_image = torch.log_softmax(scores.T + hidden, dim=1).diagonal()
    return -(masked_mean(to_text, mask) + masked_mean(to_image, mask)) / 2


def squared_distance(tensors: Tensors, other: Tensors) -> Tensor:
    """Return the squared distance between both, summed over the names of ``other``."""
    return torch.stack([(tensors[name] - value).pow(2).sum() for name, value in other.items()]).sum()
