"""A user asks: images go through the model in their order, in batches, and what a method remembers of them goes along."""

import numpy as np
import torch
from numpy.typing import NDArray

from fedvl.evaluation.clusters import cluster, name_clusters
from fedvl.evaluation.metrics import confusion_matrix
from fedvl.methods.base import Method, Samples
from fedvl.tensors import Tensors


def answer_all(method: Method, tensors: Tensors, samples: Samples, batch_size: int) -> NDArray[np.int64]:
    """The likeliest class of each row, one session from first to last; the first class wins a tie."""
    session: Tensors = {}
    answers = []
    with torch.no_grad():
        for first in range(0, len(samples), batch_size):
            inputs = {name: tensor[first : first + batch_size] for name, tensor in samples.inputs.items()}
            scores, session = method.answer(tensors, session, inputs)
            answers.append(scores.argmax(dim=-1).cpu())
    return torch.cat(answers).numpy()


def confusion(method: Method, tensors: Tensors, samples: Samples, batch_size: int) -> NDArray[np.int64]:
    """The confusion matrix of one session over labelled samples."""
    labels, classes = samples.labels.cpu().numpy(), len(method.task.class_names)
    if method.clusters:
        answers = name_clusters(cluster(represent_all(method, tensors, samples, batch_size), classes), labels, classes)
    else:
        answers = answer_all(method, tensors, samples, batch_size)
    return confusion_matrix(labels, answers, classes)


def represent_all(method: Method, tensors: Tensors, samples: Samples, batch_size: int) -> NDArray[np.float32]:
    """What a method that cannot name classes makes of each row."""
    with torch.no_grad():
        parts = [
            method.represent(
                tensors, {name: tensor[first : first + batch_size] for name, tensor in samples.inputs.items()}
            ).cpu()
            for first in range(0, len(samples), batch_size)
        ]
    return torch.cat(parts).numpy()
