"""Evaluate each client's own model on its own part of the test data."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fedvl.evaluation.metrics import confusion_matrix, fairness, summary
from fedvl.evaluation.predict import Predicted, predict_classes
from fedvl.methods.base import Method, Samples
from fedvl.tensors import IntArray, Tensors


def personal_answers(
    method: Method,
    tensors_of: Callable[[int], Tensors],
    test: Samples,
    parts: Sequence[torch.Tensor],
    batch_size: int,
    candidates: Sequence[torch.Tensor] = (),
    temperature: float = 1.0,
) -> Predicted:
    """Predict each test row with its client's model; -1 for a row that belongs to no client.

    ``candidates`` are the classes among which each client is asked; if absent, all.
    """
    answers = Predicted(np.full(len(test), -1), np.full(len(test), np.nan), np.full(len(test), np.nan))
    for client, rows in enumerate(parts):
        if len(rows):
            among = candidates[client] if candidates else None
            found = predict_classes(method, tensors_of(client), test.take(rows), batch_size, among, temperature)
            for whole, part in zip(answers, found, strict=True):
                whole[rows.cpu().numpy()] = part
    return answers


def personal_confusions(
    test: Samples, parts: Sequence[torch.Tensor], answers: IntArray, classes: int
) -> list[IntArray]:
    """Return a confusion matrix per client; all zeros for a client without test images."""
    labels = test.labels.cpu().numpy()
    own = [rows.cpu().numpy() for rows in parts]
    return [confusion_matrix(labels[rows], answers[rows], classes) for rows in own]


def personal_figures(confusions: Sequence[IntArray]) -> dict[str, Any]:
    """Return the metrics of all clients.

    ``accuracy`` weights clients equally and ``weighted_accuracy`` by test images; precision, recall
    and F1 are those of all predictions together.
    """
    by_client = [100 * float(np.trace(matrix) / matrix.sum()) if matrix.any() else None for matrix in confusions]
    together = summary(np.sum(confusions, axis=0))
    known = [accuracy for accuracy in by_client if accuracy is not None]
    return {
        **together,
        **fairness(known),
        "accuracy": float(np.mean(known)),
        "weighted_accuracy": together["accuracy"],
        "per_client_accuracy": by_client,
        "per_client_test_images": [int(matrix.sum()) for matrix in confusions],
    }
