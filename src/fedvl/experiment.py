"""From a description to a result: preparation -> rounds -> evaluation -> the files of the run."""

import json
import shlex
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from fedvl import __version__
from fedvl.config import Experiment, explain, overlay, resolve, toml_value
from fedvl.data.catalogue import lookup
from fedvl.errors import FedVLError
from fedvl.evaluation.answers import represent_all
from fedvl.evaluation.embedding import embedding_map
from fedvl.evaluation.metrics import recall_by_class
from fedvl.federation.journal import Journal
from fedvl.federation.round import Federation
from fedvl.methods import load_method
from fedvl.methods.base import Method
from fedvl.preparation import Display, Judged, Prepared, prepare
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors, count_elements, digest, save, write_whole

RESULT_SCHEMA = 1
IMAGES_TIMED = 16


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


def run(experiment: Experiment, folder: Path, display: Display) -> dict[str, Any]:
    """Run, or go on with, the experiment of a run folder and write its result, model and report."""
    prepared = prepare(experiment, display)
    torch.set_num_threads(experiment.federation.threads)
    method, engine = prepared.method, prepared.engine
    zero_shot = prepared.judge_zero_shot()
    federation = Federation(
        method,
        engine,
        experiment.federation,
        experiment.seed,
        method.start(torch_generator(experiment.seed, "start")),
        journal=Journal(folder / "journal"),
        device=prepared.test.labels.device,
    )
    rounds = experiment.federation.rounds if federation.trains else 0
    evaluate_seconds = 0.0

    def evaluate(shared: Tensors, kept: Tensors, round_number: int) -> dict[str, Any]:
        nonlocal evaluate_seconds
        if round_number % experiment.evaluation.every and round_number != rounds:
            return {}
        began = time.perf_counter()
        accuracy = prepared.judge(shared, kept).figures["accuracy"]
        evaluate_seconds += time.perf_counter() - began
        return {"accuracy": accuracy, **prepared.label_figures()}

    if federation.trains:
        federation.restore()
        write_metrics(folder, federation.records)
        show = display.rounds(rounds, federation.records, zero_shot.figures["accuracy"] if zero_shot else None)

        def after_round(record: dict[str, Any]) -> None:
            with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            show(record)

        federation.run(evaluate, after_round)
    flops = engine.local_flops(federation.shared) if federation.trains else 0
    result = describe(prepared, federation, flops, evaluate_seconds)
    finish(folder, result, federation)
    return result


def describe(prepared: Prepared, federation: Federation, flops: int, evaluate_seconds: float) -> dict[str, Any]:
    experiment, records = prepared.experiment, federation.records
    began = time.perf_counter()
    answered = prepared.judge(federation.shared, federation.kept)
    answer_seconds = (time.perf_counter() - began) / len(prepared.test)
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
        **answered.figures,
        **zero_shot_figures(prepared.judge_zero_shot()),
        **prepared.label_figures(),
        "per_round": [record["accuracy"] for record in records if "accuracy" in record],
        "per_round_loss": [record["loss"] for record in records],
        "trainable_parameters": count_elements(
            {name: tensor for name, tensor in federation.shared.items() if prepared.method.trains(name)}
        ),
        "private_parameters": count_elements(prepared.trained_private()),
        "bytes_up_per_client_round": sum(r["bytes_up"] for r in records) // max(answers, 1),
        "bytes_down_per_client_round": sum(r["bytes_down"] for r in records)
        // max(sum(len(r["cohort"]) for r in records), 1),
        "local_flops": flops,
        "seconds": {
            "encode": prepared.encode_seconds,
            "train": sum(record["seconds"] for record in records),
            "evaluate": evaluate_seconds,
        },
        "seconds_per_image": answer_seconds + encode_seconds_per_image(prepared),
        "refused_updates": sum(len(record["refused"]) for record in records),
        "state_sha256": digest(federation.shared),
        "class_names": list(prepared.asked.task.class_names),
        "templates": prepared.templates,
        "model_fingerprint": prepared.method.task.encoder.fingerprint,
        "confusion": answered.confusion.tolist(),
        "per_class_recall": recall_by_class(answered.confusion),
        **missing_figures(prepared, federation),
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


def zero_shot_figures(judged: Judged | None) -> dict[str, Any]:
    """The pretrained model's own accuracy; nothing known where it cannot name classes."""
    if judged is None:
        return {"zero_shot_accuracy": None}
    accuracies = {f"zero_shot_{name}": value for name, value in judged.figures.items() if "accuracy" in name}
    return {**accuracies, "zero_shot_per_class_recall": recall_by_class(judged.confusion)}


def missing_figures(prepared: Prepared, federation: Federation) -> dict[str, Any]:
    """What the missing-modality protocol adds: the test under its conditions, and a map of the samples."""
    if not prepared.conditions:
        return {}
    embedded = represent_all(
        prepared.asked, federation.shared, prepared.test, prepared.experiment.evaluation.batch_size
    )
    return {
        "conditions": prepared.judge_conditions(federation.shared, federation.kept),
        "embedding": embedding_map(embedded, prepared.test),
    }


def encode_seconds_per_image(prepared: Prepared) -> float:
    """What the frozen image tower costs a query, measured on one small batch; nothing if the method's answers include it."""
    if "pixels" in prepared.test.inputs:
        return 0.0
    encoder = prepared.method.task.clip
    pixels = torch.zeros(IMAGES_TIMED, 3, encoder.image_size, encoder.image_size, device=prepared.test.labels.device)
    with torch.inference_mode():
        float(encoder.encode_image(pixels).sum())  # the first call warms up; reading a number waits for a GPU
        began = time.perf_counter()
        float(encoder.encode_image(pixels).sum())
    return (time.perf_counter() - began) / IMAGES_TIMED


def finish(folder: Path, result: dict[str, Any], federation: Federation) -> None:
    """The model and the result; result.json comes last, for it says that the run is finished and what its files hash to."""
    described = {"fedvl": json.dumps(result["config"]), "method": result["method"]}
    files = {"model.safetensors": save(folder / "model.safetensors", federation.shared, described)}
    if federation.kept:  # what the server answers queries with
        files["kept.safetensors"] = save(folder / "kept.safetensors", federation.kept, {"method": result["method"]})
    result["files_sha256"] = files
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


def write_metrics(folder: Path, records: list[dict[str, Any]]) -> None:
    """metrics.jsonl as the journal has it: a line of a round that was not committed is dropped."""
    write_whole(folder / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records).encode())
