"""From a description to a result: preparation -> rounds -> evaluation -> the files of the run."""

import hashlib
import json
import shlex
import shutil
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from fedvl import __version__
from fedvl.config import Experiment, MethodConfig, explain, overlay, read_toml, resolve, toml_value
from fedvl.data.catalogue import lookup
from fedvl.errors import FedVLError
from fedvl.evaluation.embedding import embedding_map
from fedvl.evaluation.examples import changed_rows, thumbnail
from fedvl.evaluation.metrics import recall_by_class
from fedvl.evaluation.predict import represent_all
from fedvl.federation.journal import Journal
from fedvl.federation.round import Engine, Federation
from fedvl.methods import file_digest, load_method
from fedvl.models.clip import DualEncoder
from fedvl.preparation import OPEN_ANEW, Display, Judged, Opener, Prepared, prepare
from fedvl.seeding import torch_generator
from fedvl.tensors import ByClient, Tensors, count_elements, digest, flatten, save, write_whole

RESULT_SCHEMA = 1
IMAGES_TIMED = 16


def resolve_experiment(settings: dict[str, Any]) -> Experiment:
    """The user's settings over the preset of the method they name, over the defaults; the method's options checked and filled in."""
    asked = resolve([settings]).method
    if asked.name.endswith(".py"):
        settings = with_digest(settings, asked)
    method = load_method(asked.name)
    if asked.preset not in method.presets:
        raise FedVLError(f"Method '{asked.name}' has no preset '{asked.preset}'; it has {', '.join(method.presets)}.")
    layered: dict[str, Any] = {}
    for layer in (
        method.presets[asked.preset],
        known_of_dataset(asked.name, resolve([settings]).data.dataset),
        settings,
    ):
        overlay(layered, layer)
    experiment = resolve([layered])
    try:
        options = method.options_type.model_validate(experiment.method.options)
    except ValidationError as error:
        raise FedVLError(explain(error, method.options_type, prefix="method.")) from error
    return resolve([layered, {"method": options.model_dump(mode="json", exclude_none=True)}])


def with_digest(settings: dict[str, Any], asked: MethodConfig) -> dict[str, Any]:
    """The settings with the SHA-256 of the method's file; one that was noted before must still be right."""
    digest = file_digest(Path(asked.name))
    if asked.sha256 not in (None, digest):
        raise FedVLError(f"{asked.name} has changed since the run began; restore it, or start a new run.")
    return {**settings, "method": {**settings["method"], "sha256": digest}}


def begin(experiment: Experiment, folder: Path) -> None:
    """What a run folder holds before its first round: its description, and the method where it is a file of the user's."""
    if experiment.method.name.endswith(".py"):
        shutil.copyfile(experiment.method.name, folder / Path(experiment.method.name).name)
    write_whole(folder / "config.toml", experiment.to_toml().encode())


def read_experiment(folder: Path) -> Experiment:
    """The experiment of a run folder; a method's file is the folder's own copy."""
    settings = read_toml(folder / "config.toml")
    name = settings.get("method", {}).get("name", "")
    if name.endswith(".py"):
        settings["method"]["name"] = str(folder / Path(name).name)
    return resolve_experiment(settings)


def complete(folder: Path, display: Display, opener: Opener = OPEN_ANEW) -> dict[str, Any]:
    """The result of a run folder: read if it is finished, and else brought to its end."""
    if (folder / "result.json").is_file():
        return dict(json.loads((folder / "result.json").read_bytes()))
    return run(read_experiment(folder), folder, display, opener)


def known_of_dataset(method: str, dataset: str) -> dict[str, Any]:
    """The method's options as its paper sets them for this dataset, by the catalogue; a file goes by its name."""
    entry = lookup(Path(dataset).stem)
    return {"method": dict(entry.methods.get(method, {}))} if entry else {}


def run(experiment: Experiment, folder: Path, display: Display, opener: Opener = OPEN_ANEW) -> dict[str, Any]:
    """Run, or go on with, the experiment of a run folder and write its result, model and report."""
    prepared = prepare(experiment, display, opener)
    return run_prepared(prepared, prepared.engine, folder, display)


def what_rounds_depend_on(experiment: Experiment) -> str:
    """SHA-256 of the settings that may not change between rounds; files go by their names, for folders may be moved."""
    settings = experiment.model_dump(mode="json", include={"seed", "method", "data", "model", "training"})
    for section, key in (("method", "name"), ("data", "dataset"), ("model", "name")):
        settings[section][key] = Path(settings[section][key]).name
    del settings["data"]["root"]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def run_prepared(prepared: Prepared, engine: Engine, folder: Path, display: Display) -> dict[str, Any]:
    """The rounds of a run, with its clients in this process (the engine of ``prepared``) or on other machines."""
    experiment, method = prepared.experiment, prepared.method
    torch.set_num_threads(experiment.federation.threads)
    zero_shot = prepared.judge_zero_shot()
    federation = Federation(
        method,
        engine,
        experiment.federation,
        experiment.seed,
        method.start(torch_generator(experiment.seed, "start")),
        journal=Journal(folder / "journal", what_rounds_depend_on(experiment)),
        device=prepared.test.labels.device,
    )
    rounds = experiment.federation.rounds if federation.trains else 0
    judged: list[tuple[Judged, float]] = []  # and the seconds that it took

    def judge(shared: Tensors, kept: ByClient) -> Judged:
        began = time.perf_counter()
        found = prepared.judge(shared, kept)
        judged.append((found, time.perf_counter() - began))
        return found

    def evaluate(shared: Tensors, kept: ByClient, round_number: int) -> dict[str, Any]:
        if round_number % experiment.evaluation.every and round_number != rounds:
            return {}
        return {"accuracy": judge(shared, kept).figures["accuracy"], **prepared.label_figures()}

    if federation.trains:
        federation.restore()
        write_metrics(folder, federation.records)
        show = display.rounds(rounds, federation.records, zero_shot.figures["accuracy"] if zero_shot else None)

        def after_round(record: dict[str, Any]) -> None:
            with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            show(record)

        federation.run(evaluate, after_round)
    if not judged:  # nothing was trained, or all of it before this process began
        judge(federation.shared, federation.last)
    flops = prepared.engine.local_flops(federation.shared) if federation.trains else 0
    result = describe(prepared, federation, zero_shot, judged, flops)
    finish(folder, result, federation)
    return result


def describe(
    prepared: Prepared,
    federation: Federation,
    zero_shot: Judged | None,
    judged: list[tuple[Judged, float]],
    flops: int,
) -> dict[str, Any]:
    """The result of a run; ``judged``: how the rounds of this process answered, the last of them last, and the seconds."""
    experiment, records = prepared.experiment, federation.records
    answered, answer_seconds = judged[-1]
    answers = sum(len(r["cohort"]) - len(r["dropped"]) for r in records)
    return {
        "schema": RESULT_SCHEMA,
        "fedvl_version": __version__,
        "method": experiment.method.label,
        "method_sha256": experiment.method.sha256,  # of its file, where it is the user's own
        "preset": experiment.method.preset,
        "dataset": experiment.data.dataset,
        "model": experiment.model.name,
        "partition": experiment.data.partition,
        "clients": experiment.data.clients,
        "rounds": len(records),
        "seed": experiment.seed,
        "protocol": experiment.evaluation.protocol,
        **answered.figures,
        **zero_shot_figures(zero_shot),
        **prepared.label_figures(),
        "per_round": [record["accuracy"] for record in records if "accuracy" in record],
        "per_round_loss": [record["loss"] for record in records],
        "trainable_parameters": count_elements(
            {name: tensor for name, tensor in federation.shared.items() if prepared.method.role.shared(name).trained}
        ),
        "private_parameters": count_elements(prepared.trained_private()),
        "bytes_up_per_client_round": sum(r["bytes_up"] for r in records) // max(answers, 1),
        "bytes_down_per_client_round": sum(r["bytes_down"] for r in records)
        // max(sum(len(r["cohort"]) for r in records), 1),
        "local_flops": flops,
        "seconds": {
            "encode": prepared.encode_seconds,
            "train": sum(record["seconds"] for record in records),
            "evaluate": sum(seconds for _, seconds in judged),
        },
        "seconds_per_image": answer_seconds / len(prepared.test) + encode_seconds_per_image(prepared),
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
        "notes": [*prepared.notes, *prepared.method.notes(), *(federation.journal.notes if federation.journal else ())],
        "device": str(prepared.test.labels.device),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": experiment.model_dump(mode="json", exclude_none=True),
        "command": command_for(experiment),
        "examples": example_images(prepared, answered, zero_shot),
    }


def zero_shot_figures(judged: Judged | None) -> dict[str, Any]:
    """The pretrained model's own accuracy; nothing known where it cannot name classes."""
    if judged is None:
        return {"zero_shot_accuracy": None}
    accuracies = {f"zero_shot_{name}": value for name, value in judged.figures.items() if "accuracy" in name}
    return {**accuracies, "zero_shot_per_class_recall": recall_by_class(judged.confusion)}


def example_images(prepared: Prepared, answered: Judged, zero_shot: Judged | None) -> dict[str, Any]:
    """A few test images that training set right or wrong, for the report; they go to a file of their own."""
    if zero_shot is None:
        return {}
    labels, count = prepared.test.labels.cpu().numpy(), prepared.experiment.evaluation.examples
    found = changed_rows(labels, zero_shot.answers, answered.answers, count)
    names = prepared.asked.task.class_names
    return {
        kind: [
            {
                "true": names[labels[row]],
                "zero_shot": names[zero_shot.answers[row]],
                "answer": names[answered.answers[row]],
                "image": thumbnail(prepared.read_test(row)),
            }
            for row in rows
        ]
        for kind, rows in found.items()
    }


def missing_figures(prepared: Prepared, federation: Federation) -> dict[str, Any]:
    """What the missing-modality protocol adds: the test under its conditions, and a map of the samples."""
    if not prepared.conditions:
        return {}
    embedded = represent_all(
        prepared.asked, federation.shared, prepared.test, prepared.experiment.evaluation.batch_size
    )
    return {
        "conditions": prepared.judge_conditions(federation.shared, federation.last),
        "embedding": embedding_map(embedded, prepared.test),
    }


def encode_seconds_per_image(prepared: Prepared) -> float:
    """What the frozen image tower costs a query; nothing if the method's answers include it."""
    if "pixels" in prepared.test.inputs:
        return 0.0
    return tower_seconds(prepared.method.task.clip, prepared.test.labels.device)


@cache
def tower_seconds(encoder: DualEncoder, device: torch.device) -> float:
    """Seconds an image, measured on one small batch, once a process for each model."""
    pixels = torch.zeros(IMAGES_TIMED, 3, encoder.image_size, encoder.image_size, device=device)
    with torch.inference_mode():
        float(encoder.encode_image(pixels).sum())  # the first call warms up; reading a number waits for a GPU
        began = time.perf_counter()
        float(encoder.encode_image(pixels).sum())
    return (time.perf_counter() - began) / IMAGES_TIMED


def finish(folder: Path, result: dict[str, Any], federation: Federation) -> None:
    """The model and the result; result.json comes last, for it says that the run is finished and what its files hash to."""
    examples = result.pop("examples")
    if any(examples.values()):
        write_whole(folder / "examples.json", json.dumps(examples).encode())
    described = {"fedvl": json.dumps(result["config"]), "method": result["method"]}
    files = {"model.safetensors": save(folder / "model.safetensors", federation.shared, described)}
    if federation.last:  # what the server answers queries with
        files["kept.safetensors"] = save(
            folder / "kept.safetensors", flatten(federation.last), {"method": result["method"]}
        )
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
