"""Imitate clients: compute by the method's own code what a client of given images sends."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from fedvl.audit.evidence import Evidence
from fedvl.audit.messages import Message, Seen, seen_in
from fedvl.config import TrainingConfig
from fedvl.errors import FedVLError
from fedvl.evaluation.statistics import Numbers
from fedvl.federation.checks import sum_of_reports
from fedvl.federation.chunks import LABELS
from fedvl.federation.local import LocalEngine
from fedvl.federation.privacy import RecordPrivacy
from fedvl.federation.statistics_privacy import statistics_privacy
from fedvl.federation.training import LEAST_CHUNK
from fedvl.methods.base import Samples, Update
from fedvl.seeding import torch_generator
from fedvl.tensors import ByClient, Tensors, count_elements

IMITATION_SEED = 2**31 - 1  # the attacker's own: it imitates without the seed of the run
AT_ONCE, STACKED = 64, 2**24  # imitated clients, and their numbers, in one kernel
MAX_NUMBERS = 2**15  # of a change that are compared
ONE_STEP = TrainingConfig(
    optimiser="sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.0, batch_size=2**20, local_epochs=1
)


class Noiseless(RecordPrivacy):
    """Gradients are cut, and no noise is added."""

    def sigma(self, images: int, rounds: int) -> float:
        return 0.0


METHOD_FAILS = "The method fails for an imitated client"


class CannotImitateError(FedVLError):
    """The method's code fails for a client of these images."""


Noise = Literal["none", "run", "cut"]
Began = tuple[int, Tensors]  # a round, and the tensors that it begins with


class Coordinates:
    """The numbers of a change that are compared: all of them, or a random part of many."""

    def __init__(self, names: Sequence[str], like: Tensors) -> None:
        total = sum(like[name].numel() for name in names)
        self.places: dict[str, Tensor | None] = {}
        generator = torch_generator(0, "coordinates")
        for name in names:
            count = like[name].numel()
            kept = max(1, round(count * MAX_NUMBERS / max(total, MAX_NUMBERS)))
            self.places[name] = None if kept == count else torch.randperm(count, generator=generator)[:kept]

    def of(self, change: Tensors) -> Tensor:
        """Return the numbers of a change as one vector."""
        flat = {name: change[name].flatten().cpu() for name in self.places}
        return torch.cat([flat[name] if at is None else flat[name][at] for name, at in self.places.items()])


def imitate(
    evidence: Evidence,
    samples: Samples,
    rows: Iterable[Tensor],
    began: Sequence[Began],
    training: TrainingConfig | None = None,
    noise: Noise = "none",
    every_image: bool = False,
) -> Iterator[list[Seen]]:
    """Yield what a server would see of each imitated client in each of these rounds.

    A client keeps its private tensors from one round to the next. ``noise``: none, as in the run on
    its images, or gradients are cut as in the run without noise. ``every_image``: it trains on all
    images, also where a consultation would choose some.
    """
    method, federation = evidence.method, evidence.experiment.federation
    all_rows = [each.to(samples.labels.device) for each in rows]
    most = (federation.chunk or LEAST_CHUNK) if evidence.slow else AT_ONCE
    chunk = max(1, min(most, STACKED // max(count_elements(began[0][1]), 1)))
    privacy = None if noise == "none" else evidence.experiment.privacy
    settings = federation.model_copy(update={"chunk": chunk, "attack": None, "secure_sum": False})
    for first in range(0, len(all_rows), chunk):
        some = all_rows[first : first + chunk]
        engine = LocalEngine(
            method, samples, some, training or evidence.experiment.training, settings, IMITATION_SEED + first, privacy
        )
        if engine.hidden is not None and noise == "cut":
            engine.hidden = Noiseless(engine.hidden.config, engine.training, federation.rounds)
        if privacy is not None:  # of a secure sum each client's share, as in the run
            vars(engine)["statistics_noise"] = statistics_privacy(method, privacy, federation)
        found: list[list[Seen]] = [[] for _ in some]
        for index, before in began:
            handed = before
            if not method.role.given.keys() <= before.keys():  # what a method gives in a client's first round
                handed = {**method.hand_out(before, {}, 0), **before}
            try:
                reports = consult(evidence, engine, index, handed, every_image)
                trained = [] if method.role.statistics else engine.train(index, range(len(some)), handed)
                answers = {result.update.client: result for result in trained}
                sums = {c: engine.sent_statistics(index, c, handed) for c in range(len(some)) if method.role.statistics}
            except Exception as error:  # whatever the method's code does wrong
                sizes = sorted({len(each) for each in some})
                raise CannotImitateError(f"{METHOD_FAILS} of {' or '.join(map(str, sizes))} images: {error}") from error
            engine.keep(trained)
            for client in range(len(some)):
                report, result = reports.get(client, {}), answers.get(client)
                if client in sums:
                    message = Message(client, index, before, Update(client, sums[client], 0.0), 0.0, report)
                elif result is None:
                    still = Update(client, {name: before[name] for name in engine.start if name in before}, 0.0)
                    message = Message(client, index, before, still, 0.0, report)
                else:
                    message = Message(client, index, before, result.update, result.loss, report, result.examples)
                found[client].append(seen_in(message))
        yield from found


def consult(evidence: Evidence, engine: LocalEngine, index: int, shared: Tensors, every_image: bool) -> ByClient:
    """Hold the consultation before a round as the server held it; return the clients' reports."""
    consultation, reports = evidence.method.consultation(), list[tuple[int, Tensors]]()
    if consultation is not None and consultation.due(index):
        good, _ = engine.reports(index, shared)
        reports = [(report.client, report.tensors) for report in good if report.client is not None]
        happened = evidence.rounds[index]
        total = happened.report or (sum_of_reports(good).tensors if good else {})
        if total and consultation.summed:
            engine.adopt(happened.settlements or {None: consultation.settle(index, total, None)})
        elif total:
            engine.adopt({client: consultation.settle(index, total, own) for client, own in reports})
    if every_image and consultation is not None:
        for client in range(engine.clients):
            private = engine.private_of(client)
            if LABELS in private:
                labels = guessed_labels(evidence, engine.data.take(engine.rows[client]))
                engine.private[client] = {**private, LABELS: labels}
    return dict(reports)


def guessed_labels(evidence: Evidence, samples: Samples) -> Tensor:
    """Return the labels that a client would give: the pretrained model's, if it names classes."""
    if "features" not in samples.inputs:
        return samples.labels
    return (samples.inputs["features"] @ evidence.method.task.text_features.T).argmax(-1)


def joined(evidence: Evidence, *parts: Samples) -> Samples:
    """Return the rows of all parts; texts of different splits are padded to the same length."""
    inputs = {}
    for name in parts[0].inputs:
        tensors = [part.inputs[name] for part in parts]
        if name == "tokens":
            end = int(evidence.method.task.fused.tokenise([""])[0, -1])
            longest = max(tensor.shape[1] for tensor in tensors)
            tensors = [pad(tensor, (0, longest - tensor.shape[1]), value=end) for tensor in tensors]
        inputs[name] = torch.cat(tensors)
    return Samples(inputs, torch.cat([part.labels for part in parts]))


def draw_rows(of: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draw rows, each once as long as there are enough."""
    if size <= len(of):
        return of[torch.randperm(len(of), generator=generator)[:size]]
    return of[torch.randint(len(of), (size,), generator=generator)]


class Mixture:
    """Take a message apart into non-negative shares of directions (kinds x numbers)."""

    def __init__(self, directions: Tensor) -> None:
        self.basis, corner = torch.linalg.qr(directions.double().T)
        self.corner = corner.numpy()

    def of(self, message: Tensor) -> Numbers:
        from scipy.optimize import nnls

        found: NDArray[np.float64] = nnls(self.corner, (self.basis.T @ message.double()).numpy())[0]
        return found / total if (total := found.sum()) > 0 else found
