"""The personal protocol: every client asks its own model, shared and private tensors together, about its own test part."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedvl.evaluation.answers import confusion
from fedvl.evaluation.metrics import summary
from fedvl.methods.base import Method, Samples
from fedvl.tensors import Tensors

Matrix = NDArray[np.int64]


def personal_confusions(
    method: Method,
    tensors_of: Callable[[int], Tensors],
    test: Samples,
    parts: Sequence[torch.Tensor],
    batch_size: int,
) -> list[Matrix]:
    """A confusion matrix for each client; of nothing but zeros for one that has no test images."""
    nothing = np.zeros((len(method.task.class_names),) * 2, dtype=np.int64)
    return [
        confusion(method, tensors_of(client), test.take(rows), batch_size) if len(rows) else nothing
        for client, rows in enumerate(parts)
    ]


def personal_figures(confusions: Sequence[Matrix]) -> dict[str, Any]:
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
