"""A client's part of a federated evaluation: its own finished model counts its own test images."""

from pathlib import Path

import torch

from fedvl.errors import FedVLError
from fedvl.evaluation.counts import Counts, count, empty, withheld
from fedvl.runs.evaluation import shares_of
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import Prepared
from fedvl.tensors import Tensors, digest

MODEL_HASH = "model"  # in a request: the SHA-256 of the shared tensors that are evaluated


def request_of(shared: Tensors) -> Tensors:
    """Return what an evaluation asks for: the model, by its SHA-256."""
    return {MODEL_HASH: torch.frombuffer(bytearray.fromhex(digest(shared)), dtype=torch.uint8)}


def own_counts(prepared: Prepared, folder: Path, request: Tensors, least: int) -> Tensors | None:
    """Return the counts of a client's test images by the model of its own finished run.

    The server names the model and sends none: with a model of its choice it could ask about single
    images. Without test images: None, or zeros in a secure sum (``least`` is 1).
    """
    run = RunFolder(folder)
    if not run.finished:
        raise FedVLError("This client has not finished that run; the server's operator runs fedvl resume.")
    tensors = run.tensors()[0]
    shared = {name: tensors[name] for name in prepared.method.first_shared(prepared.experiment.seed)}
    if request.keys() != {MODEL_HASH} or not torch.equal(request[MODEL_HASH].cpu(), request_of(shared)[MODEL_HASH]):
        raise FedVLError("An evaluation was requested of another model than the one that this run ended with.")
    labels, shares = shares_of(prepared, tensors, {}, run)
    if not len(labels):
        return as_tensors(empty(len(prepared.class_names))) if least == 1 else None
    return as_tensors(withheld(labels, shares, least) if least > 1 else count(labels, shares))


def as_tensors(counts: Counts) -> Tensors:
    return {name: torch.from_numpy(table) for name, table in counts._asdict().items()}
