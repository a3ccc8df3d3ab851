"""How far one unit moves what leaves clients: runs of the real engine on neighbouring datasets, without noise.

What a run releases with noise is replaced by what the first run of a pair released, so that both go on from the same
numbers, as the account of several steps assumes. Whatever else differs has left without noise.
"""

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from fedvl.config import EvaluationConfig, Experiment
from fedvl.data.sources import Opener, open_dataset
from fedvl.data.stores import Dataset, Split, unite
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.federation.fixed_point import SUMMED_FIGURES, from_whole, rounding_error
from fedvl.federation.local import LocalEngine, Summed
from fedvl.federation.privacy import ClientPrivacy, RecordPrivacy
from fedvl.federation.records import Budget, Record
from fedvl.federation.round import Federation
from fedvl.federation.statistics import Statistics
from fedvl.methods import load_method
from fedvl.methods.base import Method, Samples, Update
from fedvl.models.clip import Clip, DualEncoder
from fedvl.runs.experiment import local_engine
from fedvl.runs.preparation import Prepared, prepare
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors, count_elements

from .small import small_encoder, small_fused_encoder

Unit = Literal["client", "record"]
UNITS: tuple[Unit, ...] = get_args(Unit)
PROTOCOLS: tuple[str, ...] = get_args(EvaluationConfig.model_fields["protocol"].annotation)
SEVERAL = "one+two"  # datasets
CHANGES = ("adds a new class", "adds to a class", "removes the last of a class")
CLASSES, ROUNDS = 8, 2
PATIENT = 3  # images of one patient
TARGET = "target"  # the domain that leave-one-domain-out gives to no client
KEPT = {"shots": 10**9, "missing": "both:0"}  # in place of what presets draw among all images of a simulation
MOST = 1 + 1e-6  # clips that one unit may move a sum by
ROUNDING = 5e-6  # of sums in 32 bits, which clients trained in one kernel may add in another order
TRACES = 20  # times as much in a sum of so many images
CLIP = 1e-3  # shorter than gradients and updates are, so that all are cut to it


class Setting(NamedTuple):
    """An experiment in which clients hold one of two neighbouring datasets."""

    method: str
    unit: Unit
    protocol: str = "closed"
    several: bool = False
    secure: bool = False
    unit_column: bool = False  # whether all images of a patient are the unit
    whole: bool = True  # of a method of statistics: whether all of them are released, not those for little data
    options: tuple[tuple[str, Any], ...] = ()
    data: tuple[tuple[str, Any], ...] = ()

    @property
    def domains(self) -> tuple[str, ...]:
        """Of the images: each domain, or each of two datasets, is a client where classes are not dealt to clients."""
        return ("a", "b", *((TARGET,) if self.protocol == "leave-one-domain-out" else ("c",) if self.secure else ()))

    @property
    def clients(self) -> int:
        return 3 if self.secure else 2  # without one, there must be two left for a secure sum

    @property
    def words(self) -> str:
        chosen = ", ".join(f"{key}={value}" for key, value in (*self.options, *self.data))
        several = ", several datasets" if self.several else ""
        further = f"{several}{', secure' * self.secure}{', by patient' * self.unit_column}{', ' * bool(chosen)}{chosen}"
        further = f"{', little data' * (not self.whole)}{further}"
        return f"{self.method}, {self.unit}, {self.protocol}{further}"


# --- neighbouring datasets


class Extra(NamedTuple):
    """The patient in whose images two datasets differ: the class of the first, and whether they are the first rows."""

    label: int
    first: bool = False
    images: int = 1  # each of the next class


@cache
def emoji() -> Dataset:
    return open_dataset("emoji-mini")


def part_of(name: str, classes: range, held: tuple[str, ...], extra: Extra | None, absent: int | None) -> Dataset:
    """Return a dataset with one image of each class and domain, but for ``absent``; ``extra`` is of the first domain."""
    source, count = emoji(), len(held)

    def split(part: str) -> Split:
        whole = source.splits[part]
        rows, labels, domains, patients = list[int](), list[int](), list[str](), list[str]()
        for label in classes:
            if part == "train" and label == absent:
                continue
            rows += np.flatnonzero(whole.labels == label)[:count].tolist()
            labels += [label - classes.start] * count
            domains += held
            patients += [f"{label} {domain}" for domain in held]
        if part == "train" and extra is not None and extra.label in classes:
            place = 0 if extra.first else len(rows)
            for label in [(extra.label + image) % len(classes) for image in range(extra.images)]:
                rows.insert(place, int(np.flatnonzero(whole.labels == label)[count]))
                labels.insert(place, label - classes.start)
                domains.insert(place, held[0])
                patients.insert(place, "the same")
        texts = tuple((whole.texts or ())[row] for row in rows)
        units = {"patient": tuple(patients)}
        return Split(whole.store, whole.rows[rows], np.array(labels, np.int64), texts, tuple(domains), units=units)

    names = tuple(source.class_names[label] for label in classes)
    return Dataset(name, names, source.templates, {part: split(part) for part in ("train", "test")})


@cache
def dataset(several: bool, held: tuple[str, ...], extra: Extra | None, absent: int | None) -> Dataset:
    if not several:
        return part_of("one", range(CLASSES), held, extra, absent)
    parts = {"one": range(CLASSES // 2), "two": range(CLASSES // 2, CLASSES)}
    return unite([part_of(name, classes, held, extra, absent) for name, classes in parts.items()])


@cache
def flat_encoder() -> DualEncoder:
    """An encoder of a low logit scale: where a class has no share of the softmax, nothing that it changes is seen."""
    encoder = deepcopy(small_encoder(16, 16, Clip))
    encoder.log_scale.fill_(math.log(3))
    return encoder


def prepared(setting: Setting, extra: Extra | None, absent: int | None, withdrawn: tuple[int, ...] = ()) -> Prepared:
    experiment = experiment_of(setting, withdrawn)
    fused = "tokens" in load_method(setting.method).inputs
    opener = Opener(
        lambda name, root: dataset(setting.several, setting.domains, extra, absent),
        lambda name, device: small_fused_encoder() if fused else flat_encoder(),
    )
    return prepare(experiment, Silent(), opener)


@cache
def experiment_of(setting: Setting, withdrawn: tuple[int, ...]) -> Experiment:
    method = load_method(setting.method)
    sums = method.statistics is not Method.statistics
    federation: dict[str, Any] = {"rounds": ROUNDS, "threads": 1, "withdrawn": withdrawn, "drift": False, "chunk": 1}
    return resolve_experiment(
        {
            "method": {"name": setting.method, **dict(setting.options)},
            "device": "cpu",
            "data": {
                "dataset": SEVERAL if setting.several else "one",
                "clients": setting.clients,
                "partition": "domains",
                "minimum": 0,
                "target_domain": TARGET,
                **{key: value for key, value in KEPT.items() if key in method.presets["paper"].get("data", {})},
                **({"unit": "patient"} if setting.unit_column else {}),
                **dict(setting.data),
            },
            "training": {"batch_size": 100, "local_epochs": 1, "learning_rate": 0.1},
            "federation": {**federation, **({"secure_sum": True, "least_clients": 2} if setting.secure else {})},
            "privacy": {
                "unit": setting.unit,
                **({} if sums and setting.unit == "record" else {"clip": CLIP}),
                **({"images": 10**9 if setting.whole else 1} if sums else {}),
            },
            "evaluation": {"protocol": setting.protocol},
        }
    )


class Pair(NamedTuple):
    """Two neighbouring datasets: with and without an image, which one client has."""

    client: int
    extra: Extra
    absent: int | None  # a class of which there is no other training image


@cache
def pair(protocol: str, several: bool, secure: bool, change: str) -> Pair:
    """Find an image whose class is trained on in this protocol, and the client that then holds it."""
    setting = Setting("promptfl" if protocol != "missing" else "fedavg-p", "client", protocol, several, secure)
    for label in range(CLASSES):
        extra, absent = Extra(label, change.startswith("removes")), None if change == "adds to a class" else label
        sizes = [[len(rows) for rows in prepared(setting, own, absent).training.rows] for own in (extra, None)]
        holders = [client for client in range(setting.clients) if sizes[0][client] != sizes[1][client]]
        if len(holders) == 1:
            return Pair(holders[0], extra, absent)
    raise AssertionError(f"no client trains on any class in the {protocol} protocol")


# --- what a run releases


@dataclass
class Seen:
    """What leaves in a run: what noise covers, before the noise, and all else."""

    released: dict[Any, Any]  # of the first run of a pair, which both go on from
    covered: dict[Any, Tensors] = field(default_factory=dict)
    updates: list[dict[int, Update]] = field(default_factory=list)
    figures: list[list[float]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def release(self, key: Any, value: Any) -> Any:
        return self.released.setdefault(key, value)


class Watched(RecordPrivacy):
    """Record-level privacy without noise, which notes each step's sum; ``left_out`` is a record that no step draws."""

    def draw(self, images: int, seed: int, *purpose: str | int) -> list[torch.Tensor]:
        left_out: Drawn | None = self.__dict__.get("left_out")
        drawn = super().draw(images, seed, *purpose)
        if left_out is None or purpose[1] != left_out.client:
            return drawn
        return [step[step != left_out.record % images] for step in drawn]

    def noisy_mean(self, total: Tensors, images: int, seed: int, *purpose: str | int) -> Tensors:
        seen: Seen = self.__dict__["seen"]
        seen.covered[purpose] = {name: tensor.double() for name, tensor in total.items()}
        return dict(seen.release(purpose, total))

    def spend(self, records: Any, sizes: Any) -> Budget:
        return NO_NOISE


NO_NOISE = Budget(unit="client", epsilon=1.0, delta=1e-5, sampling="no noise")


class Drawn(NamedTuple):
    """A record of a client: the first, or -1, the last."""

    client: int
    record: int


class WatchedClients(ClientPrivacy):
    """Client-level privacy without noise, which notes each round's sum."""

    def merge(self, round_index: int, shared: Tensors, updates: Any, records: Any) -> tuple[Tensors, float]:
        seen: Seen = self.__dict__["seen"]
        exact = {name: tensor.double() for name, tensor in shared.items()}
        sent = [u._replace(tensors={n: t.double() for n, t in u.tensors.items()}) for u in updates]
        mean, clip = super().merge(round_index, exact, sent, records)
        seen.covered[round_index] = {name: (mean[name] - exact[name]) * self.expected for name in exact}
        return seen.release(round_index, {n: t.to(shared[n].dtype) for n, t in mean.items()}), clip

    def spend(self, records: Any, sizes: Any) -> Budget:
        return NO_NOISE


def observe(found: Prepared, released: dict[Any, Any], left_out: Drawn | None = None) -> Seen:
    """Run the rounds, and note what leaves; a record that is ``left_out`` is there and takes no part in any step."""
    experiment, engine = found.experiment, local_engine(found)
    engine.private_seed = experiment.seed  # a run without a client would draw anew
    if engine.method.role.statistics:
        return observe_statistics(found, engine, released, left_out)
    hidden, seen = without_noise(engine, experiment, released)
    hidden.__dict__["left_out"] = left_out
    start = found.method.start(torch_generator(experiment.seed, "start"))
    federation = Federation(found.method, engine, experiment.federation, experiment.seed, start, privacy=hidden)
    federation.run(after_round=seen.records.append)
    return seen


def observe_statistics(found: Prepared, engine: LocalEngine, released: dict[Any, Any], left_out: Drawn | None) -> Seen:
    """Run the exchanges without noise, and note the sums in units of what one unit may move."""
    experiment, seen = found.experiment, Seen(released)
    if left_out is not None:
        labels = engine.data.labels.clone()
        labels[engine.rows[left_out.client][left_out.record]] = -1
        engine.data = Samples(engine.data.inputs, labels)
    noise = engine.statistics_noise
    assert noise is not None
    engine.__dict__["statistics_noise"] = silent = replace(noise)
    silent.__dict__["sigma"] = 0.0
    sum_statistics: Any = engine.sum_statistics

    def noting(round_index: int, cohort: Any, shared: Tensors) -> Statistics:
        result = sum_statistics(round_index, cohort, shared)
        # rounding to whole numbers adds to what one unit moves, and the noise covers it
        most = noise.sensitivity + (2 * rounding_error(result.total) if experiment.federation.secure_sum else 0.0)
        seen.covered[round_index] = {n: t * CLIP / most for n, t in result.total.items()}
        return seen.release(round_index, result)

    engine.__dict__["sum_statistics"] = noting
    start = found.method.start(torch_generator(experiment.seed, "start"))
    federation = Federation(found.method, engine, experiment.federation, experiment.seed, start)
    federation.run(after_round=seen.records.append)
    return seen


def without_noise(
    engine: LocalEngine, experiment: Experiment, released: dict[Any, Any]
) -> tuple[Watched | WatchedClients, Seen]:
    """Take the noise from an engine, and let it release what another released."""
    privacy, rounds, seen = experiment.privacy, experiment.federation.rounds, Seen(released)
    hidden: Watched | WatchedClients
    if privacy.unit == "record":
        engine.hidden = hidden = Watched(privacy, experiment.training, rounds)
    else:
        hidden = WatchedClients(privacy, rounds, engine.clients, engine.clients, 0)
        hidden.__dict__["sigma"] = 0.0
        if experiment.federation.secure_sum:
            engine.shared_noise = hidden
    hidden.__dict__["seen"] = seen
    watch(engine, seen, privacy.unit)
    return hidden, seen


def watch(engine: LocalEngine, seen: Seen, unit: str) -> None:
    """Note what clients send; sums and reports, of which noise covers the sums, are those of the first run."""
    train, sum_updates, report = engine.train, engine.sum_updates, engine.report

    def noting(*arguments: Any, **named: Any) -> Any:
        trained = train(*arguments, **named)
        # a client's number of images is public: of neighbours it is the same
        trained = [result._replace(update=result.update._replace(weight=1.0)) for result in trained]
        seen.updates.append({result.update.client: result.update for result in trained})
        return trained

    def noting_sum(round_index: int, cohort: Any, shared: Tensors) -> Summed:
        summed = sum_updates(round_index, cohort, shared)
        numbers = from_whole(summed.total)
        seen.figures.append(numbers[-SUMMED_FIGURES:].tolist())
        if unit == "client":
            seen.covered[round_index] = {"moves": numbers[:-SUMMED_FIGURES]}
        assert len(numbers) == count_elements(shared) + SUMMED_FIGURES
        return summed._replace(total=seen.release(("sum", round_index), summed.total))

    def noting_report(round_index: int, shared: Tensors) -> Any:
        return seen.release(("report", round_index), report(round_index, shared))

    replaced: Any = engine
    replaced.train, replaced.sum_updates, replaced.report = noting, noting_sum, noting_report


# --- how far one unit moves it


class Sensitivity(NamedTuple):
    """The largest change of what noise covers, in clips, and what else differs between the two runs."""

    moved: float
    uncovered: list[str]


def sensitivity(setting: Setting, change: str) -> Sensitivity:
    """Measure neighbours: with and without an image, or with and without the client that has it.

    An image that is there and in no step must leave no trace: the sum of the others is then as without it.
    """
    found, released = pair(setting.protocol, setting.several, setting.secure, change), dict[Any, Any]()
    if setting.unit_column:
        found = found._replace(extra=found.extra._replace(images=PATIENT))
    more = prepared(setting, *found[1:])
    if setting.unit == "client":
        alone = observe(with_noise_of(prepared(setting, *found[1:], (found.client,)), more), released)
        both = observe(more, released)
        return Sensitivity(farthest(alone, both), different(alone, both, {found.client}))
    fewer, both = observe(prepared(setting, None, found.absent), released), observe(more, released)
    if load_method(setting.method).labels == "none":  # without a label an image still counts
        return Sensitivity(farthest(fewer, both), different(fewer, both, set()))
    # rows are in order, and the name of the patient comes after all others
    record = 0 if found.extra.first and not setting.unit_column else -1
    undrawn = observe(more, released, Drawn(found.client, record))
    trace = farthest(fewer, undrawn)
    traces = [f"what it changes of others: {trace:.3g} clips"] if trace > ROUNDING * TRACES else []
    moved = max(farthest(fewer, both), farthest(undrawn, both))
    return Sensitivity(moved, [*traces, *different(fewer, both, set())])


def with_noise_of(found: Prepared, other: Prepared) -> Prepared:
    """Let a method expect the noise of another federation: the list of clients is public and the same in both."""
    task = replace(found.method.task, noise=other.method.task.noise)
    return replace(found, method=type(found.method)(found.method.options, task))


def farthest(one: Seen, two: Seen) -> float:
    """Return how far a sum that noise covers lies apart in two runs, at most, in clips."""
    assert two.covered, "nothing was trained"
    found = 0.0
    for key, total in two.covered.items():
        before = one.covered.get(key, {})
        moves = [total[name] - before[name] if before else total[name] for name in total]
        found = max(found, math.hypot(*(float(torch.linalg.vector_norm(move)) for move in moves)) / CLIP)
    return found


def different(one: Seen, two: Seen, own: set[int]) -> list[str]:
    """Name tensors in updates of clients other than ``own`` that differ, though the noisy sums are the same."""
    found = []
    for round_number, (first, second) in enumerate(zip(one.updates, two.updates, strict=True), 1):
        for client in second.keys() - own:
            left, right = first[client].tensors, second[client].tensors
            found += [
                f"'{name}' of client {client} in round {round_number}"
                for name in right
                if name not in left or not torch.allclose(left[name], right[name], rtol=ROUNDING, atol=ROUNDING)
            ]
    return found


# --- what is to be measured


def settings_of(method: str, unit: Unit) -> Iterator[Setting]:
    """Yield a method in every protocol and with each choice of its options, one at a time.

    A choice that is accepted where the default is refused is yielded in every protocol too.
    """
    plain = Setting(method, unit)
    yield from in_protocols(plain)
    yield plain._replace(secure=True)
    yield plain._replace(unit_column=True)
    if load_method(method).statistics is not Method.statistics:
        yield plain._replace(whole=False)
    for key, value in choices(method):
        other = plain._replace(options=((key, value),))
        yield from in_protocols(other) if refusal(plain) and not refusal(other) else [other]


def in_protocols(setting: Setting) -> list[Setting]:
    return [setting._replace(protocol=protocol, several=several) for protocol in PROTOCOLS for several in (False, True)]


def choices(method: str) -> Iterator[tuple[str, Any]]:
    """Yield the options that are a choice, with each value that is not the default."""
    for key, known in load_method(method).options_type.model_fields.items():
        for value in (True, False) if known.annotation is bool else get_args(known.annotation):
            if value != known.default and isinstance(value, str | bool):
                yield key, value


def refusal(setting: Setting) -> str | None:
    """Return why a setting is refused, or None."""
    try:
        prepared(setting, None, None)
    except FedVLError as error:
        return str(error)
    return None
