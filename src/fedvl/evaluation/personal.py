"""The personal protocol: every client asks its own model, shared and private tensors together, about its own test part."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedvl.evaluation.metrics import confusion_matrix, summary
from fedvl.evaluation.predict import classify
from fedvl.methods.base import Method, Samples
from fedvl.tensors import Tensors

Integers = NDArray[np.int64]


def personal_answers(
    method: Method,
    tensors_of: Callable[[int], Tensors],
    test: Samples,
    parts: Sequence[torch.Tensor],
    batch_size: int,
) -> Integers:
    """The class that its client's model gives to each test row; -1 for a row that no client asks about."""
    answers = np.full(len(test), -1)
    for client, rows in enumerate(parts):
        if len(rows):
            answers[rows.cpu().numpy()] = classify(method, tensors_of(client), test.take(rows), batch_size)
    return answers


def personal_confusions(
    test: Samples, parts: Sequence[torch.Tensor], answers: Integers, classes: int
) -> list[Integers]:
    """A confusion matrix for each client; of nothing but zeros for one that has no test images."""
    labels = test.labels.cpu().numpy()
    own = [rows.cpu().numpy() for rows in parts]
    return [confusion_matrix(labels[rows], answers[rows], classes) for rows in own]


def personal_figures(confusions: Sequence[Integers]) -> dict[str, Any]:
    """The mean of the clients' accuracies, in which clients count alike, and that in which test images do.

    Precision, recall and F1 are those of all answers together.
    """
    by_client = [100 * float(np.trace(matrix) / matrix.sum()) if matrix.any() else None for matrix in confusions]
    together = summary(np.sum(confusions, axis=0))
    return {
        **together,
        "accuracy": float(np.mean([accuracy for accuracy in by_client if accuracy is not None])),
        "weighted_accuracy": together["accuracy"],
        "per_client_accuracy": by_client,
    }
