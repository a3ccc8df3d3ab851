"""Classification metrics, all computed from the confusion matrix."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def confusion_matrix(labels: NDArray[np.int64], predictions: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Count true classes (rows) against predicted classes (columns)."""
    return np.bincount(labels * classes + predictions, minlength=classes * classes).reshape(classes, classes)


def recall_by_class(confusion: NDArray[np.int64]) -> list[float | None]:
    """Return the recall of each class in percent; None for a class without samples."""
    support = confusion.sum(axis=1)
    return [100 * float(confusion[c, c]) / int(n) if n else None for c, n in enumerate(support)]


def accuracy_by_mix(recalls: list[float | None], counts: NDArray[np.int64]) -> list[float | None]:
    """Return the accuracy expected on each row's own mix of classes; None for an empty row.

    Classes without a recall are left out of the mix.
    """
    known = np.array([recall is not None for recall in recalls])
    shares, rates = counts[:, known], np.array([recall for recall in recalls if recall is not None])
    return [float(row @ rates / row.sum()) if row.any() else None for row in shares]


def summary(confusion: NDArray[np.int64]) -> dict[str, float]:
    """Return accuracy and macro precision, recall and F1 in percent.

    Macro averages cover the classes that occur or were predicted. A ratio with denominator 0 counts
    as 0, like scikit-learn's ``zero_division=0``.
    """
    hits = np.diag(confusion).astype(float)
    support, predicted = confusion.sum(axis=1), confusion.sum(axis=0)
    occurring = (support + predicted) > 0
    precision = ratio(hits, predicted)
    recall = ratio(hits, support)
    f1 = ratio(2 * hits, support + predicted)
    return {
        "accuracy": 100 * float(hits.sum() / confusion.sum()),
        "macro_precision": 100 * float(precision[occurring].mean()),
        "macro_recall": 100 * float(recall[occurring].mean()),
        "macro_f1": 100 * float(f1[occurring].mean()),
    }


def fairness(accuracies: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Return how far clients differ: the worst, the mean of the worst tenth, and the deviation.

    The worst tenth is one client at least.
    """
    ordered = np.sort(np.asarray(accuracies, float))
    return {
        "worst_client_accuracy": float(ordered[0]),
        "worst_tenth_accuracy": float(ordered[: -(-len(ordered) // 10)].mean()),
        "client_deviation": float(ordered.std()),
    }


def ratio(numerator: NDArray[np.float64], denominator: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)
