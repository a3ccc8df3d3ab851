"""Imitate clients: train the attacker's own images as a client would, and compare the changes."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from fedvl.audit.evidence import Evidence, subtract
from fedvl.audit.finding import Numbers
from fedvl.config import TrainingConfig
from fedvl.federation.chunks import LABELS
from fedvl.federation.local import LocalEngine
from fedvl.federation.training import LEAST_CHUNK
from fedvl.methods.base import Samples
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors, count_elements

SEED = 2**31 - 1  # the attacker's own: it imitates without the seed of the run
MOST_NUMBERS = 2**15  # of a change that are compared
AT_ONCE, STACKED = 64, 2**24  # imitated clients, and their numbers, in one kernel
COMPANY, LITTLE_COMPANY = 15, 3  # images beside a candidate where a loss needs a batch
ONE_STEP = TrainingConfig(
    optimiser="sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.0, batch_size=2**20, local_epochs=1
)


class Coordinates:
    """The numbers of a change that are compared: all of them, or a random part of many."""

    def __init__(self, names: Sequence[str], like: Tensors) -> None:
        total = sum(like[name].numel() for name in names)
        self.places: dict[str, Tensor | None] = {}
        generator = torch_generator(0, "coordinates")
        for name in names:
            count = like[name].numel()
            kept = max(1, round(count * MOST_NUMBERS / max(total, MOST_NUMBERS)))
            self.places[name] = None if kept == count else torch.randperm(count, generator=generator)[:kept]

    def of(self, change: Tensors) -> Tensor:
        """Return the numbers of a change as one vector."""
        flat = {name: change[name].flatten().cpu() for name in self.places}
        return torch.cat([flat[name] if at is None else flat[name][at] for name, at in self.places.items()])


def moved_names(evidence: Evidence, change: Tensors, trained: bool = False) -> list[str]:
    """Return the shared tensors that clients change; ``trained``: by gradients alone."""
    shared = evidence.method.role.shared
    return [name for name in change if not trained or shared(name).trained]


def imitate(
    evidence: Evidence,
    samples: Samples,
    rows: Iterable[Tensor],
    before: Tensors,
    round_index: int,
    training: TrainingConfig | None = None,
    as_run: bool = False,
) -> Iterator[Tensors]:
    """Yield how each imitated client changes the tensors; one that does not train changes none.

    ``as_run``: it is a client to attack, with the run's own noise on its images.
    """
    method, federation = evidence.method, evidence.experiment.federation
    all_rows = [each.to(samples.labels.device) for each in rows]
    most = (federation.chunk or LEAST_CHUNK) if evidence.slow else AT_ONCE
    chunk = max(1, min(most, STACKED // max(count_elements(before), 1)))
    engine = LocalEngine(
        method,
        samples,
        all_rows,
        training or evidence.experiment.training,
        federation.model_copy(update={"chunk": chunk}),
        SEED,
        evidence.experiment.privacy if as_run else None,
    )
    handed = before
    if not method.role.given.keys() <= before.keys():  # what a method gives in a client's first round
        handed = {**method.hand_out(before, {}, 0), **before}
    for first in range(0, len(all_rows), chunk):
        cohort = range(first, min(first + chunk, len(all_rows)))
        for client in cohort:
            private = engine.private_of(client)
            if LABELS in private:  # made in a consultation that the attacker skips
                labels = guessed_labels(evidence, samples.take(all_rows[client]))
                engine.private[client] = {**private, LABELS: labels}
        trained = {result.update.client: result.update.tensors for result in engine.train(round_index, cohort, handed)}
        for client in cohort:
            yield subtract(trained.get(client, before), before)
            engine.private.pop(client, None)


def guessed_labels(evidence: Evidence, samples: Samples) -> Tensor:
    """Return the labels that a client would give: the pretrained model's, if it names classes."""
    if "features" not in samples.inputs:
        return samples.labels
    return (samples.inputs["features"] @ evidence.method.task.text_features.T).argmax(-1)


def gradients(
    evidence: Evidence, samples: Samples, before: Tensors, round_index: int, coordinates: Coordinates
) -> Tensor:
    """Return the gradient of each sample (rows x numbers), alone or in the same company."""
    found = torch.zeros(0, 0)
    if evidence.method.scope == "row":
        found = gradients_beside(evidence, samples, False, before, round_index, coordinates)
    if found.any():
        return found
    # alone, a client of one class may have no loss at all
    return gradients_beside(evidence, samples, True, before, round_index, coordinates)


def gradients_beside(
    evidence: Evidence,
    samples: Samples,
    accompanied: bool,
    before: Tensors,
    round_index: int,
    coordinates: Coordinates,
) -> Tensor:
    """Return the gradient of each sample, alone or in a batch with the attacker's images."""
    count = len(samples)
    company = torch.arange(0)
    if accompanied:
        size = min(LITTLE_COMPANY if evidence.slow else COMPANY, len(evidence.own))
        beside = evidence.own.take(torch.arange(size, device=evidence.own.labels.device))
        samples = joined(evidence, samples, beside)
        company = torch.arange(count, len(samples))
    rows = (torch.cat([torch.tensor([row]), company]) for row in range(count))
    changes = imitate(evidence, samples, rows, before, round_index, ONE_STEP)
    return torch.stack([-coordinates.of(change) for change in changes])


def joined(evidence: Evidence, first: Samples, second: Samples) -> Samples:
    """Return the rows of both; texts of different splits are padded to the same length."""
    inputs = {}
    for name, tensor in first.inputs.items():
        parts = [tensor, second.inputs[name]]
        if name == "tokens":
            end = int(evidence.method.task.fused.tokenise([""])[0, -1])
            longest = max(part.shape[1] for part in parts)
            parts = [pad(part, (0, longest - part.shape[1]), value=end) for part in parts]
        inputs[name] = torch.cat(parts)
    return Samples(inputs, torch.cat([first.labels, second.labels]))


def draw_rows(of: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draw rows, each once as long as there are enough."""
    if size <= len(of):
        return of[torch.randperm(len(of), generator=generator)[:size]]
    return of[torch.randint(len(of), (size,), generator=generator)]


def mixture(directions: Tensor, change: Tensor) -> Numbers:
    """Return non-negative shares of the directions (kinds x numbers) that best add to a change."""
    from scipy.optimize import nnls

    basis, corner = torch.linalg.qr(directions.double().T)
    found: NDArray[np.float64] = nnls(corner.numpy(), (basis.T @ change.double()).numpy())[0]
    return found / total if (total := found.sum()) > 0 else found
