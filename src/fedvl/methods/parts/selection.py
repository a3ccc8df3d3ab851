"""Cooperative selection (FedPP, eq. 2 and 3): clients agree through class counts what to label.

A client counts the classes of its reliable images and the server sums the counts; the totals say
how many images of each class every client labels, so that all classes are learned equally. Eq. 3
needs the totals only: a client can compute its share without showing its counts (``summed``);
otherwise the server sees them and computes the shares.

With ``shares`` a client reports which share of its reliable images each class has, in whole parts:
their norm is bounded, so that noise can cover them (``--privacy client``). The totals then say how
classes compare. A client labels its own counts times mean total / total, scaled to its own quota.

A :class:`~fedvl.methods.base.Consultation` for any method whose clients keep
:meth:`Selection.join`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedvl.methods.base import Samples
from fedvl.methods.parts import pseudo_labels
from fedvl.methods.roles import Private, Role, Shapes
from fedvl.tensors import Tensors

SHARE_PARTS = 256  # parts that the shares of a client have together
MAX_RARE_WEIGHT = 4  # times that a client's images of a rare class count more, at most, by noisy totals

Predict = Callable[[int, Tensors, Tensors], Tensor]  # round, tensors, inputs -> images x classes, probabilities


class Selection(NamedTuple):
    predict: Predict
    classes: int
    clients: int
    interval: int  # Q: rounds between two selections
    scheme: str = "cps"  # or one of pseudo_labels.LABELLERS, with which each client labels alone
    shots: int = 16  # labels per class and client of such a labeller
    filters: pseudo_labels.Filters = "both"
    quota: pseudo_labels.Quota = "quarter"
    summed: bool = True
    shares: bool = False

    @property
    def sensitivity(self) -> int | None:
        return SHARE_PARTS if self.shares else None

    @property
    def report_shapes(self) -> Shapes:
        if self.scheme != "cps":
            return {}
        return {"counts": (self.classes,)} if self.shares else {"counts": (self.classes,), "images": (1,)}

    @property
    def settlement_shapes(self) -> Shapes:
        if self.scheme != "cps":
            return {}
        if self.shares:
            return {"totals": (self.classes,), "generation": (1,)}
        return {"totals": (self.classes,), "quota": (2,)} if self.summed else {"allocation": (self.classes,)}

    def roles(self) -> dict[str, Role]:
        return dict.fromkeys(("labels", "likeliest", "confidence"), Private(per_sample=True))

    def join(self, samples: Samples) -> Tensors:
        """Return a client's private tensors, without labels yet."""
        nothing = torch.zeros_like(samples.labels)
        confidence, counts = nothing.to(torch.get_default_dtype()), nothing.new_zeros(self.classes)
        return {"labels": nothing - 1, "likeliest": nothing, "confidence": confidence, "counts": counts}

    def due(self, round_index: int) -> bool:
        return round_index % self.interval == 0

    def report(self, round_index: int, tensors: Tensors, samples: Samples) -> tuple[Tensors, Tensors]:
        """Return the counts of the client's reliable images (eq. 2) and its number of images."""
        table = self.predict(round_index, tensors, samples.inputs)
        if self.scheme != "cps":
            return {}, {
                "labels": pseudo_labels.label_by_rule(table, pseudo_labels.LabelRule(self.scheme, self.shots)).labels
            }
        confidence, likeliest = table.max(-1)
        counts = pseudo_labels.count_classes(likeliest[pseudo_labels.reliable(table, self.filters)], self.classes)
        sent = {"counts": counts.float(), "images": counts.new_tensor([len(samples)]).float()}
        if self.shares:
            sent = {"counts": torch.floor(counts * SHARE_PARTS / counts.sum().clamp(min=1)).float()}
        return sent, {"likeliest": likeliest, "confidence": confidence, "counts": counts}

    def settle(self, round_index: int, total: Tensors, own: Tensors | None) -> Tensors:
        """Return the totals, M and the share of an unreported class, or a client's whole share."""
        if self.scheme != "cps":
            return {}
        generation = round_index // self.interval
        if self.shares:
            mean = self.clients * SHARE_PARTS / self.classes  # known: a client's shares are SHARE_PARTS together
            totals = (total["counts"] - total["counts"].mean() + mean).clamp(min=mean / MAX_RARE_WEIGHT)
            return {"totals": totals, "generation": totals.new_tensor([generation])}
        totals, images = total["counts"].long(), int(total["images"])
        most = pseudo_labels.quota(self.quota, images, totals, generation)
        unreported = pseudo_labels.unreported_share(self.quota, images, self.classes, generation, self.clients)
        if own is None:
            return {"totals": total["counts"], "quota": total["counts"].new_tensor([most, unreported])}
        return {"allocation": pseudo_labels.allocation(own["counts"].long(), totals, most, unreported).float()}

    def adopt(self, private: Tensors, settlement: Tensors) -> Tensors:
        if self.scheme != "cps":
            return {}
        if "allocation" in settlement:
            allocated = settlement["allocation"].long()
        elif self.shares:
            totals, generation = settlement["totals"], int(settlement["generation"])
            images = len(private["labels"])
            own = self.classes * pseudo_labels.quota(self.quota, images, private["counts"], generation)
            allocated = balanced_labels(private["counts"], totals, own)
        else:
            most, unreported = settlement["quota"].long().tolist()
            totals = settlement["totals"].long()
            allocated = pseudo_labels.allocation(private["counts"], totals, most, unreported)  # eq. 3
        return {"labels": pseudo_labels.pick(private["likeliest"], private["confidence"], allocated)}


def balanced_labels(counts: Tensor, totals: Tensor, wanted: int) -> Tensor:
    """Return a client's labels per class, eq. 3: ``wanted`` in all if the totals are equal."""
    weights = totals.mean() / totals * wanted / counts.sum().clamp(min=1)
    return torch.ceil(counts * weights).long()
