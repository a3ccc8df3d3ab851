"""The losses of the dual encoder, as functions of plain tensors.

Rows are images and columns are texts, unless said otherwise; every function returns the mean over its rows.
"""

import torch
import torch.nn.functional as F

NEVER = -1e4  # a logit that takes no part; finite, so that a row with nothing left has a gradient of zero, not NaN
LEAST_SHARE = 0.05
PURE = 0.999  # an image whose own weight is above this was not mixed with another


def share_out(weights: torch.Tensor) -> torch.Tensor:
    """Positive weights of the concepts that are in play made to sum to one.

    A row with (almost) none of its positives in play keeps a small sum instead of being blown up.
    """
    return weights / weights.sum(1, keepdim=True).clamp(min=LEAST_SHARE)


def multi_positive_contrast(
    logits: torch.Tensor, log_prior: torch.Tensor, excluded: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Each positive against the negatives only, never against the other positives ("decoupled").

    With a_c = logit_c + log prior_c (logit adjustment: a rare concept must win by as much as a common one), the loss
    of an image is the sum over c of weights_c * -log(e^a_c / (e^a_c + sum over the negatives of e^a_n)).
    `excluded` marks what may not serve as a negative: the positives, and concepts that may well be true.
    """
    adjusted = logits + log_prior
    negatives = torch.logsumexp(adjusted.masked_fill(excluded, NEVER), 1, keepdim=True)
    return (F.softplus(negatives - adjusted) * weights).sum(1).mean()


def text_to_image_contrast(logits: torch.Tensor, positive: torch.Tensor, excluded: torch.Tensor) -> torch.Tensor:
    """The same, read by columns: for each text with a positive image, its positives against its negative images."""
    negatives = torch.logsumexp(logits.masked_fill(excluded, NEVER), 0, keepdim=True)
    chosen = positive.float()
    count = chosen.sum(0)
    by_text = (F.softplus(negatives - logits) * chosen).sum(0) / count.clamp(min=1)
    return by_text.sum() / (count > 0).sum().clamp(min=1)


def pair_contrast(logits: torch.Tensor) -> torch.Tensor:
    """CLIP's loss: row i belongs to column i, both ways."""
    target = torch.arange(len(logits), device=logits.device)
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))


def divergence(target_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of the softmax of `logits` from that of `target_logits`."""
    target, own = target_logits.log_softmax(1), logits.log_softmax(1)
    return (target.exp() * (target - own)).sum(1).mean()


def ancestor_cross_entropy(logits: torch.Tensor, probability: torch.Tensor) -> torch.Tensor:
    """Binary cross entropy, summed over the concepts, to the teacher's probability that each concept is true."""
    return F.binary_cross_entropy_with_logits(logits, probability, reduction="none").sum(1).mean()


def cosine_distance(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (1 - F.cosine_similarity(predicted, target, dim=1)).mean()


def relational_divergence(
    embeddings: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, temperature: float = 0.1
) -> torch.Tensor:
    """Every row of one similarity matrix against the same row of the target's; a text is not compared with itself."""
    itself = torch.eye(len(embeddings), device=embeddings.device, dtype=torch.bool)
    target = (targets @ targets.T / temperature).masked_fill(itself, NEVER).log_softmax(1)
    own = (scale * (embeddings @ embeddings.T)).masked_fill(itself, NEVER).log_softmax(1)
    return (target.exp() * (target - own)).masked_fill(itself, 0).sum(1).mean()
