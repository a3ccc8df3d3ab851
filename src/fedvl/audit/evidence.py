"""What an attacker has: the messages of the first rounds of a run, and images of its own.

The rounds are those of ``fedvl run``: one preparation, one engine, one federation. Beside the
evidence lies the truth (the clients' rows and labels), which attacks read only to measure
themselves.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvl.audit.messages import Message, Recorder, Round, Seen, seen_in, seen_in_sum, subtract
from fedvl.config import Experiment
from fedvl.data.missing import without_modalities
from fedvl.data.protocols import renumbered
from fedvl.data.sources import OPEN_ANEW, Opener
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.federation.records import RoundFigures
from fedvl.federation.round import Federation
from fedvl.methods.base import Method, Samples, overrides
from fedvl.methods.parts.losses import CLASS_LIST
from fedvl.models.vilt import FusedEncoder
from fedvl.runs.experiment import local_engine, make_federation, make_judge, make_validator
from fedvl.runs.preparation import Prepared, Training, prepare
from fedvl.seeding import numpy_generator
from fedvl.tensors import ByClient, Tensors

MAX_OWN, MAX_OUTSIDE = 600, 300  # images of the attacker, and images that nobody trained on
FEW_OWN, FEW_OUTSIDE = 90, 45  # the same for methods that run an encoder in each step
ENOUGH_OUTSIDE = 100  # unused training images, below which test images are taken instead
ENCODED = {"features", "embeddings", "patches", "candidates", CLASS_LIST}  # inputs that are computed once

Made = TypeVar("Made")


@dataclass
class Evidence:
    prepared: Prepared
    slow: bool  # whether each step of training runs an encoder
    own: Samples  # labelled images of the attacker
    outside: Samples  # images of the same kind that nobody trained on and the attacker does not have
    complete: tuple[Samples, Samples]  # both, with all modalities
    own_rows: Tensor  # of the test split
    outside_rows: Tensor
    outside_split: str = "test"
    summed: bool = False  # whether the server sees sums of updates and reports alone
    summands: int | None = None  # clients of a sum; None: all that have images
    messages: list[Message] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    answering: tuple[Tensors, ByClient] = ({}, {})  # the model that users query: shared tensors and last updates
    kept: dict[Hashable, Any] = field(default_factory=dict)  # what several attacks share, such as imitated clients

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what was made under this key; make it if nothing was."""
        if key not in self.kept:
            self.kept[key] = make()
        found: Made = self.kept[key]
        return found

    @property
    def experiment(self) -> Experiment:
        return self.prepared.experiment

    @property
    def method(self) -> Method:
        return self.prepared.method

    @property
    def training(self) -> Training:
        return self.prepared.training

    @property
    def clients(self) -> list[int]:
        """The audited clients."""
        return sorted({message.client for message in self.messages})

    @property
    def classes(self) -> int:
        return len(self.method.task.class_names)

    def rows(self, client: int) -> Tensor:
        return self.training.rows[client]

    def labels(self, rows: Tensor) -> Tensor:
        """Return the true classes of training rows; -1 where the dataset has none."""
        return self.training.true_labels[rows]

    def histogram(self, client: int) -> NDArray[np.float64]:
        """Return the true share of each class among a client's images."""
        return class_shares(self.labels(self.rows(client)), self.classes)

    @property
    def typical_size(self) -> int:
        """The median number of images of the audited clients."""
        return int(np.median([len(self.rows(client)) for client in self.clients]))

    @property
    def what_server_sees(self) -> str:
        return "the mean of all clients' updates" if self.summed else "one client's updates"

    def seen_by_server(self) -> list[Seen]:
        """Return what each client sends or, under secure aggregation, the sum with it."""
        if self.summed:
            return [seen_in_sum(message, self.rounds[message.round_index]) for message in self.messages]
        return [seen_in(message) for message in self.messages]

    def seen_by_client(self) -> list[Seen]:
        """Return the mean change of all but the observer: the next of the audited clients.

        The observer subtracts its own update and is assumed to know the sum of the weights.
        """
        names = [name for name in self.rounds[0].before if self._averaged(name)]
        found = []
        by_round: dict[int, list[Message]] = {}
        for message in self.messages:
            by_round.setdefault(message.round_index, []).append(message)
        for index, messages in by_round.items():
            happened = self.rounds[index]
            for place, message in enumerate(messages):
                observer = messages[(place + 1) % len(messages)]
                rest = happened.weight - observer.update.weight
                if happened.tailored or observer is message or not rest > 0:
                    continue
                own = subtract(observer.update.tensors, happened.before)
                moved = subtract(happened.after, happened.before)
                change = {
                    name: (happened.weight * moved[name] - observer.update.weight * own[name]) / rest for name in names
                }
                found.append(Seen(message.client, index, happened.before, change))
        return found

    def _averaged(self, name: str) -> bool:
        method = self.method
        return method.role.needs(name) == "sum" or not overrides(method, "merge")


def class_shares(labels: Tensor, classes: int) -> NDArray[np.float64]:
    """Return the share of each class; unlabelled images do not count."""
    known = labels.cpu().numpy()
    counts = np.bincount(known[known >= 0], minlength=classes)
    shares: NDArray[np.float64] = counts / max(counts.sum(), 1)
    return shares


def gather(experiment: Experiment, clients: int, rounds: int, display: Display, opener: Opener = OPEN_ANEW) -> Evidence:
    """Prepare a run as ``fedvl run`` does, run its first rounds and keep what is sent."""
    return watch(share_out(prepare(experiment, display, opener)), clients, rounds, display)


def watch(evidence: Evidence, clients: int, rounds: int, display: Display) -> Evidence:
    """Run the first rounds and keep what the first few clients send."""
    prepared = evidence.prepared
    engine = local_engine(prepared)
    federation = make_federation(prepared, engine)
    if not federation.trains or prepared.method.scope == "pooled":
        return evidence
    recorder = Recorder(engine, clients)
    validator = make_validator(prepared, make_judge(prepared, engine))
    # the engine keeps the run's own number of rounds, on which its learning rates depend
    federation.config = only_first(federation, rounds)
    shown = display.stage("Rounds")

    def evaluate(shared: Tensors, last: ByClient, number: int) -> RoundFigures:
        evidence.rounds.append(recorder.end_round(federation.shared, shared))
        evidence.answering = shared, last
        shown(number, federation.config.rounds)
        if validator is None:
            return RoundFigures()
        return RoundFigures(validation=validator.judge(shared, last).figures["accuracy"])

    federation.run(evaluate)
    evidence.messages += [message for kept in recorder.messages.values() for message in kept]
    return evidence


def only_first(federation: Federation, rounds: int) -> Any:
    """Return the settings of the first rounds, in which each client sends its own update."""
    config = federation.config
    return config.model_copy(update={"rounds": min(rounds, config.rounds), "one_step": False})


def share_out(prepared: Prepared) -> Evidence:
    """Share labelled images of the trained classes among the attacker and outside."""
    slow = not ENCODED.issuperset(prepared.training.samples.inputs)
    most_own, most_outside = (FEW_OWN, FEW_OUTSIDE) if slow else (MAX_OWN, MAX_OUTSIDE)
    complete, as_trained = labelled(prepared, "test")
    usable = shuffled(torch.nonzero(complete.labels >= 0)[:, 0])
    classes = len(prepared.method.task.class_names)
    if len(usable) < 2 * classes:
        raise FedVLError(
            f"An audit needs labelled test images of the trained classes, two of each at least, but there are "
            f"{len(usable)} for {classes} classes; add some to the test split."
        )
    unused = unused_rows(prepared, min(most_outside, max(ENOUGH_OUTSIDE, len(usable) // 2)))
    share = min(1.0, len(usable) / (most_own + (0 if len(unused) else most_outside)))
    cut = int(share * most_own)
    own_rows, rest = usable[:cut], usable[cut : cut + int(share * most_outside)]
    split, outside_rows, wholly, outside = "test", rest, complete, as_trained
    if len(unused):
        split, outside_rows = "train", unused
        wholly, outside = labelled(prepared, "train")
    return Evidence(
        prepared,
        slow,
        as_trained.take(own_rows),
        outside.take(outside_rows),
        (complete.take(own_rows), wholly.take(outside_rows)),
        own_rows,
        outside_rows,
        split,
        prepared.experiment.federation.secure_sum,
    )


def shuffled(rows: Tensor) -> Tensor:
    order = numpy_generator(0, "audit").permutation(len(rows))
    return rows[torch.from_numpy(order).to(rows.device)]


def unused_rows(prepared: Prepared, most: int) -> Tensor:
    """Return training images that nobody trains on; none if they are few or lack a class."""
    training = prepared.training
    taken = torch.cat([*training.rows, training.root.to(training.true_labels.device)])
    free = torch.nonzero(training.true_labels >= 0)[:, 0]
    free = shuffled(free[~torch.isin(free, taken)])[:most]
    covered = len(torch.unique(training.true_labels[free])) == len(prepared.method.task.class_names)
    return free if covered and len(free) >= min(ENOUGH_OUTSIDE, most) else free[:0]


def labelled(prepared: Prepared, split: str) -> tuple[Samples, Samples]:
    """Return the images of a split with all modalities, and as clients would train on them."""
    sources, experiment, encoded = prepared.sources, prepared.experiment, prepared.encoded
    classes = len(prepared.method.task.class_names)
    known = torch.from_numpy(renumbered(encoded.labels_of(split), prepared.assignment.trained_classes))
    known = known.to(sources.device)
    inputs = {form: encoded.read[split].forms[form] for form in sources.inputs}
    complete, wanted = Samples(inputs, known), prepared.training.samples.inputs
    if isinstance(sources.encoder, FusedEncoder):
        inputs = without_modalities(inputs, experiment.data.missing, "audit", sources.encoder, experiment.seed)
    if "candidates" in wanted:
        one_hot = torch.nn.functional.one_hot(known.clamp(min=0), classes)
        inputs = {**inputs, "candidates": one_hot.to(wanted["candidates"])}
    if CLASS_LIST in wanted:
        inputs = {**inputs, CLASS_LIST: torch.ones(len(known), classes, dtype=torch.bool, device=known.device)}
    return complete, Samples(inputs, known)


def seen_of_each_client(seen: Sequence[Seen]) -> Iterator[tuple[int, list[Seen]]]:
    """Yield each client with what was seen of it."""
    for client in sorted({each.client for each in seen}):
        yield client, [each for each in seen if each.client == client]
