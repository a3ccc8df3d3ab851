"""Multimodal prototypes (Fed-MP, section 4.4): confident images are examples for a user's next.

A session holds what is remembered of one user: the sum of each class's examples (``sums``, classes
x d) and their number (``counts``), all that the running centroid of the paper's appendix A needs.
Functions return new sessions.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.errors import FedVLError
from fedvl.methods.parts.losses import entropy
from fedvl.tensors import Tensors

Empty = Literal["levelled", "doubled", "all-or-nothing"]


class PrototypeVerdict(NamedTuple):
    """The prediction for each image of a batch."""

    labels: Tensor  # the likeliest class
    entropy: Tensor  # in nats
    admitted: Tensor  # whether it becomes an example of that class


def begin_session(texts: Tensor) -> Tensors:
    """Return a session in which Q_c is empty for every class (n = 0)."""
    return {"sums": torch.zeros_like(texts), "counts": texts.new_zeros(len(texts))}


def check_session(session: Tensors, texts: Tensor) -> None:
    """Check that a session belongs to this list of classes and to this model."""
    if session.keys() != {"sums", "counts"} or session["sums"].shape != texts.shape:
        found = tuple(session["sums"].shape) if "sums" in session else tuple(session)
        raise FedVLError(
            f"This session has shape {found}, but the query has {tuple(texts.shape)} (classes, features); "
            "begin a new session for other classes or another model."
        )


def centroids(session: Tensors) -> Tensor:
    """Return the mean of each class's examples (eq. 13); 0 for a class without any."""
    return session["sums"] / session["counts"].clamp(min=1)[:, None]


def prototype_scores(images: Tensor, texts: Tensor, session: Tensors, empty: Empty, unit_centroids: bool) -> Tensor:
    """Return cos(z', p_c) + cos(z', q_c) for unit ``images`` and ``texts`` (eq. 12).

    The paper does not say what replaces cos(z', q_c) for a class without examples. "doubled": its
    text counts twice. "levelled": the same, plus what examples score above texts in the other
    classes on average, as images are nearer to images than to texts. "all-or-nothing" (released
    code): 0 until every class has an example.
    """
    by_text = images @ texts.T
    middle = centroids(session)
    by_examples = images @ (normalize(middle, dim=-1) if unit_centroids else middle).T
    has_examples = session["counts"] > 0
    if empty == "all-or-nothing":
        return by_text + by_examples * has_examples.all()
    substitute = by_text
    if empty == "levelled":
        gap = (by_examples - by_text) * has_examples
        substitute = by_text + gap.sum(-1, keepdim=True) / has_examples.sum().clamp(min=1)
    return by_text + torch.where(has_examples, by_examples, substitute)


def judge(logits: Tensor, uncertainty: float) -> PrototypeVerdict:
    """Admit images of an entropy of at most ``uncertainty`` log(classes), the maximum (eq. 11)."""
    unsure = entropy(logits)
    return PrototypeVerdict(logits.argmax(-1), unsure, unsure <= uncertainty * math.log(logits.shape[-1]))


def admit_prototypes(session: Tensors, images: Tensor, verdict: PrototypeVerdict) -> Tensors:
    """Add admitted unit images to their class's examples (eq. 11, its intersection as a union)."""
    labels, chosen = verdict.labels[verdict.admitted], images[verdict.admitted]
    return {
        "sums": session["sums"].index_add(0, labels, chosen),
        "counts": session["counts"] + torch.bincount(labels, minlength=len(session["counts"])),
    }
