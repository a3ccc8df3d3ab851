"""A client's part of a federated evaluation: its own finished model counts its own test images."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedvl.errors import FedVLError
from fedvl.evaluation.counts import BINS, PAIR, Counts, count, count_pair, empty, withheld, withheld_pair
from fedvl.runs.evaluation import FROM_SERVER, shares_of, thresholds_at, write_thresholds
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import Prepared
from fedvl.tensors import FloatArray, IntArray, Tensors, digest, hash_as_tensor, tensor_as_hash

MODEL_HASH = "model"  # in a request: the SHA-256 of the shared tensors that are evaluated
OTHER_RUN, OTHER_HASH = "other_run", "other_model"  # of the run that a model is compared with, if any
SENT_THRESHOLDS = "thresholds"  # that the server's run has: the bin of each class, for the client's copy of the model
REQUESTED = {MODEL_HASH, OTHER_RUN, OTHER_HASH, SENT_THRESHOLDS}
PAIRED = "paired"  # in an answer: images by which of both models have them right


class FinishedRun(NamedTuple):
    """A run in which this client took part, with its images as that run prepares them."""

    prepared: Prepared
    folder: Path


def request_of(
    shared: Tensors, thresholds: Sequence[int] = (), other_run: str = "", other_shared: Tensors | None = None
) -> Tensors:
    """Return what an evaluation asks for: a model by its SHA-256, and another to compare it with.

    ``thresholds`` go with the model, if there are any.
    """
    found = {MODEL_HASH: hash_as_tensor(digest(shared))}
    if thresholds:
        found[SENT_THRESHOLDS] = torch.tensor(thresholds)
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


def as_tensors(counts: Counts, pair: IntArray | None = None) -> Tensors:
    tables: Mapping[str, IntArray] = counts._asdict() if pair is None else {**counts._asdict(), PAIRED: pair}
    return {name: torch.from_numpy(table) for name, table in tables.items()}
