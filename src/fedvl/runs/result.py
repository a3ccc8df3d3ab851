"""The figures of a finished run, as result.json has them."""

import platform
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import torch

from fedvl.data.features import CarriesFeatures
from fedvl.evaluation import long_tail
from fedvl.evaluation.base_to_new import figures_with_intervals, kept
from fedvl.evaluation.calibration import (
    MAX_CALIBRATION_IMAGES,
    calibration_error,
    calibration_interval,
    fit_held_out,
    fit_temperature,
    share_bins,
    sure_answers,
)
from fedvl.evaluation.clusters import embedding_map
from fedvl.evaluation.examples import changed_rows, thumbnail
from fedvl.evaluation.judge import Judge, Judged
from fedvl.evaluation.metrics import accuracy_by_mix, recall_by_class
from fedvl.evaluation.predict import represent_all
from fedvl.federation.attacks import TARGET, triggered
from fedvl.federation.journal import best_round
from fedvl.federation.local import LocalEngine
from fedvl.federation.privacy import spent_on
from fedvl.federation.records import Beside, Budget, Record, UnitColumn
from fedvl.federation.released import released
from fedvl.federation.round import Federation
from fedvl.federation.steps import used_precision
from fedvl.methods.base import Task
from fedvl.methods.parts.pseudo_labels import label_figures
from fedvl.models.clip import DualEncoder
from fedvl.runs.contents import (
    Embedding,
    Example,
    Examples,
    Figures,
    OfDataset,
    Result,
    Seconds,
    Skipped,
)
from fedvl.runs.memory import Peak
from fedvl.runs.preparation import Prepared
from fedvl.runs.settings import command_for
from fedvl.tensors import Tensors, count_elements, digest, flatten
from fedvl.version import __version__

RESULT_SCHEMA = 1
IMAGES_TIMED = 4
TIMED: dict[tuple[str, torch.device], float] = {}  # seconds an image, by a model's fingerprint: it may be loaded again


class FittedTemperature(NamedTuple):
    """What scores are divided by to show shares, and the images to which it was fitted."""

    value: float
    images: str


def describe(
    prepared: Prepared,
    federation: Federation,
    judge: Judge,
    zero_shot: Judged | None,
    judged: list[tuple[Judged, float]],
    fitted: FittedTemperature | None = None,
    calibrated: Judged | None = None,
) -> Result:
    """Describe a run; ``judged`` are this process's evaluations and their seconds.

    ``calibrated`` is the last of them with shares at the temperature that was ``fitted``.
    """
    experiment, records, engine = prepared.experiment, federation.records, federation.engine
    final, final_seconds = judged[-1] if judged else (None, 0.0)
    handed = prepared.method.hand_out(federation.shared, federation.last, 0)
    local_flops = engine.local_flops(handed) if federation.trains else 0
    asked = sum(len(record.cohort) for record in records)
    answers = asked - sum(len(record.dropped) for record in records)
    result = Result(
        schema=RESULT_SCHEMA,
        fedvl_version=__version__,
        method=experiment.method.label,
        method_sha256=experiment.method.sha256,
        preset=experiment.method.preset,
        dataset=experiment.data.dataset,
        model=experiment.model.name,
        partition="by classes" if judge.for_new else experiment.data.partition,
        clients=experiment.data.clients,
        rounds=len(records),
        seed=experiment.seed,
        protocol=experiment.evaluation.protocol,
        temperature=fitted.value if fitted else None,
        temperature_from=fitted.images if fitted else None,
        per_round=[record.accuracy for record in records if "accuracy" in record.model_fields_set],
        per_round_loss=[record.loss for record in records],
        trainable_parameters=count_elements(
            {name: tensor for name, tensor in federation.shared.items() if prepared.method.role.shared(name).trained}
        ),
        private_parameters=count_elements(trained_private(prepared, federation)),
        bytes_up_per_client_round=sum(record.bytes_up for record in records) // max(answers, 1),
        bytes_down_per_client_round=sum(record.bytes_down for record in records) // max(asked, 1),
        local_flops=local_flops,
        chunk=engine.chunk if isinstance(engine, LocalEngine) else None,
        seconds=Seconds(
            encode=prepared.encode_seconds,
            train=sum(record.seconds for record in records),
            evaluate=sum(seconds for _, seconds in judged),
        ),
        seconds_per_image=final_seconds / len(judge.test) + encode_seconds_per_image(prepared) if final else None,
        privacy=privacy_figures(prepared, federation),
        refused_updates=sum(len(record.refused) for record in records),
        state_sha256=state_sha256(federation),
        class_names=list(prepared.queried.task.class_names),
        templates=prepared.templates,
        model_fingerprint=prepared.method.task.encoder.fingerprint,
        confusion=final.confusion.tolist() if final else [],
        per_class_recall=recall_by_class(final.confusion) if final else [],
        test_sha256=prepared.test.sha256,
        right=right(prepared, final),
        zero_shot_right=right(prepared, zero_shot),
        partition_counts=prepared.training.counts.tolist(),
        partition_class_names=prepared.class_names,
        partition_note=prepared.training.note,
        skipped_images=[Skipped(**image) for image in prepared.skipped],
        notes=[*prepared.notes, *prepared.method.notes(), *(federation.journal.notes if federation.journal else ())],
        device=str(prepared.device),
        machine=machine(),
        torch_version=torch.__version__,
        # other machines have their own devices
        precision=used_precision(experiment.training.precision, prepared.device.type)
        if isinstance(engine, LocalEngine)
        else experiment.training.precision,
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        config=experiment.model_dump(mode="json", exclude_none=True),
        command=command_for(experiment),
    )
    return result.joined(
        Figures(**final.figures) if final else Figures(accuracy=None),
        zero_shot_figures(zero_shot),
        validation_figures(prepared, records),
        pseudo_label_figures(prepared, federation),
        calibration_figures(prepared, final, zero_shot, calibrated),
        target_figures(experiment.evaluation.target_accuracy, records, local_flops),
        dataset_figures(prepared, final, zero_shot),
        long_tail_figures(prepared, final, zero_shot),
        selection_figures(records),
        mix_figures(prepared, final, zero_shot),
        missing_figures(judge, federation) if final else Figures(),
        candidate_set_figures(judge, federation, final, zero_shot) if final else Figures(),
        backdoor_figures(prepared, judge, federation) if final else Figures(),
    )


def machine() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def privacy_figures(prepared: Prepared, federation: Federation) -> Budget | None:
    """Return what the run has spent of its privacy budget, and what it releases beside it."""
    if not (federation.records and federation.privacy):
        return None
    spent = federation.records[-1].privacy
    assert spent is not None, "every round of a private run has its budget"
    simulated = isinstance(federation.engine, LocalEngine)  # then noise follows from the seed, which is published
    group = prepared.training.group
    return Budget(
        unit=spent.unit,
        epsilon=spent.epsilon,
        delta=spent.delta,
        sampling=spent.sampling,
        of=spent_on(prepared.experiment),
        simulated=simulated,
        group=UnitColumn(column=group.column, largest=group.largest) if group else None,
        released=[
            Beside(name=item.name, keys=list(item.keys), state=item.state, why=item.why)
            for item in released(prepared.method, prepared.experiment, simulated)
        ],
        sums=list(prepared.method.role.statistics),
    )


def needs_temperature(prepared: Prepared) -> bool:
    """Whether a method without labels gives scores whose softmax does not say how sure it is."""
    return prepared.method.labels == "none" and not prepared.method.role.trained_private


def fitted_temperature(prepared: Prepared, federation: Federation, validator: Judge | None) -> FittedTemperature | None:
    """Fit what scores are divided by to show shares: never to test images.

    It is fitted to the labels of images that clients hold out or, for a method whose scores do not
    become shares, to the pretrained model's own shares of training images, which need no labels.
    None where there are neither. Under differential privacy it is withheld.
    """
    if prepared.experiment.privacy.unit != "none" or prepared.method.clusters:
        return None
    if validator is not None and not validator.candidates:
        labels, shares = validator.shares(federation.shared, federation.last)
        if len(labels):
            return FittedTemperature(fit_held_out(labels, shares), f"{len(labels):,} images that clients held out")
    method, samples = prepared.method, prepared.training.samples
    if not needs_temperature(prepared) or "features" not in samples.inputs or not len(samples):
        return None
    rows = torch.arange(0, len(samples), max(1, len(samples) // MAX_CALIBRATION_IMAGES), device=prepared.device)
    size = prepared.experiment.evaluation.batch_size
    scores, zero_shot = [], []
    with torch.no_grad():
        for first in range(0, len(rows), size):
            inputs = samples.take(rows[first : first + size]).inputs
            scores.append(method.predict(federation.shared, inputs))
            zero_shot.append(method.task.clip.logit_scale * inputs["features"] @ method.task.text_features.T)
    value = fit_temperature(torch.cat(scores), torch.cat(zero_shot).softmax(-1))
    return FittedTemperature(value, f"the pretrained model's shares of {len(rows):,} training images")


def mix_figures(prepared: Prepared, final: Judged | None, zero_shot: Judged | None) -> Figures:
    """Return the accuracy expected on each client's mix of classes, where clients are not tested.

    Nothing if the tested classes are not the clients', or if it is not known what clients hold.
    """
    counts, found = prepared.training.counts, Figures()
    if prepared.test.parts or list(prepared.queried.task.class_names) != prepared.class_names or not counts.any():
        return found
    if final is not None:
        found = found.joined(Figures(per_client_mix_accuracy=accuracy_by_mix(recall_by_class(final.confusion), counts)))
    if zero_shot is not None:
        mixed = accuracy_by_mix(recall_by_class(zero_shot.confusion), counts)
        found = found.joined(Figures(zero_shot_per_client_mix_accuracy=mixed))
    return found


def calibration_figures(
    prepared: Prepared, final: Judged | None, zero_shot: Judged | None, calibrated: Judged | None
) -> Figures:
    """Return how far the shares of the predicted classes are from the truth, in points.

    Scores that do not become shares have figures only with a temperature.
    """
    labels, found = prepared.test.samples.labels.cpu().numpy(), Figures()
    before = None if needs_temperature(prepared) else final
    least = prepared.experiment.evaluation.unsure
    kinds = {"": calibrated or before, "uncalibrated_": before if calibrated else None, "zero_shot_": zero_shot}
    for prefix, judged in kinds.items():
        known = np.isfinite(judged.shares) if judged is not None else np.zeros(0, bool)
        if judged is None or not known.any() or (prefix == "zero_shot_" and needs_temperature(prepared)):
            continue
        shares, correct = judged.shares[known], (judged.answers == labels)[known]
        told: dict[str, Any] = {
            "ece": calibration_error(shares, correct),
            "ece_interval": list(calibration_interval(shares, correct)),
        }
        if prefix != "zero_shot_":
            told["reliability"] = share_bins(shares, correct)
        found = found.joined(Figures.model_validate({f"{prefix}{key}": value for key, value in told.items()}))
        if not prefix:
            found = found.joined(Figures(sure=sure_answers(shares, correct, least)))
    return found


def dataset_figures(prepared: Prepared, final: Judged | None, zero_shot: Judged | None) -> Figures:
    """Return the accuracy on each of several datasets, and who is asked among which classes."""
    task, labels = prepared.queried.task, prepared.test.samples.labels.cpu().numpy()
    if not task.origins or final is None:
        return Figures()
    origins = np.array(task.origins)
    rows = []
    for name in dict.fromkeys(task.origins):
        asked = (origins[labels] == name) & (final.answers >= 0)
        judged = {"accuracy": final} | ({} if zero_shot is None else {"zero_shot_accuracy": zero_shot})
        rows.append(
            OfDataset(
                dataset=name,
                class_names=[task.class_names[c] for c in np.flatnonzero(origins == name)],
                test_images=int(asked.sum()),
                **{
                    key: 100 * float((each.answers == labels)[asked].mean())
                    for key, each in judged.items()
                    if asked.any()
                },
            )
        )
    return Figures(
        datasets=rows,
        class_lists=[[task.class_names[c] for c in own.tolist()] for own in prepared.test.candidates],
    )


def target_figures(target: float | None, records: list[Record], local_flops: int | None) -> Figures:
    """Return what it took until the accuracy of a round reached a target; None if none did."""
    if target is None:
        return Figures()
    reached = round_reaching(target, records)
    if reached is None:
        return Figures(round_to_target=None, bytes_to_target=None, flops_to_target=None, seconds_to_target=None)
    until = records[:reached]
    return Figures(
        round_to_target=reached,
        bytes_to_target=sum(record.bytes_up + record.bytes_down for record in until),
        flops_to_target=None if local_flops is None else local_flops * reached,
        seconds_to_target=sum(record.seconds for record in until),
    )


def round_reaching(target: float, records: list[Record]) -> int | None:
    """Return the first round whose accuracy reached a target."""
    for number, record in enumerate(records, 1):
        reached = record.validation if record.accuracy is None else record.accuracy
        if reached is not None and reached >= target:
            return number
    return None


def memory_figures(in_use: Peak, peaks: dict[int, Peak], target: float | None, records: list[Record]) -> Figures:
    """Return the most memory in use, of the whole run and until a round reached a target.

    The latter is None where no round did, or another process ran that round.
    """
    found = Figures(peak_memory_bytes=in_use.process, peak_gpu_memory_bytes=in_use.gpu)
    if target is None:
        return found
    until = peaks.get(round_reaching(target, records) or 0)
    return found.joined(
        Figures(
            memory_bytes_to_target=until.process if until else None,
            gpu_memory_bytes_to_target=until.gpu if until else None,
        )
    )


def long_tail_figures(prepared: Prepared, final: Judged | None, zero_shot: Judged | None) -> Figures:
    """Return the accuracy on classes with many, medium and few training images of a long tail."""
    same = list(prepared.queried.task.class_names) == prepared.class_names
    if prepared.experiment.data.long_tail is None or final is None or not same:
        return Figures()
    before = None if zero_shot is None else zero_shot.confusion
    return Figures(long_tail=long_tail.accuracy_by_group(prepared.training.counts.sum(0), final.confusion, before))


def right(prepared: Prepared, judged: Judged | None) -> str:
    """Return a letter for each test image: 1 right, 0 wrong, - not asked."""
    if judged is None:
        return ""
    labels = prepared.test.samples.labels.tolist()
    return "".join(
        "-" if answer < 0 else "1" if answer == label else "0"
        for answer, label in zip(judged.answers.tolist(), labels, strict=True)
    )


def state_sha256(federation: Federation) -> str | None:
    """Hash what was trained: the shared tensors, or clients' private ones if nothing is shared."""
    if federation.shared:
        return digest(federation.shared)
    own = {client: federation.engine.private_of(client) for client in sorted(federation.engine.private)}
    return digest(flatten(own)) if any(own.values()) else None


def validation_figures(prepared: Prepared, records: list[Record]) -> Figures:
    """Return the best round on the images that clients held out; nothing where they did not."""
    held, best = prepared.training.validation, best_round(records)
    if held is None or best is None:
        return Figures()
    return Figures(
        best_round=best,
        validation_accuracy=records[best - 1].validation,
        validation_images=len(held.samples),
        per_round_validation=[record.validation for record in records if "validation" in record.model_fields_set],
    )


def zero_shot_figures(judged: Judged | None) -> Figures:
    """Return the pretrained model's own accuracy; None where it cannot name classes."""
    if judged is None:
        return Figures(zero_shot_accuracy=None)
    accuracies = {f"zero_shot_{name}": value for name, value in judged.figures.items() if "accuracy" in name}
    return Figures(**accuracies, zero_shot_per_class_recall=recall_by_class(judged.confusion))


def pseudo_label_figures(prepared: Prepared, federation: Federation) -> Figures:
    """Return how many pseudo-labels are used and true; nothing with true labels or privacy."""
    labels, truths = [], []
    if prepared.experiment.privacy.unit != "none":
        return Figures()
    for client, rows in enumerate(prepared.training.rows):
        made = federation.engine.private.get(client, {}).get("labels")
        if made is None and prepared.experiment.data.labels != "true":
            made = prepared.training.samples.labels[rows]
        if made is not None:
            labels.append(made)
            truths.append(prepared.training.true_labels[rows])
    return Figures(**label_figures(labels, truths)) if labels else Figures()


def selection_figures(records: list[Record]) -> Figures:
    """Return the percentage of true pseudo-labels in each evaluated round, where there are some."""
    known = [record for record in records if "pseudo_label_accuracy" in record.model_fields_set]
    if not known:
        return Figures()
    return Figures(per_round_pseudo_label_accuracy=[record.pseudo_label_accuracy for record in known])


def trained_private(prepared: Prepared, federation: Federation) -> Tensors:
    """Return what the largest client trains for itself beside the shared tensors."""
    rows = prepared.training.rows
    private = federation.engine.private_of(max(range(len(rows)), key=lambda client: len(rows[client])))
    return {name: tensor for name, tensor in private.items() if prepared.method.role.private(name).trained}


def missing_figures(judge: Judge, federation: Federation) -> Figures:
    """Return the test under each condition of missing modalities, and a map of its samples."""
    if not judge.conditions:
        return Figures()
    vectors = represent_all(judge.method, federation.shared, judge.test, judge.batch_size)
    return Figures(
        conditions=judge.judge_conditions(federation.shared, federation.last),
        embedding=Embedding(**embedding_map(vectors, judge.test)),
    )


def candidate_set_figures(judge: Judge, federation: Federation, final: Judged, zero_shot: Judged | None) -> Figures:
    """Return the candidate sets of the base-to-new protocol by name, and the figures of each."""
    if judge.for_new is None:
        return Figures()
    base = judge.method.task.class_names
    before = judge.judge_sets_zero_shot(zero_shot) if zero_shot else None
    hits = judge.judge_sets(final, federation.shared, federation.last)
    return Figures(
        candidate_sets={
            "own": [[base[index] for index in own.tolist()] for own in judge.candidates],
            "base": candidate_names(judge.method.task),
            "new": candidate_names(judge.for_new.task),
        },
        base_to_new=figures_with_intervals(hits, before),
        base_to_new_right=kept(hits),
    )


def candidate_names(task: Task) -> list[list[str]]:
    """Return the names among which an image is asked: all, or those of each of several datasets."""
    origins = task.origins or ("",) * len(task.class_names)
    return [
        [name for name, own in zip(task.class_names, origins, strict=True) if own == origin]
        for origin in dict.fromkeys(origins)
    ]


def backdoor_figures(prepared: Prepared, judge: Judge, federation: Federation) -> Figures:
    """Return how many of 100 images of other classes get the target's name by the trigger."""
    experiment = prepared.experiment
    if not (experiment.federation.attack or "").startswith("backdoor"):
        return Figures()
    inputs = {name: tensor for name, tensor in judge.test.inputs.items() if name in prepared.method.inputs}
    stamped = replace(judge.test, inputs=judge.test.inputs | triggered(inputs, experiment.seed))
    answers = replace(judge, test=stamped).judge(federation.shared, federation.last).answers
    others = (judge.test.labels.cpu().numpy() != TARGET) & (answers >= 0)
    success = 100 * float((answers[others] == TARGET).mean())
    return Figures(backdoor_success=success, backdoor_images=int(others.sum()))


def example_images(prepared: Prepared, final: Judged, zero_shot: Judged | None) -> Examples:
    """Return a few test images that training set right or wrong, for the report."""
    if zero_shot is None or any(
        isinstance(split, CarriesFeatures) for split in prepared.sources.dataset.splits.values()
    ):
        return Examples()
    labels, count = prepared.test.samples.labels.cpu().numpy(), prepared.experiment.evaluation.examples
    names = prepared.queried.task.class_names
    return Examples(
        **{
            kind: [
                Example(
                    true=names[labels[row]],
                    zero_shot=names[zero_shot.answers[row]],
                    answer=names[final.answers[row]],
                    image=thumbnail(prepared.test.read(row)),
                )
                for row in rows
            ]
            for kind, rows in changed_rows(labels, zero_shot.answers, final.answers, count).items()
        }
    )


def encode_seconds_per_image(prepared: Prepared) -> float:
    """Return what the frozen image tower costs a query; nothing if predicting includes it."""
    encoder = prepared.method.task.encoder
    if "pixels" in prepared.test.samples.inputs or not isinstance(encoder, DualEncoder):
        return 0.0
    return tower_seconds(encoder, prepared.device)


def tower_seconds(encoder: DualEncoder, device: torch.device) -> float:
    """Measure seconds an image on one small batch, once a process for each model."""
    known = TIMED.get((encoder.fingerprint, device))
    if known is not None:
        return known
    pixels = torch.zeros(IMAGES_TIMED, 3, encoder.image_size, encoder.image_size, device=device)
    with torch.inference_mode():
        float(encoder.encode_image(pixels[:1]).sum())  # warms up; reading a number waits for a GPU
        began = time.perf_counter()
        float(encoder.encode_image(pixels).sum())
    seconds = (time.perf_counter() - began) / IMAGES_TIMED
    TIMED[encoder.fingerprint, device] = seconds
    return seconds
