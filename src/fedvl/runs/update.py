"""Change a finished run by its sums: add images, or subtract a client's, without starting again.

A training-free method solves once, from sums over all samples. The sums of the new run are those of
the old one with the statistics of the images that were added or withdrawn, so that it equals a run
on exactly the images that remain.
"""

from collections.abc import Callable
from operator import gt

import torch

from fedvl.config import Experiment
from fedvl.data.additions import NEW
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.federation.statistics import Statistics, no_statistics, statistics_over
from fedvl.methods import load_method
from fedvl.methods.roles import Shapes
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import Prepared, prepare, rows_of_parts
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors, count_bytes, placed

Sums = Callable[[Prepared], Statistics]


def by_sums(experiment: Experiment) -> bool:
    """Whether a run follows from the sums of another: one exchange, and no noise in it."""
    return load_method(experiment.method.name).exchanges == 1 and experiment.privacy.unit == "none"


def with_addition(experiment: Experiment, source: str, client: int | None) -> Experiment:
    """Return the experiment in which a client, a new one if None, holds further images."""
    if experiment.data.newcomers or experiment.evaluation.validation or experiment.data.label_noise:
        raise FedVLError(
            "Images are added to a run without newcomers, held-out images or label noise, which would be drawn anew; "
            "run it again without data.newcomers, evaluation.validation and data.label_noise."
        )
    data = experiment.data
    addition = f"{NEW if client is None else client}={source}"
    changed = {"additions": (*data.additions, addition), "clients": data.clients + (client is None)}
    return experiment.model_copy(update={"data": data.model_copy(update=changed)})


def added(old: RunFolder) -> Sums:
    """Return how the sums with the last addition follow from those of the run before it."""

    def sums(prepared: Prepared) -> Statistics:
        split = prepared.sources.dataset.splits["train"]
        latest = torch.from_numpy(rows_of_parts(split, prepared.encoded.read["train"].kept)[-1])
        held = torch.cat(prepared.training.rows)
        return changed(old, prepared, held[torch.isin(held, latest.to(held.device))].sort().values, 1)

    return sums


def subtracted(old: RunFolder, client: int) -> Sums:
    """Return how the sums without a client follow from those of the run in which it took part."""

    def sums(prepared: Prepared) -> Statistics:
        with_it = prepare(old.experiment, Silent())
        return changed(old, with_it, with_it.training.rows[client], -1)

    return sums


def changed(old: RunFolder, prepared: Prepared, rows: torch.Tensor, sign: int) -> Statistics:
    """Return the sums of a run, more or less the statistics of some rows."""
    method = prepared.method
    start = method.start(torch_generator(prepared.experiment.seed, "start"))
    known = placed(grown(old.state("cpu").server, method.role.statistics_shapes), prepared.device)
    more = statistics_over(method, prepared.training.samples, rows, start)
    total = {name: known[name] + sign * tensor for name, tensor in more.items()}
    clients = [client for client, own in enumerate(prepared.training.rows) if len(own)]
    return Statistics(total, clients, count_bytes(more))


def grown(sums: Tensors, shapes: Shapes) -> Tensors:
    """Return sums with zeros for the classes that came after the known ones."""
    result = no_statistics(shapes)
    for name, tensor in result.items():
        known = sums.get(name)
        if known is None or known.dim() != tensor.dim() or any(map(gt, known.shape, tensor.shape)):
            raise FedVLError("The sums of the run are not of its method; run the experiment again.")
        tensor[tuple(map(slice, known.shape))] = known
    return result
