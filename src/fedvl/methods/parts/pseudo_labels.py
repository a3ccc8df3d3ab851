"""Labels out of a model's own predictions, for data that has none: which images get one, and which.

A labeller reads one client's table of class probabilities (images x classes) and says the class of each image, or -1 for
an image that is not to be trained on. Any method can be given such labels (``data.labels``); FedPP makes its own anew
while it trains.

- ``zero-shot``: the likeliest class of every image.
- ``upl`` (Huang et al., 2022): of the images whose likeliest class is c, the ``shots`` surest.
- ``fpl`` (Menghini et al., 2023): ``shots`` images for *every* class; an image that finds its class full goes to the next
  likeliest. The released boards depend on the order of images and lose those they displace; if these try on instead, the
  order no longer matters, and the result is the greedy choice of pairs by their probability.
- ``cpl`` (Zhang et al., 2024): sets of candidate classes, then boards as for ``fpl``. An image's label is its board.
- ``cps`` (FedPP): clients count the classes of their reliable images, and the totals say how many each may label, so that
  all classes are learned alike and nobody labels a class that it hardly has.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedvl.methods.base import Samples

Scheme = Literal["zero-shot", "upl", "fpl", "cpl", "cps"]
Quota = Literal["quarter", "quarter-growing", "mean-reliable"]
Filters = Literal["both", "confidence", "entropy", "none"]
INTRA_QUANTILE, INTER_QUANTILE = 0.6, 0.9  # alpha and beta of CPL
ROWS_AT_ONCE = 65536


class Labelled(NamedTuple):
    labels: Tensor  # one for each image; -1: not to be trained on
    candidates: Tensor | None = None  # images x classes, 0 or 1, where there may be several


def zero_shot(table: Tensor, shots: int) -> Labelled:
    return Labelled(table.argmax(-1))


def upl(table: Tensor, shots: int) -> Labelled:
    confidence, likeliest = table.max(-1)
    return Labelled(torch.where(rank_within(likeliest, confidence) < shots, likeliest, -1))


def fpl(table: Tensor, shots: int) -> Labelled:
    return Labelled(boards(table, shots))


def cpl(table: Tensor, shots: int) -> Labelled:
    """Classes that are likely for the image (intra) and for which the image is among the likeliest (inter)."""
    threshold = torch.quantile(table.max(-1).values, INTRA_QUANTILE)
    ordered, classes = table.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    intra = torch.zeros_like(table).scatter(-1, classes, (before <= threshold).to(table.dtype)) > 0
    inter = table >= torch.quantile(table, INTER_QUANTILE, dim=0)
    candidates = intra & inter
    labels = boards(table.masked_fill(~candidates, -torch.inf), shots)
    return Labelled(labels, candidates.float())


LABELLERS = {"zero-shot": zero_shot, "upl": upl, "fpl": fpl, "cpl": cpl}


def rank_within(classes: Tensor, values: Tensor) -> Tensor:
    """The place of each row among those of its class, the largest value first (0); the first of equals wins."""
    order = values.argsort(descending=True, stable=True)
    order = order[classes[order].argsort(stable=True)]
    in_order = classes[order].contiguous()
    place = torch.arange(len(order), device=order.device) - torch.searchsorted(in_order, in_order)
    return torch.empty_like(order).scatter(0, order, place)


def boards(table: Tensor, size: int) -> Tensor:
    """Each image on at most one class's board of ``size`` places, which go to the likeliest; -infinity is never placed.

    Images ask for a place in the order of their likeliest classes and are displaced by likelier ones (deferred
    acceptance); since both sides go by one table, this is the greedy choice among all pairs.
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
    """Which images are surer than the client's median and of less entropy than its median (eq. 2)."""
    confidence, entropy = table.max(-1).values, torch.special.entr(table).sum(-1)
    kept = torch.ones_like(confidence, dtype=torch.bool)
    if filters in ("both", "confidence"):
        kept = kept & (confidence > torch.quantile(confidence, 0.5))
    if filters in ("both", "entropy"):
        kept = kept & (entropy < torch.quantile(entropy, 0.5))
    return kept


def count_classes(labels: Tensor, classes: int) -> Tensor:
    return torch.bincount(labels[labels >= 0], minlength=classes)


def quota(mode: Quota, images: int, totals: Tensor, generation: int) -> int:
    """M, the labels of each class over all clients. ``images`` is how many they hold, ``totals`` their reliable ones.

    The paper says "one-quarter of the total data", which we read as a quarter shared out over the classes; its successor
    FedCoPL takes the mean of the totals. ``generation`` counts the selections, from 0.
    """
    if mode == "mean-reliable":
        return -(-int(totals.sum()) // len(totals))
    growth = generation + 1 if mode == "quarter-growing" else 1
    return -(-images * growth // (4 * len(totals)))


def allocation(counts: Tensor, totals: Tensor, most: int, clients: int) -> Tensor:
    """How many images of each class a client labels: the quota in proportion to its count, rounded up (eq. 3).

    A class that nobody reports is shared out evenly, as FedCoPL does; eq. 3 has 0 / 0 there.
    """
    share = (counts * most + totals - 1) // totals.clamp(min=1)
    return torch.where(totals > 0, share, -(-most // clients))


def pick(likeliest: Tensor, confidence: Tensor, allocated: Tensor) -> Tensor:
    """The surest images of each class, as many as allocated, of those that are likeliest to be of it."""
    return torch.where(rank_within(likeliest, confidence) < allocated[likeliest], likeliest, -1)


def cps(tables: Sequence[Tensor]) -> list[Labelled]:
    """One cooperative selection among these clients."""
    classes = tables[0].shape[1]
    counts = [count_classes(table.argmax(-1)[reliable(table)], classes) for table in tables]
    totals = torch.stack(counts).sum(0)
    most = quota("quarter", sum(map(len, tables)), totals, 0)
    labelled = []
    for table, own in zip(tables, counts, strict=True):
        confidence, likeliest = table.max(-1)
        labelled.append(Labelled(pick(likeliest, confidence, allocation(own, totals, most, len(tables)))))
    return labelled


# --- for whole federations


def relabelled(
    train: Samples, rows: Sequence[Tensor], features: Tensor, texts: Tensor, scale: float, scheme: Scheme, shots: int
) -> tuple[Samples, list[Tensor]]:
    """Samples with the pseudo-labels that each client makes of its own zero-shot predictions, and the rows that got one.

    ``features`` and ``texts`` are unit vectors. Nothing here reads the labels that ``train`` came with.
    """
    held = [client for client in rows if len(client)]
    tables = [probabilities(features[client], texts, scale) for client in held]
    found = cps(tables) if scheme == "cps" else [LABELLERS[scheme](table, shots) for table in tables]
    labels = torch.full_like(train.labels, -1)
    inputs = dict(train.inputs)
    if scheme == "cpl":
        inputs["candidates"] = features.new_zeros(len(labels), len(texts))
    for client, labelled in zip(held, found, strict=True):
        labels[client] = labelled.labels
        if labelled.candidates is not None:
            inputs["candidates"][client] = labelled.candidates
    return Samples(inputs, labels), [client[labels[client] >= 0] for client in rows]


def probabilities(features: Tensor, texts: Tensor, scale: float) -> Tensor:
    return torch.cat([torch.softmax(scale * part @ texts.T, dim=-1) for part in torch.split(features, ROWS_AT_ONCE)])


def label_figures(labels: Sequence[Tensor], truths: Sequence[Tensor]) -> dict[str, Any]:
    """How many labels are used and the percent of them that are true (None where no truth is known); FedPP's table 7."""
    label, truth = torch.cat(list(labels)), torch.cat(list(truths))
    used = label >= 0
    known = used & (truth >= 0)
    right = int((known & (label == truth)).sum())
    return {
        "pseudo_labels_used": int(used.sum()),
        "pseudo_label_accuracy": 100 * right / int(known.sum()) if bool(known.any()) else None,
    }
