"""A client's part of a federated evaluation: its own finished model counts its own test images."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedvl.errors import FedVLError
from fedvl.evaluation.counts import BINS, PAIR, Counts, count, count_pair, empty, withheld, withheld_pair
from fedvl.evaluation.noisy_counts import coarse, coarse_shapes, sensitivity_to_an_image
from fedvl.federation.accounting import Step, least_sigma
from fedvl.federation.count_noise import CountNoise
from fedvl.federation.fixed_point import count_numbers, unflat_statistics
from fedvl.methods.roles import Shapes
from fedvl.runs.evaluation import FROM_SERVER, shares_of, thresholds_at, write_thresholds
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import Prepared
from fedvl.tensors import FloatArray, IntArray, Tensors, digest, hash_as_tensor, tensor_as_hash

MODEL_HASH = "model"  # in a request: the SHA-256 of the shared tensors that are evaluated
OTHER_RUN, OTHER_HASH = "other_run", "other_model"  # of the run that a model is compared with, if any
SENT_THRESHOLDS = "thresholds"  # that the server's run has: the bin of each class, for the client's copy of the model
NOISE_ASKED = "noise"  # epsilon and delta, if counts are requested with noise that hides each image
REQUESTED = {MODEL_HASH, OTHER_RUN, OTHER_HASH, SENT_THRESHOLDS, NOISE_ASKED}
MAX_COUNTS_EPSILON = 10.0  # beyond it there is hardly any noise, and shares of it are not to be accounted for
PAIRED = "paired"  # in an answer: images by which of both models have them right


class FinishedRun(NamedTuple):
    """A run in which this client took part, with its images as that run prepares them."""

    prepared: Prepared
    folder: Path


def request_of(
    shared: Tensors,
    thresholds: Sequence[int] = (),
    other_run: str = "",
    other_shared: Tensors | None = None,
    noise: tuple[float, float] | None = None,
) -> Tensors:
    """Return what an evaluation asks for: a model by its SHA-256, and another to compare it with.

    ``thresholds`` go with the model, if there are any; ``noise``: epsilon and delta.
    """
    found = {MODEL_HASH: hash_as_tensor(digest(shared))}
    if thresholds:
        found[SENT_THRESHOLDS] = torch.tensor(thresholds)
    if noise is not None:
        found[NOISE_ASKED] = torch.tensor(noise, dtype=torch.float64)
    if other_shared is not None:
        found |= {OTHER_RUN: hash_as_tensor(other_run), OTHER_HASH: hash_as_tensor(digest(other_shared))}
    return found


def own_counts(run: FinishedRun, find: Callable[[str], FinishedRun], request: Tensors, least: int) -> Tensors | None:
    """Return the counts of a client's test images by the model of its own finished run.

    The server names the model and sends none: with a model of its choice it could ask about single
    images. ``find`` returns another run of this client. Without test images: None, or zeros in a
    secure sum (``least`` is 1).
    """
    compared = OTHER_RUN in request
    if MODEL_HASH not in request or not request.keys() <= REQUESTED or compared != (OTHER_HASH in request):
        raise FedVLError("The request of an evaluation has an unexpected format.")
    labels, shares = scores_of_run(run, tensor_as_hash(request[MODEL_HASH]))
    names = run.prepared.class_names
    if SENT_THRESHOLDS in request:
        keep_thresholds(RunFolder(run.folder), names, request[SENT_THRESHOLDS])
    if NOISE_ASKED in request:
        if compared:
            raise FedVLError("A comparison of two models has no noise; request one of them.")
        return as_tables(coarse(count(labels, shares))) if len(labels) or least == 1 else None
    if not len(labels):
        nothing = np.zeros(len(PAIR), np.int64) if compared else None
        return as_tensors(empty(len(names)), nothing) if least == 1 else None
    counts = withheld(labels, shares, least) if least > 1 else count(labels, shares)
    if not compared:
        return as_tensors(counts)
    other = find(tensor_as_hash(request[OTHER_RUN]))
    others, theirs = scores_of_run(other, tensor_as_hash(request[OTHER_HASH]))
    if other.prepared.class_names != names or not np.array_equal(labels, others):
        raise FedVLError("The two runs have other classes or test images here, and cannot be compared.")
    pair = withheld_pair(labels, shares, theirs, least) if least > 1 else count_pair(labels, shares, theirs)
    return as_tensors(counts, pair)


def keep_thresholds(folder: RunFolder, names: Sequence[str], bins: torch.Tensor) -> None:
    """Write the server's thresholds beside a client's model, for predict, serve and export."""
    if bins.dtype != torch.int64 or bins.shape != (len(names),) or not bool(((bins >= 0) & (bins < BINS)).all()):
        raise FedVLError("The thresholds of the request are not one bin of scores for each class.")
    write_thresholds(folder, thresholds_at(bins.tolist(), names, FROM_SERVER))


def scores_of_run(run: FinishedRun, model: str) -> tuple[IntArray, FloatArray]:
    """Return labels and shares of a client's test images by a finished run's own model."""
    folder = RunFolder(run.folder)
    if not folder.finished:
        raise FedVLError("This client has not finished that run; the server's operator runs fedvl resume.")
    tensors = folder.tensors()[0]
    shared = {name: tensors[name] for name in run.prepared.method.first_shared(run.prepared.experiment.seed)}
    if model != digest(shared):
        raise FedVLError("An evaluation was requested of another model than the one that this run ended with.")
    return shares_of(run.prepared, tensors, {}, folder)


def as_tables(tables: Mapping[str, IntArray]) -> Tensors:
    return {name: torch.from_numpy(table) for name, table in tables.items()}


class ImageNoise(NamedTuple):
    """The noise that hides each image in the counts of an evaluation, with what it spends."""

    epsilon: float
    delta: float
    sigma: float
    counts: CountNoise

    @property
    def deviation(self) -> float:
        """Return the standard deviation of a client's noise on each number."""
        return math.sqrt(self.counts.variance(self.sigma))

    @property
    def step(self) -> Step:
        return self.counts.step(self.sigma)

    def added(self, tables: Tensors, seed: int, client: int, round_index: int) -> Tensors:
        noise = self.counts.draw(self.counts.numbers, self.sigma, seed, "evaluate", client, round_index)
        shapes: Shapes = {name: tuple(table.shape) for name, table in tables.items()}
        drawn = unflat_statistics(noise, shapes)
        return {name: table + drawn[name].to(table) for name, table in tables.items()}


def image_noise(epsilon: float, delta: float, classes: int, shares: int) -> ImageNoise:
    """Return the noise of an evaluation; in a secure sum, ``shares`` clients add it together."""
    numbers = count_numbers({**coarse_shapes(classes)})
    counts = CountNoise(sensitivity_to_an_image(classes), numbers, (), True, shares)
    return ImageNoise(epsilon, delta, least_sigma(epsilon, delta, lambda sigma: {counts.step(sigma): 1}, "rdp"), counts)


def requested_noise(request: Tensors, classes: int, shares: int) -> ImageNoise | None:
    """Return the noise that a request names, if any; refuse one that hides nothing."""
    if NOISE_ASKED not in request:
        return None
    asked = request[NOISE_ASKED]
    if asked.dtype != torch.float64 or asked.shape != (2,):
        raise FedVLError("The noise of the request is not an epsilon and a delta.")
    epsilon, delta = asked.tolist()
    if not (0 < epsilon <= MAX_COUNTS_EPSILON and 0 < delta < 1):
        raise FedVLError(
            f"An epsilon of {epsilon:g} at delta {delta:g} is out of range; request one up to {MAX_COUNTS_EPSILON:g}."
        )
    return image_noise(epsilon, delta, classes, shares)


def as_tensors(counts: Counts, pair: IntArray | None = None) -> Tensors:
    tables: Mapping[str, IntArray] = counts._asdict() if pair is None else {**counts._asdict(), PAIRED: pair}
    return {name: torch.from_numpy(table) for name, table in tables.items()}
