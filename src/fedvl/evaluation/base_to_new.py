"""The base-to-new protocol: candidate sets of own, base and new classes, and their means.

A client's model is asked about test images of its own classes, among these (``own``) and among all
base classes (``local``), about all base classes, and about all new ones. Accuracies are means over
clients. HM3 is the harmonic mean of local, base and new (FedPGP), HM2 that of base and new, and CM
the mean of local and HM2 (FedMGP).
"""

from collections.abc import Sequence
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fedvl.evaluation.contents import SetFigure, SetName, SetsRight
from fedvl.evaluation.predict import predict_classes
from fedvl.evaluation.statistics import Interval, bootstrap_figures, bootstrap_seeds
from fedvl.methods.base import Method, Samples
from fedvl.tensors import IntArray, Tensors

ShareArray = NDArray[np.float64]
SETS: tuple[SetName, ...] = get_args(SetName)


class Hits(NamedTuple):
    """What was answered rightly, image by image."""

    owner: IntArray  # the client whose class a base image shows; -1 if it takes no part
    own: ShareArray  # of each base image: whether its owner is right, asked among the owner's classes
    local: ShareArray  # of each base image: whether its owner is right, asked among all base classes
    base: ShareArray  # of each base image: the share of clients that are right, asked among all base classes
    new: ShareArray  # of each new image: the share of clients that are right, asked among all new classes


def harmonic_mean(*values: float) -> float:
    return len(values) / sum(1 / value for value in values) if all(value > 0 for value in values) else 0.0


def set_figures(own: float, local: float, base: float, new: float) -> dict[str, float]:
    """Return the accuracies of the four candidate sets, HM3, HM2 and CM."""
    both = harmonic_mean(base, new)
    means = {"hm3": harmonic_mean(local, base, new), "hm2": both, "cm": (local + both) / 2}
    return {"own": own, "local": local, "base": base, "new": new, **means}


def set_percentages(hits: Hits) -> dict[str, float]:
    """Return the figures in percent."""
    owned = hits.owner >= 0
    count = np.bincount(hits.owner[owned])
    right = [np.bincount(hits.owner[owned], shares[owned]) for shares in (hits.own, hits.local)]
    by_client = [own[count > 0] / count[count > 0] for own in right]
    return set_figures(*(100 * float(shares.mean()) for shares in (*by_client, hits.base, hits.new)))


def drawn_again(hits: Hits, base: IntArray, new: IntArray) -> Hits:
    """Return the hits of some base and some new images."""
    return Hits(hits.owner[base], hits.own[base], hits.local[base], hits.base[base], hits.new[new])


def figures_with_intervals(hits: Hits, zero_shot: Hits | None) -> list[SetFigure]:
    """Return each figure with its interval: the test images are drawn again."""
    known, sure = set_percentages(hits), set_intervals(hits)
    rows = [SetFigure(name=name, accuracy=known[name], interval=list(sure[name])) for name in SETS]
    if zero_shot is None:
        return rows
    known, sure = set_percentages(zero_shot), set_intervals(zero_shot)
    return [
        row.model_copy(update={"zero_shot_accuracy": known[row.name], "zero_shot_interval": list(sure[row.name])})
        for row in rows
    ]


def set_intervals(hits: Hits) -> dict[str, Interval]:
    def drawn(base: IntArray, new: IntArray) -> dict[str, float]:
        return set_percentages(drawn_again(hits, base, new))

    return bootstrap_figures((len(hits.base), len(hits.new)), drawn)


def kept(hits: Hits) -> SetsRight:
    """Return per-image correctness for the result file; shares are in thousandths."""
    base, new = (np.rint(1000 * shares).astype(int).tolist() for shares in (hits.base, hits.new))
    own, local = (letters(hits.owner, right) for right in (hits.own, hits.local))
    return SetsRight(owner=hits.owner.tolist(), own=own, local=local, base=base, new=new)


def letters(owner: IntArray, right: ShareArray) -> str:
    """Return 1 for an image that its owner names rightly, 0 for others, - for one without owner."""
    return "".join("-" if client < 0 else "01"[int(hit)] for client, hit in zip(owner, right, strict=True))


def right_of(text: str) -> ShareArray:
    return np.array([letter == "1" for letter in text], float)


def mean_intervals(runs: Sequence[SetsRight]) -> dict[str, Interval]:
    """Return the intervals of each figure's mean over runs of several seeds, on the same images."""
    hits = [
        Hits(
            np.array(run.owner),
            right_of(run.own),
            right_of(run.local),
            np.array(run.base) / 1000,
            np.array(run.new) / 1000,
        )
        for run in runs
    ]

    def drawn(generator: np.random.Generator) -> list[dict[str, float]]:
        base, new = (generator.integers(0, count, count) for count in (len(hits[0].base), len(hits[0].new)))
        return [set_percentages(drawn_again(one, base, new)) for one in hits]

    images = sum(len(one.base) + len(one.new) for one in hits)
    return bootstrap_seeds([set_percentages(one) for one in hits], drawn, images)


def all_right(method: Method, models: Sequence[Tensors], samples: Samples, batch_size: int) -> ShareArray:
    """Return a row for each model: whether it names each image rightly."""
    labels = samples.labels.cpu().numpy()
    right = [predict_classes(method, model, samples, batch_size).classes == labels for model in models]
    return np.array(right, dtype=np.float64)
