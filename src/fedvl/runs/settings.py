"""From a user's settings to one experiment, and back to the shortest command for it."""

import hashlib
import json
import shlex
from pathlib import Path

from pydantic import ValidationError

from fedvl.config import Experiment, MethodConfig, Settings, explain, nested, overlay, resolve, toml_value
from fedvl.data.catalogue import is_own, lookup
from fedvl.data.partition import is_partition_file
from fedvl.data.partition_file import clients_of
from fedvl.errors import FedVLError
from fedvl.federation.steps import choose_precision
from fedvl.files import file_sha256
from fedvl.methods import file_digest, load_method, presets_of

# Settings of a federation that may change between rounds: they decide whether there is another round and who is waited
# for, not what a committed round holds.
OPERATIONAL = {"rounds", "quorum", "attempts", "patience", "drift", "deadline", "max_message_bytes"}


def resolve_experiment(settings: Settings) -> Experiment:
    """Lay settings over the method's preset and the defaults, and check all of them."""
    wanted = resolve([settings])
    asked = wanted.method
    if asked.name.endswith(".py"):
        settings = with_digest(settings, asked)
    method = load_method(asked.name)
    presets = presets_of(asked.name)
    if asked.preset not in presets:
        raise FedVLError(f"Method '{asked.name}' has no preset '{asked.preset}'; it has {', '.join(presets)}.")
    layered: Settings = {}
    for layer in (
        presets[asked.preset],
        options_for_dataset(asked.name, wanted.data.dataset),
        for_own_images(settings, wanted),
        for_partition_file(wanted),
        settings,
    ):
        overlay(layered, layer)
    if method.exchanges is not None:  # whatever is asked for: what it does is fixed
        overlay(layered, {"federation": {"rounds": method.exchanges, "per_round": None}})
    experiment = resolve([layered])
    if experiment.training.precision == "auto":  # the choice is recorded with the run, which resumes with it elsewhere
        overlay(layered, nested("training.precision", choose_precision(method.through_encoder, experiment.device)))
    try:
        options = method.options_type.model_validate(experiment.method.options)
    except ValidationError as error:
        raise FedVLError(explain(error, method.options_type, prefix="method.")) from error
    return resolve([layered, {"method": options.model_dump(mode="json", exclude_none=True)}])


def for_own_images(settings: Settings, wanted: Experiment) -> Settings:
    """Return one client with all images of a user's own, unless clients are asked for."""
    simulated = {"clients", "partition", "client_shots", "newcomers"} & settings.get("data", {}).keys()
    federation, protocol = wanted.federation, wanted.evaluation.protocol
    several = federation.secure_sum or federation.per_round or federation.attack or wanted.privacy.unit == "client"
    if simulated or several or protocol != "closed" or not is_own(wanted.data.dataset):
        return {}
    return {"data": {"clients": 1, "partition": "iid"}}


def for_partition_file(wanted: Experiment) -> Settings:
    """Return as many clients as a partition file has."""
    spec = wanted.data.partition
    return {"data": {"clients": clients_of(spec)}} if is_partition_file(spec) else {}


def new_experiment(settings: Settings) -> Experiment:
    """Resolve the settings of a new run; refuse what no user can mean, though old runs have it."""
    experiment = resolve_experiment(settings)
    per_round, clients = experiment.federation.per_round, experiment.data.clients
    if per_round is not None and per_round > clients:
        raise FedVLError(
            f"{per_round} clients a round are more than the {clients} there are; lower --per-round, or raise --clients."
        )
    return experiment


def with_digest(settings: Settings, asked: MethodConfig) -> Settings:
    """Note the SHA-256 of a method's file; refuse one that changed since it was noted."""
    digest = file_digest(Path(asked.name))
    if asked.sha256 not in (None, digest):
        raise FedVLError(f"{asked.name} has changed since the run began; restore it, or start a new run.")
    return {**settings, "method": {**settings["method"], "sha256": digest}}


def options_for_dataset(method: str, dataset: str) -> Settings:
    """Return the options that papers set for this dataset; a file goes by its name."""
    entry = lookup(Path(dataset).stem)
    return {"method": dict(entry.methods.get(method, {})), "data": dict(entry.data)} if entry else {}


def resume_key(experiment: Experiment) -> str:
    """Hash the settings that decide what committed rounds hold; files go by name.

    Defaults of later sections are left out, so that a new setting does not change old keys.
    """
    settings = experiment.model_dump(mode="json", include={"seed", "method", "data", "model", "training"})
    evaluation, rounds = experiment.evaluation, experiment.federation.rounds
    validated = evaluation.validation is not None
    further = {
        "federation": experiment.federation.model_dump(mode="json", exclude=OPERATIONAL, exclude_defaults=True),
        "privacy": experiment.privacy.model_dump(mode="json") if experiment.privacy.unit != "none" else None,
        "protocol": evaluation.protocol if evaluation.protocol != "closed" else None,  # it divides the training images
        "validation": evaluation.validation,
        "every": evaluation.every if validated and evaluation.every > 1 else None,  # the rounds to choose from
        "rounds": rounds if experiment.training.schedule == "cosine" else None,  # its learning rate depends on them
        "rows": file_sha256(Path(assigned)) if is_partition_file(assigned := experiment.data.partition) else None,
    }
    settings |= {name: value for name, value in further.items() if value}
    for section, key in (("method", "name"), ("data", "dataset"), ("model", "name")):
        settings[section][key] = Path(settings[section][key]).name
    del settings["data"]["root"]
    # runs from before these were settings go on
    later_settings = {
        "data": ("unit", "additions", "asked_classes", "corrections"),
        "privacy": ("images", "public"),
        "training": ("start_from",),
    }
    for section, later in later_settings.items():
        for key in later:
            if section in settings and not settings[section][key]:
                del settings[section][key]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def command_for(experiment: Experiment) -> str:
    """Return the shortest command line that gives this experiment again."""
    method = {"name": experiment.method.name, "preset": experiment.method.preset}
    plain = resolve_experiment({"method": method}).model_dump(mode="json")
    of_dataset = resolve_experiment({"method": method, "data": {"dataset": experiment.data.dataset}})
    for_dataset = of_dataset.model_dump(mode="json")
    plain["method"], plain["data"] = for_dataset["method"], {**for_dataset["data"], "dataset": plain["data"]["dataset"]}
    words = ["fedvl", "run", "--method", method["name"]]
    words += ["--preset", method["preset"]] if method["preset"] != "paper" else []
    for section, value in experiment.model_dump(mode="json", exclude_none=True).items():
        if not isinstance(value, dict):
            words += [f"--{section}", str(value)] if value != plain[section] else []
            continue
        for key, setting in value.items():
            if setting != plain[section].get(key):
                words += ["--set", f"{section}.{key}={toml_value(setting)}"]
    return shlex.join(words)
