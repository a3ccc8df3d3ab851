"""Measures of a finished run: a number, a list (one value per step) or points to draw.

A name that is not in ``MEASURES`` is a metric of ``result.json``; ``rounds.NAME`` is that metric in
every round, and ``NAME@PART`` that of one condition of the missing-modality protocol or of one
figure of the base-to-new protocol (``accuracy@hm3``). ``embedding@4`` maps client 4's samples.
"""

import math
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedvl.comparisons.contents import Points
from fedvl.data.sources import Opener
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.evaluation.clusters import MAX_POINTS, embedding_map
from fedvl.evaluation.leakage import IMAGE_SIDE, attack
from fedvl.evaluation.predict import answer_all, represent_all
from fedvl.methods.base import Samples
from fedvl.methods.fed_mp import FedMP
from fedvl.runs.evaluation import read_evaluation
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import Prepared, prepare
from fedvl.seeding import numpy_generator
from fedvl.tensors import ByClient, Tensors, placed

Figure = float | list[float] | Points

Known = TypeVar("Known")

DOTS = 1000  # images in FST-CBDG's scatter of entropies


class Reopened(NamedTuple):
    prepared: Prepared
    shared: Tensors
    last: ByClient


class MeasuredRun:
    """A finished run, and what it was made of for measures that query the model again."""

    def __init__(self, folder: RunFolder, opener: Opener) -> None:
        self.folder, self.opener = folder, opener
        self.result, self.rounds = folder.result, folder.rounds

    @cached_property
    def reopened(self) -> Reopened:
        prepared = prepare(self.folder.experiment, Silent(), self.opener)
        shared, last = self.folder.tensors()
        last = {client: placed(sent, prepared.device) for client, sent in last.items()}
        return Reopened(prepared, placed(shared, prepared.device), last)

    def known(self, name: str, value: Known | None) -> Known:
        """Return a value of the result; refuse a run that lacks it."""
        if value is None or value == []:
            raise FedVLError(f"This run has no '{name}' to measure; see result.json in {self.folder.path}.")
        return value


def measure_run(name: str, run: MeasuredRun) -> Figure:
    if name in MEASURES:
        return MEASURES[name](run)
    key, _, part = name.partition("@")
    if key == "embedding" and part:
        return client_embedding(run, part)
    found: object = None
    if key.startswith("rounds."):
        found = [getattr(record, key[7:]) for record in run.rounds if key[7:] in record.model_fields_set] or None
    elif part:
        conditions = [row for row in run.result.conditions or () if row.condition == part]
        sets = [row for row in run.result.base_to_new or () if row.name == part]
        found = next((getattr(row, key, None) for row in (*conditions, *sets)), None)
    else:
        found = getattr(run.result, key, None)
    found = run.known(name, found)
    return found if isinstance(found, list) else float(found)  # type: ignore[arg-type]


def curve(run: MeasuredRun) -> list[float]:
    """Return the accuracy over rounds, starting with zero-shot."""
    values = [run.result.zero_shot_accuracy, *(run.result.per_round or [None])]
    return [run.known("per_round", value) for value in values]


def uploaded_parameters(run: MeasuredRun) -> float:
    """Return how many 32-bit numbers a client sends in a round."""
    return run.known("bytes_up_per_client_round", run.result.bytes_up_per_client_round) / 4


def trained_percent(run: MeasuredRun) -> float:
    """Return the percentage of parameters that are trained; all of them in a network on pixels."""
    prepared = run.reopened.prepared
    if prepared.method.inputs == ("pixels",):
        return 100.0
    frozen = sum(parameter.numel() for parameter in prepared.method.task.encoder.parameters())
    trained = run.known("trainable_parameters", run.result.trainable_parameters) + (run.result.private_parameters or 0)
    return 100 * trained / (frozen + trained)


def encoder_flops(run: MeasuredRun) -> float:
    """Count the frozen encoder's operations for each image of the largest client, once."""
    from torch.utils.flop_counter import FlopCounterMode

    prepared = run.reopened.prepared
    if prepared.method.inputs == ("pixels",):
        return 0.0  # a network of its own, whose operations are those of training
    encoder = prepared.method.task.clip
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        encoder.encode_image(torch.zeros(1, 3, encoder.image_size, encoder.image_size, device=prepared.device))
    return float(counter.get_total_flops() * max(len(rows) for rows in prepared.training.rows))


def images_by_client(run: MeasuredRun) -> Points:
    """Return the number of images of each class held by each client."""
    result, counts = run.result, run.known("partition_counts", run.result.partition_counts)
    return Points(
        value=float((np.array(counts) > 0).sum(1).mean()),
        value_is="classes that a client holds, mean",
        partition_counts=counts,
        partition_class_names=result.partition_class_names or [],
        partition_note=result.partition_note,
    )


def area(run: MeasuredRun, figure: str) -> float:
    """Return the mean area under a curve of one class against all others, in percent."""
    found = read_evaluation(run.folder)
    estimate = None if found is None else getattr(found.pooled, figure)
    if estimate is None:
        raise FedVLError(f"This run has no '{figure}' to measure; evaluate it: fedvl evaluate {run.folder.path}.")
    return 100 * float(estimate.value)


def classes(run: MeasuredRun) -> float:
    return float(len(run.known("class_names", run.result.class_names)))


def training_images(run: MeasuredRun) -> float:
    """Return how many images the clients hold together."""
    return float(np.sum(run.known("partition_counts", run.result.partition_counts)))


def test_images(run: MeasuredRun) -> float:
    return float(np.sum(run.known("confusion", run.result.confusion)))


def training_seconds(run: MeasuredRun) -> float:
    return run.known("seconds", run.known("seconds", run.result.seconds).train)


def entropies(run: MeasuredRun) -> Points:
    """Return the entropy in bits of zero-shot predictions without temperature, and its bound."""
    prepared = run.reopened.prepared
    images = some(prepared.test.samples, run, DOTS)
    scores = images.inputs["features"] @ prepared.queried.task.text_features.T
    likelihood = torch.softmax(scores, dim=-1)
    entropy = -(likelihood * likelihood.log2()).sum(-1)
    bound = math.log2(scores.shape[1])
    value = 100 * float(entropy.mean()) / bound
    return Points(y=entropy.tolist(), bound=bound, value=value, value_is="mean entropy, % of the bound")


def prediction_map(run: MeasuredRun) -> Points:
    """Return a t-SNE map with the predictions without and with prototypes (Fed-MP)."""
    prepared, shared, last = run.reopened
    method, images = prepared.queried, some(prepared.test.samples, run, MAX_POINTS)
    if not isinstance(method, FedMP):
        raise FedVLError("Only Fed-MP answers with and without prototypes; measure it on a run of fed-mp.")
    tensors = method.tailor(shared, last)
    with torch.no_grad():
        adapted = method.adapted(tensors, images.inputs).cpu().numpy()
        by_text = method.predict(tensors, images.inputs).argmax(-1).cpu().numpy()
    answers = answer_all(method, tensors, images, prepared.experiment.evaluation.batch_size)
    labels = images.labels.cpu().numpy()
    corrected = int((answers == labels).sum() - (by_text == labels).sum())
    return Points.model_validate(
        {
            **embedding_map(adapted, images),
            "by_text": by_text.tolist(),
            "with_prototypes": answers.tolist(),
            "class_names": list(method.task.class_names),
            "value": 100 * corrected / len(images),
            "value_is": "answers that prototypes correct, less those that they spoil, %",
        }
    )


def client_embedding(run: MeasuredRun, client: str) -> Points:
    """Return a t-SNE map of a client's training samples, by the vectors that are classified."""
    prepared, shared, _ = run.reopened
    rows = prepared.training.rows
    if not client.isdecimal() or int(client) >= len(rows):
        raise FedVLError(f"'embedding@{client}' names no client; clients are numbered from 0 to {len(rows) - 1}.")
    if len(rows[int(client)]) < 2:
        raise FedVLError(f"Client {client} has fewer than two samples to draw; measure it with more images.")
    samples = prepared.training.samples.take(rows[int(client)])
    vectors = represent_all(prepared.method, shared, samples, prepared.experiment.evaluation.batch_size)
    return Points.model_validate(
        {
            **embedding_map(vectors, samples),
            "class_names": list(prepared.method.task.class_names),
            "value": 100 * nearest_alike(vectors, samples.labels.cpu().numpy()),
            "value_is": "samples whose nearest other one is of their class, %",
        }
    )


def nearest_alike(vectors: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    """Return the share of rows whose nearest other row has the same label."""
    distances = np.square(vectors[:, None] - vectors[None]).sum(-1)
    np.fill_diagonal(distances, np.inf)
    return float((labels[distances.argmin(1)] == labels).mean())


def alone(run: MeasuredRun) -> list[float]:
    """Return the accuracy with all weight on one client's gate, for each client (Fed-MP)."""
    prepared, shared, last = run.reopened
    test, size = prepared.test.samples, prepared.experiment.evaluation.batch_size
    gates = [{name: sent[name] for name in shared} for sent in last.values()]
    if not gates:
        raise FedVLError("No client's last update was kept, so none can answer alone; measure it on a run of fed-mp.")
    labels = test.labels.cpu().numpy()
    return [100 * float((answer_all(prepared.queried, gate, test, size) == labels).mean()) for gate in gates]


def gradient_inversion(run: MeasuredRun) -> Points:
    """Attack the update that a client would send for the first training image (CacheFL, fig. 6)."""
    prepared, (shared, _) = run.reopened.prepared, run.folder.tensors()  # the attack runs on the processor
    data = prepared.experiment.data
    split = run.opener.dataset_of(data).splits["train"]
    picture = torch.from_numpy(np.array(split.read(0).resize((IMAGE_SIDE, IMAGE_SIDE)))).permute(2, 0, 1) / 255
    return Points.model_validate(attack(prepared.method, shared, picture, int(split.labels[0])))


def some(test: Samples, run: MeasuredRun, most: int) -> Samples:
    """Sample at most `most` test images by the run's seed, in order."""
    rows = numpy_generator(run.known("seed", run.result.seed), "shown").choice(
        len(test), min(most, len(test)), replace=False
    )
    return test.take(torch.from_numpy(np.sort(rows)).to(test.labels.device))


MEASURES: dict[str, Callable[[MeasuredRun], Figure]] = {
    "curve": curve,
    "auroc": lambda run: area(run, "auroc"),
    "average_precision": lambda run: area(run, "average_precision"),
    "uploaded_parameters": uploaded_parameters,
    "trained_percent": trained_percent,
    "encoder_flops": encoder_flops,
    "partition": images_by_client,
    "classes": classes,
    "training_images": training_images,
    "test_images": test_images,
    "entropies": entropies,
    "prediction_map": prediction_map,
    "best_client_alone": lambda run: max(alone(run)),
    "worst_client_alone": lambda run: min(alone(run)),
    "gradient_inversion": gradient_inversion,
    "training_seconds": training_seconds,
}
