"""Withdrawal of a client: the experiment without it, and how far the two models differ.

Every draw of a client has its number in its seed, so that those of the others stay as they were;
under differential privacy noise and samples are drawn anew, and the budgets of both runs add. What
is compared is what both runs answer to the same test images.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedvl.config import Experiment
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.evaluation.statistics import paired_difference, wilson
from fedvl.federation.privacy import spent_on
from fedvl.runs.contents import Joint, Measured, Withdrawal
from fedvl.runs.experiment import local_engine, make_judge
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import SPLITS, prepare
from fedvl.tensors import Tensors, flatten


class TestAnswers(NamedTuple):
    """What a finished run answers to its test images, and what it is made of."""

    folder: RunFolder
    classes: NDArray[np.int64]  # -1 where nobody queried
    labels: NDArray[np.int64]
    trained: Tensors
    start: Tensors  # empty where nothing is shared


def find_client(folder: RunFolder, name: str) -> tuple[int, str | None]:
    """Return the number of a client, given by number or by its party's name, and that name."""
    parties = folder.status.parties if folder.federation is not None else []
    count = len(parties) or folder.experiment.data.clients
    number = parties.index(name) if name in parties else int(name) if name.isdecimal() and len(name) < 10 else count
    if number >= count:
        known = f"parties are {', '.join(parties)}" if parties else f"clients are 0 to {count - 1}"
        raise FedVLError(f"The run in {folder.path} has no client '{name[:100]}'; its {known}.")
    return number, parties[number] if parties else None


def without_client(experiment: Experiment, client: int) -> Experiment:
    """Return the experiment in which this client takes no part either."""
    if client in experiment.federation.withdrawn:
        raise FedVLError(f"Client {client} takes no part in this run; it has withdrawn already.")
    if experiment.training.start_from:
        raise FedVLError(
            f"The run started from {experiment.training.start_from}, in which the client counts too; withdraw it there, and run "
            "this experiment again from the result."
        )
    return with_withdrawn(experiment, {*experiment.federation.withdrawn, client})


def with_withdrawn(experiment: Experiment, clients: Collection[int]) -> Experiment:
    federation = experiment.federation.model_copy(update={"withdrawn": tuple(sorted(clients))})
    return experiment.model_copy(update={"federation": federation})


def check_comparable(run: RunFolder, other: RunFolder, client: int) -> None:
    """Refuse a second run that is of other settings, or in which the client took part."""
    one, two = (
        with_withdrawn(each.experiment, set(each.experiment.federation.withdrawn) - {client}) for each in (run, other)
    )
    if differing := different_settings(one, two):
        raise FedVLError(
            f"The runs in {run.path} and {other.path} have another {differing}, so that their difference is not the "
            "client's; give one of the same settings."
        )
    for record in other.rounds:
        if client in set(record.cohort) - set(record.dropped):
            raise FedVLError(
                f"Client {client} took part in round {record.round} of {other.path}; give a run without it."
            )


def different_settings(one: Experiment, two: Experiment) -> str | None:
    """Return the first setting in which two experiments differ; where a run was made is none."""
    left, right = (each.model_dump(mode="json", exclude={"device": True, "data": {"root"}}) for each in (one, two))
    for section, values in left.items():
        if not isinstance(values, dict):
            values, right[section] = {"": values}, {"": right[section]}
        for key, value in values.items():
            if value != right[section].get(key):
                return f"{section}.{key}".rstrip(".")
    return None


def measure_withdrawal(
    run: RunFolder, other: RunFolder, client: int, party: str | None, display: Display
) -> Withdrawal:
    """Measure how a run differs from the one without a client, and write it into both folders."""
    with_it, without_it = (answers_of(each, display) for each in (run, other))
    measured = Withdrawal(
        client=client,
        party=party,
        **answer_difference(with_it, without_it),
        same_draws=run.federation is None and run.experiment.privacy.unit == "none",
        privacy=joint_budget(run, other),
    )
    for folder in (run, other):
        folder.note_withdrawal(measured)
    return measured


def joint_budget(run: RunFolder, other: RunFolder) -> Joint | None:
    """Return what two runs spend together of each unit that is in both: epsilons and deltas add."""
    one, two = run.result.privacy, other.result.privacy
    if not one or not two:
        return None
    return Joint(of=spent_on(run.experiment), epsilon=one.epsilon + two.epsilon, delta=one.delta + two.delta)


def answers_of(folder: RunFolder, display: Display) -> TestAnswers:
    """Predict the test images of a finished run with its own tensors."""
    experiment, simulated = folder.experiment, folder.federation is None
    torch.set_num_threads(experiment.federation.threads)
    prepared = prepare(experiment, display, splits=SPLITS if simulated else ("test",))
    shared, last = folder.tensors()
    engine = local_engine(prepared)
    if simulated:
        engine.private.update(folder.state(prepared.device).private)
    shared = {name: tensor.to(prepared.device) for name, tensor in shared.items()}
    last = {client: {n: t.to(prepared.device) for n, t in tensors.items()} for client, tensors in last.items()}
    found = make_judge(prepared, engine).judge(shared, last)
    start = prepared.method.first_shared(experiment.seed) if shared else {}
    trained = shared or flatten(engine.private)
    return TestAnswers(folder, found.answers, prepared.test.samples.labels.cpu().numpy(), trained, start)


def answer_difference(one: TestAnswers, two: TestAnswers) -> dict[str, Any]:
    """Return accuracies, their paired difference, changed answers and the distance of tensors."""
    queried = (one.classes >= 0) & (two.classes >= 0)
    count = int(queried.sum())
    right, then = ((each.classes == each.labels)[queried] for each in (one, two))
    gained, lost = int((then & ~right).sum()), int((right & ~then).sum())
    changed = int((one.classes != two.classes)[queried].sum())
    by_tensor = distances(one.trained, two.trained)
    moved = distances(one.start, one.trained)
    return {
        "run": described(one.folder, right),
        "without": described(two.folder, then),
        "images": count,
        "difference": 100 * (gained - lost) / count,
        "difference_interval": list(paired_difference(gained, lost, count)),
        "changed": 100 * changed / count,
        "changed_interval": list(wilson(100 * changed / count, count)),
        "distance": norm(by_tensor),
        "moved": norm(moved) if moved else None,
        "distance_by_tensor": by_tensor,
    }


def described(folder: RunFolder, right: NDArray[np.bool_]) -> Measured:
    accuracy = 100 * float(right.mean())
    return Measured(
        folder=str(folder.path.absolute()),
        state_sha256=folder.result.state_sha256,
        accuracy=accuracy,
        interval=list(wilson(accuracy, len(right))),
    )


def distances(one: Tensors, two: Tensors) -> dict[str, float]:
    """Return the Euclidean distance of each tensor of numbers that both have in one shape."""
    return {
        name: float((two[name].double() - tensor.double()).norm())
        for name, tensor in one.items()
        if tensor.is_floating_point() and name in two and two[name].shape == tensor.shape
    }


def norm(by_tensor: dict[str, float]) -> float:
    return float(np.linalg.norm(list(by_tensor.values())))
