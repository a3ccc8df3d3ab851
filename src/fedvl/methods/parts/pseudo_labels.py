"""Pseudo-labels from a model's predictions: which images get one, and which.

A labeller reads one client's class probabilities (images x classes) and returns the class of each
image, or -1 for one that is not trained on. Any method can use them (``data.labels``); FedPP renews
its own in training.

- ``zero-shot``: the likeliest class of every image.
- ``upl`` (Huang et al., 2022): of the images whose likeliest class is c, the ``shots`` surest.
- ``fpl`` (Menghini et al., 2023): ``shots`` images for *every* class; if its class is full, an
  image goes to the next likeliest. In the released code such an image goes on *every* other board
  that has room or a less likely image, so that it is trained on with several labels; its boards
  depend on the order of images and lose displaced ones. Here an image has one label, and a
  displaced one tries the next class: the greedy choice of pairs by probability, in any order.
- ``cpl`` (Zhang et al., 2024): candidate sets, then boards as for ``fpl``, which give the labels.
  Its alpha and beta differ by dataset: the catalogue has those of its scripts.
- ``cps`` (FedPP): clients count the classes of their reliable images, and the totals say how many
  each may label: all classes are learned equally, and no client labels a class it hardly has.

An image whose probabilities are not numbers gets no label, and has no say in those of others.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedvl.methods.base import Samples

Quota = Literal["quarter", "quarter-growing", "mean-reliable"]
Filters = Literal["both", "confidence", "entropy", "none"]
LABELLED_AT_ONCE = 65536


class LabelRule(NamedTuple):
    """How a client labels alone."""

    scheme: str
    shots: int = 16  # labels per class, for upl, fpl and cpl
    alpha: float = 0.6  # of cpl
    beta: float = 0.9


class Labelled(NamedTuple):
    labels: Tensor  # one per image; -1: not trained on
    candidates: Tensor | None = None  # images x classes, 0 or 1, where there may be several


def label_zero_shot(table: Tensor, rule: LabelRule) -> Labelled:
    return Labelled(table.argmax(-1))


def upl(table: Tensor, rule: LabelRule) -> Labelled:
    confidence, likeliest = table.max(-1)
    return Labelled(torch.where(rank_within(likeliest, confidence) < rule.shots, likeliest, -1))


def fpl(table: Tensor, rule: LabelRule) -> Labelled:
    return Labelled(boards(table, rule.shots))


def cpl(table: Tensor, rule: LabelRule) -> Labelled:
    """Take the classes likely for an image (intra) whose likeliest images include it (inter)."""
    threshold = torch.quantile(table.max(-1).values, rule.alpha)
    ordered, classes = table.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    intra = torch.zeros_like(table).scatter(-1, classes, (before <= threshold).to(table.dtype)) > 0
    inter = table >= torch.quantile(table, rule.beta, dim=0)
    candidates = intra & inter
    labels = boards(table.masked_fill(~candidates, -torch.inf), rule.shots)
    return Labelled(labels, candidates.float())


LABELLERS = {"zero-shot": label_zero_shot, "upl": upl, "fpl": fpl, "cpl": cpl}


def label_by_rule(table: Tensor, rule: LabelRule) -> Labelled:
    """Label one client's images; a row that has NaN is unlabelled and as if it were absent."""
    known = ~table.isnan().any(-1)
    labels, candidates = table.new_full((len(table),), -1, dtype=torch.long), torch.zeros_like(table)
    if not known.any():
        return Labelled(labels, candidates if rule.scheme == "cpl" else None)
    found = LABELLERS[rule.scheme](table[known], rule)
    labels[known] = found.labels
    if found.candidates is None:
        return Labelled(labels)
    candidates[known] = found.candidates
    return Labelled(labels, candidates)


def rank_within(classes: Tensor, values: Tensor) -> Tensor:
    """Return each row's rank in its class, the largest value first (0); first of equals wins."""
    order = values.argsort(descending=True, stable=True)
    order = order[classes[order].argsort(stable=True)]
    in_order = classes[order].contiguous()
    place = torch.arange(len(order), device=order.device) - torch.searchsorted(in_order, in_order)
    return torch.empty_like(order).scatter(0, order, place)


def boards(table: Tensor, size: int) -> Tensor:
    """Place each image on at most one class's board of ``size`` places; -infinity is never placed.

    Images request their classes in order of likelihood and are displaced by likelier ones (deferred
    acceptance); since both sides rank by one table, this is the greedy choice among all pairs.
    """
    images, classes = table.shape
    preferred = table.argsort(dim=-1, descending=True, stable=True)
    choice = torch.zeros(images, dtype=torch.long, device=table.device)  # how many classes each image was refused by
    while True:
        asked = preferred.gather(1, choice.clamp(max=classes - 1)[:, None])[:, 0]
        likelihood = table.gather(1, asked[:, None])[:, 0]
        out = (choice >= classes) | (likelihood == -torch.inf)
        refused = ~out & (rank_within(torch.where(out, classes, asked), likelihood) >= size)
        if not bool(refused.any()):
            return torch.where(out, -1, asked)
        choice = choice + refused.long()


# --- FedPP's cooperative selection


def reliable(table: Tensor, filters: Filters = "both") -> Tensor:
    """Return which images are surer and of less entropy than the client's median (eq. 2)."""
    confidence, entropy = table.max(-1).values, torch.special.entr(table).sum(-1)
    kept = torch.ones_like(confidence, dtype=torch.bool)
    if filters in ("both", "confidence"):
        kept = kept & (confidence > torch.nanquantile(confidence, 0.5))
    if filters in ("both", "entropy"):
        kept = kept & (entropy < torch.nanquantile(entropy, 0.5))
    return kept & ~confidence.isnan()


def count_classes(labels: Tensor, classes: int) -> Tensor:
    return torch.bincount(labels[labels >= 0], minlength=classes)


def quota(mode: Quota, images: int, totals: Tensor, generation: int) -> int:
    """Return M, the labels per class over all clients' ``images``; ``totals`` are reliable ones.

    The paper says "one-quarter of the total data", which we divide by the number of classes; its
    successor FedCoPL takes the mean of the totals. ``generation`` counts selections from 0.
    """
    if mode == "mean-reliable":
        return -(-int(totals.sum()) // len(totals))
    growth = generation + 1 if mode == "quarter-growing" else 1
    return -(-images * growth // (4 * len(totals)))


def unreported_share(mode: Quota, images: int, classes: int, generation: int, clients: int) -> int:
    """Return each client's labels of a class that no client reports, where eq. 3 has 0 / 0.

    An even part of the quota; under FedCoPL's, of a quarter that grows with every selection.
    """
    growth = 1 if mode == "quarter" else generation + 1
    return -(-images * growth // (4 * classes * clients))


def allocation(counts: Tensor, totals: Tensor, most: int, unreported: int) -> Tensor:
    """Return a client's labels per class: the quota in proportion to its count, rounded up (eq. 3).

    A class that no client reports has ``unreported`` labels.
    """
    share = (counts * most + totals - 1) // totals.clamp(min=1)
    return torch.where(totals > 0, share, unreported)


def pick(likeliest: Tensor, confidence: Tensor, allocated: Tensor) -> Tensor:
    """Label the surest images of each likeliest class, as many as allocated; NaN is not sure."""
    known = ~confidence.isnan()
    rank = rank_within(likeliest, torch.where(known, confidence, -torch.inf))
    return torch.where(known & (rank < allocated[likeliest]), likeliest, -1)


def cps(tables: Sequence[Tensor]) -> list[Labelled]:
    """Select labels once, cooperatively among these clients."""
    classes = tables[0].shape[1]
    counts = [count_classes(table.argmax(-1)[reliable(table)], classes) for table in tables]
    totals = torch.stack(counts).sum(0)
    images = sum(map(len, tables))
    most = quota("quarter", images, totals, 0)
    unreported = unreported_share("quarter", images, classes, 0, len(tables))
    labelled = []
    for table, own in zip(tables, counts, strict=True):
        confidence, likeliest = table.max(-1)
        labelled.append(Labelled(pick(likeliest, confidence, allocation(own, totals, most, unreported))))
    return labelled


# --- for whole federations


def relabelled(
    train: Samples, rows: Sequence[Tensor], features: Tensor, texts: Tensor, scale: float, rule: LabelRule
) -> tuple[Samples, list[Tensor]]:
    """Return samples with each client's zero-shot pseudo-labels, and the rows that have one.

    ``features`` and ``texts`` are unit vectors. The labels of ``train`` are not read.
    """
    held = [client for client in rows if len(client)]
    tables = [probabilities(features[client], texts, scale) for client in held]
    found = cps(tables) if rule.scheme == "cps" else [label_by_rule(table, rule) for table in tables]
    labels = torch.full_like(train.labels, -1)
    inputs = dict(train.inputs)
    if rule.scheme == "cpl":
        inputs["candidates"] = texts.new_zeros(len(labels), len(texts))
    for client, labelled in zip(held, found, strict=True):
        labels[client] = labelled.labels
        if labelled.candidates is not None:
            inputs["candidates"][client] = labelled.candidates
    return Samples(inputs, labels), [client[labels[client] >= 0] for client in rows]


def probabilities(features: Tensor, texts: Tensor, scale: float) -> Tensor:
    return torch.cat(
        [torch.softmax(scale * part @ texts.T, dim=-1) for part in torch.split(features, LABELLED_AT_ONCE)]
    )


def label_figures(labels: Sequence[Tensor], truths: Sequence[Tensor]) -> dict[str, Any]:
    """Return the number of labels and the percentage true (None if unknown); FedPP's table 7."""
    label, truth = torch.cat(list(labels)), torch.cat(list(truths))
    used = label >= 0
    known = used & (truth >= 0)
    right = int((known & (label == truth)).sum())
    return {
        "pseudo_labels_used": int(used.sum()),
        "pseudo_label_accuracy": 100 * right / int(known.sum()) if bool(known.any()) else None,
    }
