"""Everything that a run needs before its first round, in five steps.

Open the dataset and the model, encode the images, assign rows to clients and queries, make the
method, take the samples to train on and to test with. ``splits`` are those on this machine.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedvl.config import BY_CLIENT, Experiment
from fedvl.data.additions import owners_of
from fedvl.data.catalogue import is_own, numbered_groups
from fedvl.data.holdings import Units, hold_out_validation, of_newcomers, take_root, units_of, without
from fedvl.data.images import is_dim
from fedvl.data.imported import ImportedEncoder, encoding_in
from fedvl.data.inputs import Read, domains_of, embed_classes, read_forms, stacked_rows
from fedvl.data.missing import LabelNoise, conditions_of, with_wrong_labels, without_modalities
from fedvl.data.partition import few_shot
from fedvl.data.partition_file import TrainingImages
from fedvl.data.protocols import (
    NO_ROWS,
    PROTOCOLS,
    Assignment,
    Domains,
    Labels,
    Queries,
    number_domains,
    number_origins,
    only_test,
    renumbered,
    with_additions,
    with_client_shots,
)
from fedvl.data.sources import OPEN_ANEW, Opener
from fedvl.data.stores import Dataset, FileStore, Split
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.federation.statistics_privacy import sum_noise
from fedvl.methods import load_method
from fedvl.methods.base import Method, Options, Samples, SumNoise, Task
from fedvl.methods.parts.losses import CLASS_LIST, UNIT
from fedvl.methods.parts.pseudo_labels import LabelRule, relabelled
from fedvl.models.clip import DualEncoder
from fedvl.models.vilt import FusedEncoder
from fedvl.runs.requirements import (
    check_classes,
    check_labels,
    check_method,
    check_model,
    check_settings,
    check_united,
    check_withdrawn,
)
from fedvl.runs.starting import check_start, head_of_run, start_note
from fedvl.tensors import IntArray, pick_device

SPLITS = ("train", "test")
FEW = 10  # test images of a class, of which its recall says little
LISTED = 5  # classes or images, by name
PUBLIC_SETS = ("emoji-mini", "cifar10-mini")  # public images, where they are not the clients' own


@dataclass(frozen=True)
class Training:
    """What clients train on."""

    samples: Samples
    rows: list[Tensor]  # of the samples, by client
    true_labels: Tensor  # of the samples, to measure pseudo-labels; -1 where there is none
    counts: IntArray  # clients x classes of the dataset
    note: str  # on the partition
    root: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))  # rows that are the server's own
    newcomers: list[Tensor] = field(default_factory=list)  # rows of clients that join when training is over
    validation: "Validation | None" = None
    group: "Group | None" = None


class Group(NamedTuple):
    """Images that are of one unit, such as a patient, where the source says whose they are."""

    column: str
    largest: int  # images of one unit at a client


@dataclass(frozen=True)
class Validation:
    """Training images that clients hold out, to choose a round or a setting by."""

    samples: Samples
    parts: list[Tensor]  # rows of each client; none unless it has its own test


@dataclass(frozen=True)
class Test:
    """What is queried."""

    samples: Samples
    read: Callable[[int], Image.Image]  # the image of a row
    parts: list[Tensor]  # rows that each client queries; none unless it has its own test
    conditions: dict[str, Samples]  # of the missing-modality protocol; none in another
    sha256: str = ""  # of the images in their order, so that runs on the same can be compared image by image
    candidates: list[Tensor] = field(default_factory=list)  # classes among which each client is asked; none: among all
    new: Samples | None = None  # of classes that nobody trains on, in the base-to-new protocol
    newcomers: list[Tensor] = field(default_factory=list)  # rows that clients query who join when training is over
    describe: Callable[[int], str] = str  # the name of a row's image
    content_sha256: Callable[[int], str] = str  # of a row's image, under whatever name


@dataclass(frozen=True)
class Prepared:
    """Everything in place for the first round."""

    experiment: Experiment
    method: Method
    queried: Method  # the method for the queried classes; that of training in a closed set
    for_new: Method | None  # the method for the new classes of the base-to-new protocol
    training: Training
    test: Test
    class_names: list[str]  # of the dataset
    templates: list[str]  # for its class names
    skipped: list[dict[str, str]]
    notes: list[str]
    encode_seconds: float
    sources: "Sources"
    encoded: "Encoded"
    assignment: Assignment

    @property
    def device(self) -> torch.device:
        return self.test.samples.labels.device


class Sources(NamedTuple):
    """Step 1: the dataset, the model, and what the method wants of them."""

    dataset: Dataset
    encoder: DualEncoder | FusedEncoder | ImportedEncoder
    method: type[Method]
    options: Options
    inputs: list[str]  # of training
    device: str

    @property
    def wanted(self) -> list[str]:
        """The inputs of the test: features too, for pseudo-labels and the zero-shot accuracy."""
        fused = isinstance(self.encoder, FusedEncoder)
        return self.inputs if fused else list(dict.fromkeys([*self.inputs, "features"]))


class Encoded(NamedTuple):
    """Step 2: the inputs and labels of each split that is here."""

    read: Mapping[str, Read]
    labels: Mapping[str, IntArray]

    def labels_of(self, split: str) -> IntArray:
        return self.labels.get(split, np.array([], np.int64))

    def inputs(self, forms: Sequence[str], rows: IntArray) -> dict[str, Tensor]:
        """Take rows of the test split, and after its last those of the training split."""
        count = len(self.labels_of("test"))
        parts = {"test": rows[rows < count], "train": rows[rows >= count] - count}
        order = np.argsort(np.argsort(rows >= count, kind="stable"))

        def taken(form: str) -> Tensor:
            found = [self.read[split].forms[form][part] for split, part in parts.items() if len(part)]
            return stacked_rows(found, form)[order] if len(found) > 1 else found[0]

        return {form: taken(form) for form in forms}


def prepare(
    experiment: Experiment, display: Display, opener: Opener = OPEN_ANEW, splits: Sequence[str] = SPLITS
) -> Prepared:
    """Prepare a run from its description."""
    began = time.perf_counter()
    simulated = set(splits) >= set(SPLITS)
    check_settings(experiment, simulated)
    check_start(experiment)
    sources = open_sources(experiment, opener)
    encoded = encode(sources, experiment, splits, display)
    encode_seconds = time.perf_counter() - began
    assignment = assign(sources, encoded, experiment)
    test = take_test(sources, encoded, assignment, experiment)
    method, queried, for_new = make_methods(sources, encoded, assignment, experiment, display, opener)
    check_method(method, experiment)
    return Prepared(
        experiment=experiment,
        method=method,
        queried=queried,
        for_new=for_new,
        training=take_training(sources, encoded, assignment, experiment, method),
        test=test,
        class_names=list(sources.dataset.class_names),
        templates=list(sources.dataset.templates.get(experiment.data.templates, ())),
        skipped=[{"image": i, "reason": r, "split": name} for name, read in encoded.read.items() for i, r in read.bad],
        notes=[
            *sources.dataset.notes,
            *(note for read in encoded.read.values() for note in read.notes),
            *(dim_note(sources.dataset) if is_own(experiment.data.dataset) else []),
            *withdrawal_note(experiment),
            *start_note(experiment),
            *(simulation_note(experiment) if simulated else []),
            *(few_tested_note(sources.dataset, encoded) if simulated and not experiment.data.test_shots else []),
        ],
        encode_seconds=encode_seconds,
        sources=sources,
        encoded=encoded,
        assignment=assignment,
    )


def withdrawal_note(experiment: Experiment) -> list[str]:
    withdrawn = experiment.federation.withdrawn
    return [f"Clients {', '.join(map(str, sorted(withdrawn)))} have withdrawn and take no part."] if withdrawn else []


def simulation_note(experiment: Experiment) -> list[str]:
    """Say that several clients with the images of one folder are a simulation."""
    data = experiment.data
    if data.clients < 2 or not is_own(data.dataset):
        return []
    return [
        f"{data.clients} simulated clients share your images (partition {data.partition}); without --clients and --partition, "
        "one client has all of them."
    ]


def dim_note(dataset: Dataset) -> list[str]:
    """Name images of 16 bits whose values are of fewer: they are read as nearly black."""
    stores = {id(split.store): split.store for split in dataset.splits.values()}.values()
    found = [
        name
        for store in stores
        if isinstance(store, FileStore)
        for path, name in zip(store.paths, store.names, strict=True)
        if is_dim(path)
    ]
    if not found:
        return []
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return [
        f"Read as nearly black, since their values use a small part of 16 bits: {', '.join(found[:LISTED])}{more}; scale them to "
        "the whole range."
    ]


def few_tested_note(dataset: Dataset, encoded: "Encoded") -> list[str]:
    """Name the classes of which the test says nothing, or little."""
    if "test" not in encoded.labels:
        return []
    counts = np.bincount(encoded.labels_of("test"), minlength=len(dataset.class_names))
    trained = set(encoded.labels_of("train").tolist())
    lines = []
    for said, chosen in (
        ("No test image, so nothing is known of", [c for c in sorted(trained - {-1}) if counts[c] == 0]),
        (
            f"Fewer than {FEW} test images, so little is known of",
            np.flatnonzero((counts > 0) & (counts < FEW)).tolist(),
        ),
    ):
        names = [dataset.class_names[c] for c in chosen]
        more = f" and {len(names) - LISTED} more classes" if len(names) > LISTED else ""
        lines += [f"{said}: {', '.join(names[:LISTED])}{more}."] if names else []
    return lines


def open_sources(experiment: Experiment, opener: Opener) -> Sources:
    """Open the dataset and the model, and check that the method can use them."""
    device = pick_device(experiment.device)
    method = load_method(experiment.method.name)
    dataset = opener.dataset_of(experiment.data)
    check_classes(dataset)
    check_united(dataset, method, experiment)
    options = method.options_type.model_validate(experiment.method.options)
    inputs = [form for form in method.forms(options) if form != "present"]
    encoder = opener.model(experiment.model.name, device)
    if isinstance(encoder, FusedEncoder):
        encoder = encoder.for_runs(experiment.model.text_length)
    encoder = encoding_in(encoder, experiment.model.encoding)
    check_model(isinstance(encoder, FusedEncoder), "tokens" in inputs, experiment)
    return Sources(dataset, encoder, method, options, inputs, device)


def encode(sources: Sources, experiment: Experiment, splits: Sequence[str], display: Display) -> Encoded:
    """Encode the images of the splits, by way of the feature cache."""
    parts = {name: sources.dataset.splits[name] for name in splits if name in sources.dataset.splits}
    read = {
        name: read_forms(name, part, sources.encoder, sources.wanted, sources.device, display.stage)
        for name, part in parts.items()
    }
    labels = {name: part.labels[read[name].kept] for name, part in parts.items()}
    found = Encoded(read, labels)
    check_labels(sources.dataset, sources.method, labels, experiment)
    if experiment.data.test_shots and "test" in read:
        few = few_shot(labels["test"], experiment.data.test_shots, seed=0)  # one test for all seeds
        read["test"], labels["test"] = read["test"].take(few), labels["test"][few]
    return found


def assign(sources: Sources, encoded: Encoded, experiment: Experiment) -> Assignment:
    """Assign rows to clients and to queries, by the protocol."""
    check_withdrawn(experiment)
    domains = None
    if encoded.read.keys() >= {"train", "test"}:
        parts = (domains_of(sources.dataset.splits[name], encoded.read[name].kept) for name in ("train", "test"))
        domains = number_domains(*parts)
    origins = number_origins(sources.dataset.origins)
    names = sources.dataset.class_names
    groups = numbered_groups(sources.dataset.name, names)
    known = Labels(
        encoded.labels_of("train"),
        encoded.labels_of("test"),
        len(names),
        domains,
        origins,
        None if groups is None else np.array(groups),
        training_images_of(sources.dataset, encoded) if "train" in encoded.read else None,
    )
    if "train" not in encoded.read:
        return only_test(known, experiment.data.clients)
    if experiment.data.additions:
        found = assign_additions(sources, encoded, known, experiment)
    else:
        found = PROTOCOLS[experiment.evaluation.protocol](known, experiment.data, experiment.seed)
    if experiment.data.unit and (units := training_units(sources, encoded, experiment)):
        found = replace(found, clients=units.together(found.clients))
    return with_client_shots(found, known.train, experiment.data.client_shots, experiment.seed)


def training_images_of(dataset: Dataset, encoded: Encoded) -> TrainingImages:
    split = dataset.splits["train"]
    return TrainingImages(encoded.read["train"].kept, split.describe)


def assign_additions(sources: Sources, encoded: Encoded, known: Labels, experiment: Experiment) -> Assignment:
    """Assign the rows of the dataset without its additions, and then those that were added."""
    data, dataset = experiment.data, sources.dataset
    if experiment.evaluation.protocol != "closed":
        raise FedVLError("Images are added under --protocol closed only; leave data.additions out.")
    train, test = (rows_of_parts(dataset.splits[split], encoded.read[split].kept) for split in SPLITS)
    owners = owners_of(data)
    domains = known.domains and Domains(known.domains.train[train[0]], known.domains.test[test[0]], known.domains.names)
    images = known.images and known.images._replace(kept=known.images.kept[train[0]])
    before = Labels(
        known.train[train[0]], known.test[test[0]], dataset.before, domains, groups=known.groups, images=images
    )
    data = data.model_copy(update={"clients": data.clients - owners.count(None)})
    found = PROTOCOLS["closed"](before, data, experiment.seed)
    new = count(data.clients)
    added = [NO_ROWS] * experiment.data.clients
    for owner, rows in zip(owners, train[1:], strict=True):
        client = next(new) if owner is None else owner
        added[client] = np.concatenate([added[client], rows])
    return with_additions(found, added, np.concatenate([NO_ROWS, *test[1:]]), known.classes)


def rows_of_parts(split: Split, kept: IntArray) -> list[IntArray]:
    """Return the rows of each part of a split, among the images that are kept."""
    ends = np.cumsum([len(part) for part in split.parts])
    return np.split(np.arange(len(kept)), np.searchsorted(kept, ends)[:-1])


def training_units(sources: Sources, encoded: Encoded, experiment: Experiment) -> Units | None:
    return units_of(sources.dataset.splits["train"], encoded.read["train"].kept, experiment.data.unit)


def make_methods(
    sources: Sources,
    encoded: Encoded,
    assignment: Assignment,
    experiment: Experiment,
    display: Display,
    opener: Opener,
) -> tuple[Method, Method, Method | None]:
    """Make the method for the trained classes, for the queried ones, and for further new ones."""
    target = None
    if sources.method.uses_target and len(assignment.validation):
        target = encoded.inputs(list(encoded.read["test"].forms), assignment.validation)
    embeddings = embed_classes(sources.dataset, experiment.data.templates, sources.encoder, sources.device)

    def held_out() -> Samples:
        """Return the training images that no client holds."""
        free = np.setdiff1d(np.arange(len(encoded.labels_of("train"))), np.concatenate(assignment.clients))
        rows = torch.from_numpy(free).to(sources.device)
        labels = torch.from_numpy(renumbered(encoded.labels_of("train")[free], assignment.trained_classes))
        forms = encoded.read["train"].forms
        return Samples({form: forms[form][rows] for form in sources.inputs}, labels.to(sources.device))

    def make(classes: IntArray) -> Method:
        task = Task(
            tuple(sources.dataset.class_names[c] for c in classes),
            embeddings[classes],
            sources.encoder,
            experiment.data.clients,
            experiment.seed,
            protocol=experiment.evaluation.protocol,
            target=target,
            origins=tuple(sources.dataset.origins[c] for c in classes) if sources.dataset.origins else (),
            templates=tuple(sources.dataset.templates.get(experiment.data.templates, ())),
            stage=display.stage,
            training=experiment.training,
            noise=noise_on_statistics(sources, encoded, assignment, experiment),
            public=lambda: public_features(sources, experiment, display, opener),
        )
        if encoded.read.keys() >= {"train", "test"}:
            task = replace(task, held_out=held_out)
        if path := experiment.training.start_from:
            task = replace(task, head=cache(lambda: head_of_run(path, replace(task, head=None))))
        return sources.method(sources.options, task)

    new = assignment.new
    return (
        make(assignment.trained_classes),
        make(assignment.queried_classes),
        None if new is None else make(new.classes),
    )


def noise_on_statistics(
    sources: Sources, encoded: Encoded, assignment: Assignment, experiment: Experiment
) -> SumNoise | None:
    """Return the noise on the sums of a method that takes some; it follows from public numbers."""
    if experiment.privacy.unit == "none" or sources.method.statistics is Method.statistics:
        return None
    images = experiment.privacy.images
    if images is None and not encoded.read.keys() >= {"train", "test"}:
        raise FedVLError(
            "How much noise leaves of sums depends on how many images all clients have together; state about how many with "
            "privacy.images in the experiment."
        )
    return sum_noise(experiment, images or sum(map(len, assignment.clients)))


def public_features(sources: Sources, experiment: Experiment, display: Display, opener: Opener) -> Tensor:
    """Return the features of the server's public images, by way of the feature cache."""
    own = experiment.data.dataset.split("+")
    name = experiment.privacy.public or next(name for name in PUBLIC_SETS if name not in own)
    if isinstance(sources.encoder, ImportedEncoder):
        raise FedVLError(
            f"The vectors of '{sources.encoder.name}' are imported, and public images cannot be encoded; use a larger "
            "epsilon, at which the covariance of the clients' images is released."
        )
    split = opener.dataset(name, None).splits["train"]
    return read_forms(name, split, sources.encoder, ["features"], sources.device, display.stage).forms["features"]


def take_training(
    sources: Sources, encoded: Encoded, assignment: Assignment, experiment: Experiment, method: Method
) -> Training:
    """Take what clients train on: their rows, what is missing of them, and pseudo-labels."""
    device, data = sources.device, experiment.data
    labels, classes = encoded.labels_of("train"), len(sources.dataset.class_names)
    kept, held = hold_out_validation(assignment.clients, experiment)
    counts = np.stack([np.bincount(labels[rows][labels[rows] >= 0], minlength=classes) for rows in kept])
    rows = [torch.from_numpy(client).to(device) for client in kept]
    withdrawn = list(experiment.federation.withdrawn)
    counts[withdrawn] = 0
    left = torch.cat([torch.zeros(0, dtype=torch.long, device=device), *(rows[client] for client in experiment.absent)])
    newcomers = of_newcomers(rows, experiment)
    own = torch.from_numpy(renumbered(labels, assignment.trained_classes)).to(device)
    if "train" not in encoded.read:
        return Training(Samples({}, own), rows, own, counts, assignment.note)
    forms = encoded.read["train"].forms
    units = training_units(sources, encoded, experiment)
    group = Group(units.column, units.most(kept)) if units else None
    numbers = {UNIT: torch.from_numpy(units.numbers).to(device)} if units and data.unit else {}
    samples = Samples({form: forms[form] for form in sources.inputs} | numbers, own)
    if isinstance(sources.encoder, FusedEncoder):
        groups = None if data.missing_by == "all" else assignment.clients  # held-out images miss as much
        whole = data.missing_by == "whole-client"
        inputs = without_modalities(
            samples.inputs, data.missing, "train", sources.encoder, experiment.seed, groups, whole
        )
        samples = Samples(inputs, own)
    if assignment.lists:
        samples = with_class_lists(samples, assignment)
    validation = take_validation(samples, held, experiment)
    if data.label_noise is not None:
        noise, count = LabelNoise.parse(data.label_noise), len(assignment.trained_classes)
        noisy = with_wrong_labels(own.cpu().numpy(), kept, count, noise, experiment.seed)
        samples = Samples(samples.inputs, torch.from_numpy(noisy).to(device))
    if data.labels != "true":
        texts, scale = method.task.text_features, method.task.clip.logit_scale
        rows = without(rows, left)  # they have no say in the labels of others
        rule = LabelRule(data.labels, data.pseudo_shots, data.cpl_alpha, data.cpl_beta)
        samples, rows = relabelled(samples, rows, forms["features"], texts, scale, rule)
    if method.scope == "pooled":
        rows = [torch.cat(rows).sort().values]
    root = left[:0]
    if experiment.federation.robust == "root" or experiment.privacy.subspace is not None:
        root, rows = take_root(rows, len(own), experiment)  # before anyone leaves: the others keep what they had
    (root,) = without([root], left)
    return Training(samples, without(rows, left), own, counts, assignment.note, root, newcomers, validation, group)


def with_class_lists(samples: Samples, assignment: Assignment) -> Samples:
    """Give each training image its client's class list, among which alone its label is learned."""
    known = np.ones((len(samples), len(assignment.trained_classes)), bool)
    for rows, own in zip(assignment.clients, assignment.lists, strict=True):
        known[rows] = np.isin(assignment.trained_classes, own)
    return Samples({**samples.inputs, CLASS_LIST: torch.from_numpy(known).to(samples.labels.device)}, samples.labels)


def take_validation(samples: Samples, held: list[IntArray], experiment: Experiment) -> Validation | None:
    """Take the images that clients have held out, with their true labels."""
    if experiment.evaluation.validation is None:
        return None
    present = [rows[:0] if client in experiment.absent else rows for client, rows in enumerate(held)]
    chosen = samples.take(torch.from_numpy(np.concatenate(present)).to(samples.labels.device))
    if not len(chosen) or bool((chosen.labels < 0).any()):
        raise FedVLError(
            "Validation needs labelled training images, two at least at some client; leave out evaluation.validation."
        )
    if experiment.evaluation.protocol not in BY_CLIENT:
        return Validation(chosen, [])
    places = np.split(np.arange(len(chosen)), np.cumsum([len(rows) for rows in present])[:-1])
    return Validation(chosen, [torch.from_numpy(part).to(chosen.labels.device) for part in places])


def take_test(sources: Sources, encoded: Encoded, assignment: Assignment, experiment: Experiment) -> Test:
    """Take what is queried, and the same under each condition of missing modalities."""
    device = sources.device
    rows, count = assignment.queried, len(encoded.labels_of("test"))
    both = np.concatenate([encoded.labels_of("test"), encoded.labels_of("train")])
    own = torch.from_numpy(renumbered(both[rows], assignment.queried_classes)).to(device)
    if "test" not in encoded.read:
        return Test(Samples({}, own), dict[int, Image.Image]().__getitem__, [], {})  # no row has an image
    samples, conditions = Samples(encoded.inputs(sources.wanted, rows), own), dict[str, Samples]()
    if isinstance(sources.encoder, FusedEncoder):
        specs = conditions_of(experiment.data.missing)
        made = {
            spec: Samples(
                without_modalities(samples.inputs, spec, "test", sources.encoder, experiment.seed), samples.labels
            )
            for spec in set(specs.values())
        }
        conditions = {name: made[spec] for name, spec in specs.items()}
        samples = conditions["as trained"]

    def place_of(row: int) -> tuple[str, int]:
        split, place = ("test", rows[row]) if rows[row] < count else ("train", rows[row] - count)
        return split, int(encoded.read[split].kept[place])

    def picture(row: int) -> Image.Image:
        split, place = place_of(row)
        return sources.dataset.splits[split].read(place)

    def name(row: int) -> str:
        split, place = place_of(row)
        return sources.dataset.splits[split].describe(place)

    def content_sha256(row: int) -> str:
        split, place = place_of(row)
        return hashlib.sha256(sources.dataset.splits[split].content(place)).hexdigest()

    parts = [torch.from_numpy(part).to(device) for part in assignment.parts]
    places = [place_of(row) for row in range(len(rows))]
    identities = [sources.dataset.splits[name].identity for name in sorted({name for name, _ in places})]
    return Test(
        samples,
        picture,
        [part[:0] if client in experiment.absent else part for client, part in enumerate(parts)],
        conditions if experiment.evaluation.protocol == "missing" else {},
        hashlib.sha256(json.dumps([identities, places]).encode()).hexdigest(),
        [
            torch.from_numpy(np.searchsorted(assignment.queried_classes, own)).to(device)
            for own in assignment.candidates
        ],
        None if assignment.new is None else take_queries(sources, encoded, assignment.new),
        of_newcomers(parts, experiment),
        name,
        content_sha256,
    )


def take_queries(sources: Sources, encoded: Encoded, queries: Queries) -> Samples:
    """Take rows of the test split, labelled by their place among the candidates."""
    labels = renumbered(encoded.labels_of("test")[queries.rows], queries.classes)
    return Samples(encoded.inputs(sources.wanted, queries.rows), torch.from_numpy(labels).to(sources.device))
