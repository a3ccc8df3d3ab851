"""A run that starts from the class weights of another, finished one."""

from dataclasses import replace
from pathlib import Path

from fedvl.config import Experiment
from fedvl.errors import FedVLError
from fedvl.methods import load_method
from fedvl.methods.base import Task
from fedvl.methods.parts.heads import Head, head_of
from fedvl.runs.folder import RunFolder


def check_start(experiment: Experiment) -> None:
    """Refuse a start that the method does not take, or whose images noise would not cover."""
    if experiment.training.start_from is None:
        return
    if not load_method(experiment.method.name).starts_from_head:
        raise FedVLError(
            f"Method '{experiment.method.name}' does not start from class weights; leave training.start_from out, or use "
            "linear, fst-cbdg, cachefl or adapterfl."
        )
    if experiment.privacy.unit != "none":
        raise FedVLError(
            "The noise of this run does not hide the images of the run that it starts from; leave out training.start_from "
            "or --privacy."
        )


def head_of_run(path: str, task: Task) -> Head:
    """Return the class weights of a finished run of the same encoder and classes."""
    folder = RunFolder(Path(path), queried=True)
    shared, _ = folder.tensors()
    experiment, result = folder.experiment, folder.result
    if result.model_fingerprint != task.encoder.fingerprint:
        raise FedVLError(
            f"The run in {path} is of another model, whose vectors are not comparable; start from a run of this one."
        )
    if tuple(result.class_names) != task.class_names:
        raise FedVLError(
            f"The run in {path} has other classes than this one; start from a run of the same classes, in the same order."
        )
    source = load_method(experiment.method.name)
    options = source.options_type.model_validate(experiment.method.options)
    placed = {name: tensor.to(task.text_embeddings.device) for name, tensor in shared.items()}
    found = head_of(source(options, replace(task, head=None)), placed) if source.inputs == ("features",) else None
    if found is None:
        raise FedVLError(
            f"The scores of the run in {path} are not linear in the vectors; start from a run of ridge, gda, fed-em or linear."
        )
    heat = result.temperature or 1.0
    return Head(found.weight / heat, found.bias / heat)


def start_note(experiment: Experiment) -> list[str]:
    """Say what a run started from."""
    if (path := experiment.training.start_from) is None:
        return []
    result = RunFolder(Path(path), queried=True).result
    return [
        f"Training started from the class weights of {result.method} in {path} (state {(result.state_sha256 or '')[:12]}), whose "
        "clients, images and labels therefore count in this run too."
    ]
