"""Predict in order and in batches, with the session state that a method keeps in between."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedvl.evaluation.clusters import cluster, name_clusters
from fedvl.methods.base import Answer, Method, Samples
from fedvl.tensors import Tensors


@dataclass
class Conversation:
    """One user's queries to one model, with the session state between them."""

    method: Method
    tensors: Tensors
    session: Tensors = field(default_factory=dict)

    def ask(self, inputs: Tensors) -> Answer:
        with torch.no_grad():
            answer = self.method.answer(self.tensors, self.session, inputs)
        self.session = answer.session
        return answer


class Predicted(NamedTuple):
    """The class given to each row, and its share of the softmax of all candidates' scores."""

    classes: NDArray[np.int64]
    shares: NDArray[np.float64]  # not a number where clusters are named
    entropies: NDArray[np.float64]  # of all candidates' shares


def predict_all(
    method: Method,
    tensors: Tensors,
    samples: Samples,
    batch_size: int,
    among: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> Predicted:
    """Predict the class of each row in one session; the first class wins a tie.

    Candidates are all classes of the image's dataset, or those ``among`` which is asked. Shares are
    those of scores divided by a temperature.
    """
    classes, shares, entropies = [], [], []
    for scores in score_batches(method, tensors, samples, batch_size):
        scores = scores if among is None else scores[:, among]
        found = scores.argmax(dim=-1)
        all_shares = (scores.double() / temperature).softmax(-1)
        shares.append(all_shares.amax(-1).cpu())
        entropies.append(torch.special.entr(all_shares).sum(-1).cpu())
        classes.append((found if among is None else among[found]).cpu())
    return Predicted(torch.cat(classes).numpy(), torch.cat(shares).numpy(), torch.cat(entropies).numpy())


def score_batches(method: Method, tensors: Tensors, samples: Samples, batch_size: int) -> Iterator[torch.Tensor]:
    """Yield the scores of each batch in one session; classes of other datasets get the lowest."""
    origins = np.unique(method.task.origins, return_inverse=True)[1] if method.task.origins else None
    conversation = Conversation(method, tensors)
    for first in range(0, len(samples), batch_size):
        inputs = {name: tensor[first : first + batch_size] for name, tensor in samples.inputs.items()}
        scores = conversation.ask(inputs).scores
        if origins is not None:
            own = origins[samples.labels[first : first + batch_size].cpu().numpy()]
            elsewhere = torch.from_numpy(own[:, None] != origins).to(scores.device)
            scores = scores.masked_fill(elsewhere, torch.finfo(scores.dtype).min)
        yield scores


def predict_shares(
    method: Method, tensors: Tensors, samples: Samples, batch_size: int, temperature: float = 1.0
) -> NDArray[np.float64]:
    """Return the softmax of each row's scores over all classes, divided by a temperature."""
    parts = [
        (scores.double() / temperature).softmax(-1).cpu()
        for scores in score_batches(method, tensors, samples, batch_size)
    ]
    shares = torch.cat(parts) if parts else torch.zeros(0, len(method.task.class_names), dtype=torch.float64)
    found: NDArray[np.float64] = shares.numpy()
    return found


def answer_all(method: Method, tensors: Tensors, samples: Samples, batch_size: int) -> NDArray[np.int64]:
    """Predict the class of each row in one session, among all classes."""
    return predict_all(method, tensors, samples, batch_size).classes


def predict_classes(
    method: Method,
    tensors: Tensors,
    samples: Samples,
    batch_size: int,
    among: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> Predicted:
    """Predict the class of each row; a method that clusters is matched to the true labels."""
    if not method.clusters:
        return predict_all(method, tensors, samples, batch_size, among, temperature)
    classes = len(method.task.class_names)
    found = cluster(represent_all(method, tensors, samples, batch_size), classes)
    named = name_clusters(found, samples.labels.cpu().numpy(), classes)
    unknown = np.full(len(named), np.nan)
    return Predicted(named, unknown, unknown)


def represent_all(method: Method, tensors: Tensors, samples: Samples, batch_size: int) -> NDArray[np.float32]:
    """Return the features of each row that the method's predictions are based on."""
    with torch.no_grad():
        parts = [
            method.represent(
                tensors, {name: tensor[first : first + batch_size] for name, tensor in samples.inputs.items()}
            ).cpu()
            for first in range(0, len(samples), batch_size)
        ]
    return torch.cat(parts).numpy()
