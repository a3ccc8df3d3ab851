"""Multimodal prototypes (Fed-MP, section 4.4): images that are told with confidence become examples for a user's next.

A session is what is remembered of one user: for each class the sum of its examples (``sums``, classes x d) and how many
they are (``counts``): all that the running centroid of the paper's appendix A needs. Functions return new sessions.
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


class Verdict(NamedTuple):
    """What is thought of each image of a batch."""

    labels: Tensor  # the likeliest class
    entropy: Tensor  # in nats
    admitted: Tensor  # whether it becomes an example of that class


def begin(texts: Tensor) -> Tensors:
    """Q_c is empty for every class (n = 0)."""
    return {"sums": torch.zeros_like(texts), "counts": texts.new_zeros(len(texts))}


def check(session: Tensors, texts: Tensor) -> None:
    """A session belongs to one list of classes and to one model."""
    if session.keys() != {"sums", "counts"} or session["sums"].shape != texts.shape:
        found = tuple(session["sums"].shape) if "sums" in session else tuple(session)
        raise FedVLError(
            f"This session remembers {found}, and the question is about {tuple(texts.shape)} (classes, features); "
            "begin a new session for other classes or another model."
        )


def centroids(session: Tensors) -> Tensor:
    """The mean of each class's examples (eq. 13); 0 for a class that has none."""
    return session["sums"] / session["counts"].clamp(min=1)[:, None]


def scores(images: Tensor, texts: Tensor, session: Tensors, empty: Empty, unit_centroids: bool) -> Tensor:
    """cos(z', p_c) + cos(z', q_c) for unit ``images`` and ``texts`` (eq. 12).

    The paper does not say what takes the place of cos(z', q_c) for a class without examples. "doubled": its text counts
    twice. "levelled": the same, raised by what examples score above texts in the other classes on average, since images
    are nearer to images than to any text. "all-or-nothing" (released code): nothing, until every class has an example.
    """
    by_text = images @ texts.T
    middle = centroids(session)
    by_examples = images @ (normalize(middle, dim=-1) if unit_centroids else middle).T
    has_examples = session["counts"] > 0
    if empty == "all-or-nothing":
        return by_text + by_examples * has_examples.all()
    stand_in = by_text
    if empty == "levelled":
        gap = (by_examples - by_text) * has_examples
        stand_in = by_text + gap.sum(-1, keepdim=True) / has_examples.sum().clamp(min=1)
    return by_text + torch.where(has_examples, by_examples, stand_in)


def judge(logits: Tensor, uncertainty: float) -> Verdict:
    """The condition of eq. 11: an entropy of at most ``uncertainty`` times that of knowing nothing, log(classes)."""
    unsure = entropy(logits)
    return Verdict(logits.argmax(-1), unsure, unsure <= uncertainty * math.log(logits.shape[-1]))


def admit(session: Tensors, images: Tensor, verdict: Verdict) -> Tensors:
    """Each admitted unit image joins the examples of its likeliest class (eq. 11, whose intersection is a union)."""
    labels, chosen = verdict.labels[verdict.admitted], images[verdict.admitted]
    return {
        "sums": session["sums"].index_add(0, labels, chosen),
        "counts": session["counts"] + torch.bincount(labels, minlength=len(session["counts"])),
    }
