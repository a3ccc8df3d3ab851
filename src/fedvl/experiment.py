"""From a description to a result: images -> features -> clients -> rounds -> evaluation -> files of the run."""

import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch.nn.functional import normalize

from fedvl import __version__
from fedvl.config import Experiment, explain, overlay, resolve, toml_value
from fedvl.data.catalogue import lookup
from fedvl.data.deal import PROTOCOLS
from fedvl.data.features import default_cache_dir, encode_split
from fedvl.data.sources import open_dataset
from fedvl.data.stores import Dataset, Split
from fedvl.errors import FedVLError
from fedvl.evaluation.answers import confusion
from fedvl.evaluation.metrics import recall_by_class, summary
from fedvl.federation.journal import Journal
from fedvl.federation.local import LocalEngine
from fedvl.federation.round import Federation
from fedvl.methods import load_method
from fedvl.methods.base import Method, Options, Samples, Task
from fedvl.methods.zero_shot import ZeroShot
from fedvl.models.checkpoint import load_model
from fedvl.models.clip import DualEncoder
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors, count_elements, digest, save, write_whole

RESULT_SCHEMA = 1
TEXTS_AT_ONCE = 256


class Display(Protocol):
    """Where progress is shown."""

    def stage(self, name: str) -> Callable[[int, int], None]: ...

    def rounds(
        self, total: int, records: list[dict[str, Any]], zero_shot_accuracy: float
    ) -> Callable[[dict[str, Any]], None]: ...


@dataclass
class Prepared:
    """Everything in place for the first round."""

    experiment: Experiment
    method: Method
    asked: Method  # the method for the questions' classes; the same as ``method`` in a closed set
    engine: LocalEngine
    test: Samples
    class_names: list[str]  # of the dataset
    counts: NDArray[np.int64]  # clients x classes of the dataset
    partition_note: str
    skipped: list[dict[str, str]]
    encode_seconds: float
    notes: list[str]

    def confusion(self, shared: Tensors, kept: Tensors) -> NDArray[np.int64]:
        """How the model that these tensors make answers the test."""
        tensors = self.asked.tailor(shared, kept)
        return confusion(self.asked, tensors, self.test, self.experiment.evaluation.batch_size)

    def zero_shot_confusion(self) -> NDArray[np.int64]:
        plain = ZeroShot(Options(), self.asked.task)
        return confusion(plain, {}, self.test, self.experiment.evaluation.batch_size)


def resolve_experiment(settings: dict[str, Any]) -> Experiment:
    """The user's settings over the preset of the method they name, over the defaults; the method's options checked and filled in."""
    asked = resolve([settings]).method
    method = load_method(asked.name)
    if asked.preset not in method.presets:
        raise FedVLError(f"Method '{asked.name}' has no preset '{asked.preset}'; it has {', '.join(method.presets)}.")
    layered: dict[str, Any] = {}
    for layer in (method.presets[asked.preset], known_of_dataset(method, resolve([settings]).data.dataset), settings):
        overlay(layered, layer)
    experiment = resolve([layered])
    try:
        options = method.options_type.model_validate(experiment.method.options)
    except ValidationError as error:
        raise FedVLError(explain(error, method.options_type, prefix="method.")) from error
    return resolve([layered, {"method": options.model_dump(mode="json", exclude_none=True)}])


def known_of_dataset(method: type[Method], dataset: str) -> dict[str, Any]:
    """The method's options as its paper sets them for this dataset, by the catalogue; a file goes by its name."""
    entry = lookup(Path(dataset).stem)
    values = {option: getattr(entry, field, None) for option, field in method.catalogue_options.items()}
    return {"method": {option: value for option, value in values.items() if value is not None}}


def prepare(experiment: Experiment, display: Display) -> Prepared:
    began = time.perf_counter()
    device = pick_device(experiment.device)
    method_type = load_method(experiment.method.name)
    dataset = open_dataset(experiment.data.dataset, Path(experiment.data.root) if experiment.data.root else None)
    encoder = load_model(experiment.model.name, device)
    if not isinstance(encoder, DualEncoder):
        raise FedVLError(
            f"Method '{experiment.method.name}' needs a CLIP-like model, and '{experiment.model.name}' is a fused one."
        )
    encoded = {
        name: encode_split(
            dataset.splits[name], encoder, "features", default_cache_dir(), display.stage(f"Encode {name}")
        )
        for name in ("train", "test")
    }
    pixels = {
        name: pixels_of(dataset.splits[name], encoder, part.kept, display.stage(f"Read {name}"))
        if "pixels" in method_type.inputs
        else None
        for name, part in encoded.items()
    }
    encode_seconds = time.perf_counter() - began
    labels = {name: dataset.splits[name].labels[part.kept] for name, part in encoded.items()}
    check_labels(dataset, method_type, labels, experiment)
    protocol = PROTOCOLS[experiment.evaluation.protocol]
    deal = protocol(labels["train"], labels["test"], len(dataset.class_names), experiment.data, experiment.seed)
    train, test = (
        samples_of(encoded[name].tensor, pixels[name], renumbered(labels[name], classes), inputs, device)
        for name, classes, inputs in (
            ("train", deal.trained_classes, method_type.inputs),
            ("test", deal.asked_classes, (*method_type.inputs, "features")),  # features for the zero-shot accuracy
        )
    )
    target = None
    if method_type.uses_target and len(deal.validation):
        target = test.take(torch.from_numpy(deal.validation).to(device)).inputs
    embeddings = embed_classes(dataset, encoder, experiment.data.templates, device)
    options = method_type.options_type.model_validate(experiment.method.options)
    method, asked = (
        method_type(
            options,
            Task(
                tuple(dataset.class_names[c] for c in classes),
                embeddings[classes],
                encoder,
                experiment.data.clients,
                experiment.seed,
                protocol=experiment.evaluation.protocol,
                target=target,
                stage=display.stage,
            ),
        )
        for classes in (deal.trained_classes, deal.asked_classes)
    )
    rows = [torch.from_numpy(client).to(device) for client in deal.clients]
    if method.pools_data:
        rows = [torch.cat(rows).sort().values]
    return Prepared(
        experiment=experiment,
        method=method,
        asked=asked,
        engine=LocalEngine(method, train, rows, experiment.training, experiment.federation, experiment.seed),
        test=test.take(torch.from_numpy(deal.asked).to(device)),
        class_names=list(dataset.class_names),
        counts=count_classes(deal.clients, labels["train"], len(dataset.class_names)),
        partition_note=deal.note,
        skipped=[
            {"image": image, "reason": reason, "split": name}
            for name, part in encoded.items()
            for image, reason in part.bad
        ],
        encode_seconds=encode_seconds,
        notes=[*dataset.notes, *(part.note for part in encoded.values() if part.note)],
    )


def run(experiment: Experiment, folder: Path, display: Display) -> dict[str, Any]:
    """Run, or go on with, the experiment of a run folder and write its result, model and report."""
    torch.set_num_threads(max(torch.get_num_threads(), 1))
    prepared = prepare(experiment, display)
    torch.set_num_threads(experiment.federation.threads)
    method, engine = prepared.method, prepared.engine
    zero_shot = summary(prepared.zero_shot_confusion())["accuracy"]
    federation = Federation(
        method,
        engine,
        experiment.federation,
        experiment.seed,
        method.start(torch_generator(experiment.seed, "start")),
        journal=Journal(folder / "journal"),
    )
    trains = bool(federation.shared)
    rounds = experiment.federation.rounds if trains else 0
    evaluate_seconds = 0.0

    def evaluate(shared: Tensors, kept: Tensors, round_number: int) -> dict[str, Any]:
        nonlocal evaluate_seconds
        if round_number % experiment.evaluation.every and round_number != rounds:
            return {}
        began = time.perf_counter()
        accuracy = summary(prepared.confusion(shared, kept))["accuracy"]
        evaluate_seconds += time.perf_counter() - began
        return {"accuracy": accuracy}

    if trains:
        flops = engine.local_flops(federation.shared)
        federation.restore()
        write_metrics(folder, federation.records)
        show = display.rounds(rounds, federation.records, zero_shot)

        def after_round(record: dict[str, Any]) -> None:
            with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            show(record)

        federation.run(evaluate, after_round)
    result = describe(prepared, federation, flops if trains else 0, evaluate_seconds)
    finish(folder, result, federation)
    return result


def describe(prepared: Prepared, federation: Federation, flops: int, evaluate_seconds: float) -> dict[str, Any]:
    experiment, records = prepared.experiment, federation.records
    answered, zero_shot = prepared.confusion(federation.shared, federation.kept), prepared.zero_shot_confusion()
    answers = sum(len(r["cohort"]) - len(r["dropped"]) for r in records)
    return {
        "schema": RESULT_SCHEMA,
        "fedvl_version": __version__,
        "method": experiment.method.name,
        "preset": experiment.method.preset,
        "dataset": experiment.data.dataset,
        "model": experiment.model.name,
        "partition": experiment.data.partition,
        "clients": experiment.data.clients,
        "rounds": len(records),
        "seed": experiment.seed,
        "protocol": experiment.evaluation.protocol,
        **summary(answered),
        "zero_shot_accuracy": summary(zero_shot)["accuracy"],
        "per_round": [record["accuracy"] for record in records if "accuracy" in record],
        "per_round_loss": [record["loss"] for record in records],
        "trainable_parameters": count_elements(
            {name: tensor for name, tensor in federation.shared.items() if prepared.method.trains(name)}
        ),
        "bytes_up_per_client_round": sum(r["bytes_up"] for r in records) // max(answers, 1),
        "bytes_down_per_client_round": sum(r["bytes_down"] for r in records)
        // max(sum(len(r["cohort"]) for r in records), 1),
        "local_flops": flops,
        "seconds": {
            "encode": prepared.encode_seconds,
            "train": sum(record["seconds"] for record in records),
            "evaluate": evaluate_seconds,
        },
        "refused_updates": sum(len(record["refused"]) for record in records),
        "state_sha256": digest(federation.shared),
        "class_names": list(prepared.asked.task.class_names),
        "confusion": answered.tolist(),
        "per_class_recall": recall_by_class(answered),
        "zero_shot_per_class_recall": recall_by_class(zero_shot),
        "partition_counts": prepared.counts.tolist(),
        "partition_class_names": prepared.class_names,
        "partition_note": prepared.partition_note,
        "skipped_images": prepared.skipped,
        "notes": [*prepared.notes, *prepared.method.notes()],
        "device": str(prepared.test.labels.device),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": experiment.model_dump(mode="json", exclude_none=True),
        "command": command_for(experiment),
    }


def finish(folder: Path, result: dict[str, Any], federation: Federation) -> None:
    """The model and the result; result.json comes last, for it says that the run is finished."""
    save(
        folder / "model.safetensors",
        federation.shared,
        {"fedvl": json.dumps(result["config"]), "method": result["method"]},
    )
    if federation.kept:  # what the server answers queries with
        save(folder / "kept.safetensors", federation.kept, {"method": result["method"]})
    write_whole(folder / "result.json", json.dumps(result).encode())


def command_for(experiment: Experiment) -> str:
    """The shortest command line that gives this experiment again: what differs from the method's own defaults."""
    method = {"name": experiment.method.name, "preset": experiment.method.preset}
    plain = resolve_experiment({"method": method}).model_dump(mode="json")
    of_dataset = resolve_experiment({"method": method, "data": {"dataset": experiment.data.dataset}})
    plain["method"] = of_dataset.model_dump(mode="json")["method"]
    words = [
        "fedvl",
        "run",
        "--method",
        method["name"],
        *(["--preset", method["preset"]] if method["preset"] != "paper" else []),
    ]
    for section, value in experiment.model_dump(mode="json", exclude_none=True).items():
        if not isinstance(value, dict):
            words += [f"--{section}", str(value)] if value != plain[section] else []
            continue
        for key, setting in value.items():
            if setting != plain[section].get(key):
                words += ["--set", f"{section}.{key}={toml_value(setting)}"]
    return shlex.join(words)


def pick_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise FedVLError(f"Device '{name}' cannot be used on this machine; use --device cpu, or auto.") from error
    return name


def pixels_of(
    split: Split, encoder: DualEncoder, kept: NDArray[np.int64], progress: Callable[[int, int], None]
) -> torch.Tensor:
    """The images themselves as the encoder reads them, those alone that it could encode."""
    read = encode_split(split, encoder, "pixels", default_cache_dir(), progress)
    return read.tensor if len(read.kept) == len(kept) else read.tensor[np.searchsorted(read.kept, kept)]


def samples_of(
    embeddings: torch.Tensor,
    pixels: torch.Tensor | None,
    labels: NDArray[np.int64],
    inputs: Sequence[str],
    device: str,
) -> Samples:
    """The encoded images in the forms that the method wants."""
    embeddings = embeddings.to(device)
    forms: dict[str, Callable[[], torch.Tensor]] = {
        "embeddings": lambda: embeddings,
        "features": lambda: normalize(embeddings, dim=-1),
    }
    if pixels is not None:
        forms["pixels"] = lambda: pixels.to(device)
    return Samples({name: forms[name]() for name in inputs}, torch.from_numpy(labels).to(device))


def renumbered(labels: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Labels as positions in ``classes``; -1 for one that is not there."""
    position = np.full(max(int(labels.max(initial=0)), int(classes.max())) + 2, -1)
    position[classes] = np.arange(len(classes))
    return position[labels]  # a label of -1 finds the last place, which is -1


def check_labels(
    dataset: Dataset, method: type[Method], labels: dict[str, NDArray[np.int64]], experiment: Experiment
) -> None:
    name, protocol = experiment.method.name, experiment.evaluation.protocol
    if method.needs_labels and (labels["train"] < 0).any():
        raise FedVLError(
            f"Method '{name}' needs labels, and some training images of '{dataset.name}' have none; label them or use fst-cbdg."
        )
    if (labels["test"] < 0).any():
        raise FedVLError(
            f"Some test images of '{dataset.name}' have no label, so that no accuracy can be told; label them or leave them out."
        )
    if protocol == "open" and not method.answers_new_classes:
        raise FedVLError(
            f"Method '{name}' knows only the classes that it was trained on; use --protocol closed, or fed-mp or fedclip."
        )


def count_classes(clients: Sequence[NDArray[np.int64]], labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Images of each class that each client holds; unlabelled ones are not counted."""
    return np.stack([np.bincount(labels[rows][labels[rows] >= 0], minlength=classes) for rows in clients])


def embed_classes(dataset: Dataset, encoder: DualEncoder, templates: str, device: str) -> torch.Tensor:
    """One vector a class: the text embedding, or the mean of unit embeddings over several templates."""
    if templates not in dataset.templates:
        raise FedVLError(
            f"Dataset '{dataset.name}' has no templates '{templates}'; it has {', '.join(dataset.templates)}."
        )
    sets = []
    for template in dataset.templates[templates]:
        texts = [template.replace("{}", name) for name in dataset.class_names]
        with torch.no_grad():
            parts = [
                encoder.encode_text(encoder.tokenise(texts[first : first + TEXTS_AT_ONCE]).to(device))
                for first in range(0, len(texts), TEXTS_AT_ONCE)
            ]
        sets.append(torch.cat(parts))
    return sets[0] if len(sets) == 1 else torch.stack([normalize(part, dim=-1) for part in sets]).mean(0)


def write_metrics(folder: Path, records: list[dict[str, Any]]) -> None:
    """metrics.jsonl as the journal has it: a line of a round that was not committed is dropped."""
    write_whole(folder / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records).encode())
