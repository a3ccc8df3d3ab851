"""What an attacker has: messages of a few clients in the first rounds, and images of its own.

The rounds are those of the run itself: same method, data, settings and seed. Beside the evidence
lies the truth (the clients' rows and labels), which no attack reads but to measure itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvl.config import Experiment
from fedvl.data.missing import without_modalities
from fedvl.data.opener import OPEN_ANEW, Opener
from fedvl.data.protocols import renumbered
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.experiment import noise_on_counts, public_subspace, root_engine
from fedvl.federation.checks import Refusal, Report, sum_of_reports
from fedvl.federation.local import LocalEngine
from fedvl.federation.privacy import privacy_of
from fedvl.federation.round import Federation
from fedvl.federation.stacks import Trained
from fedvl.methods.base import Method, Samples, Update
from fedvl.methods.parts.losses import CLASS_LIST
from fedvl.models.vilt import FusedEncoder
from fedvl.preparation import (
    SPLITS,
    Encoded,
    Sources,
    Training,
    assign,
    encode,
    make_methods,
    open_sources,
    take_training,
)
from fedvl.requirements import check_privacy, check_robust, check_secure_sum
from fedvl.seeding import numpy_generator, torch_generator
from fedvl.tensors import ByClient, Tensors

MOST_OWN, MOST_OUTSIDE = 600, 300  # images of the attacker, and images that nobody trained on
# of methods that run a whole encoder in each step
FEW_OWN, FEW_OUTSIDE = 90, 45


ENCODED = {"features", "embeddings", "patches", "candidates", CLASS_LIST}  # inputs that are computed once


class Message(NamedTuple):
    """What one client sent in one round, and what it was handed before."""

    client: int
    round_index: int
    before: Tensors
    update: Update
    loss: float
    report: Tensors  # of the consultation before the round; empty without one


class Round(NamedTuple):
    """What every client sees of a round: the shared tensors before and after."""

    before: Tensors
    after: Tensors
    weight: float  # of all clients whose updates were merged
    tailored: bool  # whether clients were handed tensors of their own


class Seen(NamedTuple):
    """A change of the shared tensors that says something about one client's images."""

    client: int
    round_index: int
    before: Tensors
    change: Tensors


@dataclass
class Evidence:
    experiment: Experiment
    method: Method
    sources: Sources
    encoded: Encoded
    training: Training
    slow: bool  # whether each step of training runs a whole encoder
    own: Samples  # labelled images of the attacker
    outside: Samples  # images of the same kind that nobody trained on and the attacker does not have
    complete: tuple[Samples, Samples]  # both, with no modality left out
    own_rows: Tensor  # of the test split
    outside_rows: Tensor
    messages: list[Message] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    answering: tuple[Tensors, ByClient] = ({}, {})  # the model that users query: shared tensors and last updates

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
        labels = self.labels(self.rows(client)).cpu().numpy()
        counts = np.bincount(labels[labels >= 0], minlength=self.classes)
        shares: NDArray[np.float64] = counts / max(counts.sum(), 1)
        return shares

    @property
    def typical_size(self) -> int:
        """The median number of images of the audited clients."""
        return int(np.median([len(self.rows(client)) for client in self.clients]))

    @property
    def summed(self) -> bool:
        """Whether the server sees sums of updates and reports alone."""
        return self.experiment.federation.secure_sum

    @property
    def what_server_sees(self) -> str:
        return "the mean of all clients' updates" if self.summed else "one client's updates"

    def seen_by_server(self) -> list[Seen]:
        """Return what each client sends or, with secure sums, the mean of all that says of it."""
        if self.summed:
            means = [(happened.before, subtract(happened.after, happened.before)) for happened in self.rounds]
            return [Seen(m.client, m.round_index, *means[m.round_index]) for m in self.messages]
        return [Seen(m.client, m.round_index, m.before, subtract(m.update.tensors, m.before)) for m in self.messages]

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
        return method.role.needs(name) == "sum" or type(method).merge is Method.merge


def subtract(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> Tensors:
    """Return the changes of the tensors that both have in one shape."""
    return {
        name: after[name].float() - tensor.float()
        for name, tensor in before.items()
        if name in after and after[name].shape == tensor.shape
    }


class Watched(LocalEngine):
    """The engine of the run; it keeps what the first few clients send."""

    def __init__(self, limit: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.limit = limit
        self.kept: dict[int, list[Message]] = {}
        self.reported: dict[int, Tensors] = {}
        self.weight, self.tailored = 0.0, False

    def train(
        self, round_index: int, cohort: Sequence[int], shared: Tensors, own: Mapping[int, Tensors] | None = None
    ) -> Sequence[Trained]:
        trained = super().train(round_index, cohort, shared, own)
        self.weight, self.tailored = sum(result.update.weight for result in trained), own is not None
        for update, _, loss, _ in trained:
            if update.client in self.kept or len(self.kept) < self.limit:
                before = own[update.client] if own else shared
                report = self.reported.get(update.client, {})
                kept = [m for m in self.kept.get(update.client, []) if m.round_index != round_index]
                self.kept[update.client] = [*kept, Message(update.client, round_index, before, update, loss, report)]
        self.reported = {}
        return trained

    def reports(self, round_index: int, shared: Tensors) -> tuple[list[Report], list[Refusal]]:
        """Keep what the server receives: each client's report, or their sum alone."""
        good, refusals = super().reports(round_index, shared)
        total = sum_of_reports(good).tensors if good else {}
        for report in good:
            if report.client is not None and (report.client in self.kept or len(self.reported) < self.limit):
                self.reported[report.client] = total if self.federation.secure_sum else report.tensors
        return good, refusals


def gather(experiment: Experiment, clients: int, rounds: int, display: Display, opener: Opener = OPEN_ANEW) -> Evidence:
    """Prepare a run, run its first rounds and keep what is sent."""
    return watch(prepare_evidence(experiment, display, opener), clients, rounds, display)


def watch(evidence: Evidence, clients: int, rounds: int, display: Display) -> Evidence:
    """Run the first rounds and keep what the first few clients send."""
    experiment, training, method = evidence.experiment, evidence.training, evidence.method
    engine = Watched(
        clients,
        method,
        training.samples,
        training.rows,
        experiment.training,
        experiment.federation,
        experiment.seed,
        experiment.privacy,
    )
    # the engine keeps the run's own number of rounds, on which its learning rates depend
    config = experiment.federation.model_copy(update={"rounds": min(rounds, experiment.federation.rounds)})
    start = method.start(torch_generator(experiment.seed, "start"))
    subspace, counts = public_subspace(experiment, method, start, training), noise_on_counts(experiment, method, start)
    privacy = privacy_of(experiment, experiment.seed, subspace, counts)
    root = root_engine(experiment, method, training)
    federation = Federation(method, engine, config, experiment.seed, start, root=root, privacy=privacy)
    if not federation.trains or method.scope == "pooled":
        return evidence
    shown = display.stage("Rounds")
    before = start

    def evaluate(shared: Tensors, last: ByClient, number: int) -> dict[str, Any]:
        nonlocal before
        evidence.rounds.append(Round(before, shared, engine.weight, engine.tailored))
        before, evidence.answering = shared, (shared, last)
        shown(number, config.rounds)
        return {}

    federation.run(evaluate, lambda record: None)
    evidence.messages += [message for kept in engine.kept.values() for message in kept]
    return evidence


def prepare_evidence(experiment: Experiment, display: Display, opener: Opener) -> Evidence:
    """Prepare the run, and share the test images of its classes among attacker and outside."""
    sources = open_sources(experiment, opener)
    encoded = encode(sources, experiment, SPLITS, display)
    assignment = assign(sources, encoded, experiment)
    method, *_ = make_methods(sources, encoded, assignment, experiment, display)
    for check in (check_secure_sum, check_robust, check_privacy):
        check(method, experiment)
    training = take_training(sources, encoded, assignment, experiment, method)
    labels = renumbered(encoded.labels_of("test"), assignment.trained_classes)
    usable = numpy_generator(0, "audit").permutation(np.flatnonzero(labels >= 0))
    if len(usable) < 2 * len(method.task.class_names):
        raise FedVLError(
            f"An audit needs labelled test images of the trained classes, two of each at least, but there are "
            f"{len(usable)} for {len(method.task.class_names)} classes; add some to the test split."
        )
    inputs = {form: encoded.read["test"].forms[form] for form in sources.inputs}
    known = torch.from_numpy(labels).to(sources.device)
    complete = Samples(inputs, known)
    if isinstance(sources.encoder, FusedEncoder):
        inputs = without_modalities(inputs, experiment.data.missing, "audit", sources.encoder, experiment.seed)
    if "candidates" in training.samples.inputs:
        one_hot = torch.nn.functional.one_hot(known.clamp(min=0), len(method.task.class_names))
        inputs["candidates"] = one_hot.to(training.samples.inputs["candidates"])
    if CLASS_LIST in training.samples.inputs:
        inputs[CLASS_LIST] = torch.ones(len(known), len(method.task.class_names), dtype=torch.bool, device=known.device)
    slow = not ENCODED.issuperset(training.samples.inputs)
    limits = (FEW_OWN, FEW_OUTSIDE) if slow else (MOST_OWN, MOST_OUTSIDE)
    share = min(1.0, len(usable) / sum(limits))
    rows = torch.from_numpy(usable[: int(share * sum(limits))]).to(sources.device)
    cut = int(share * limits[0])
    own, outside = (Samples(inputs, known).take(part) for part in (rows[:cut], rows[cut:]))
    whole = (complete.take(rows[:cut]), complete.take(rows[cut:]))
    return Evidence(experiment, method, sources, encoded, training, slow, own, outside, whole, rows[:cut], rows[cut:])


def begun_alike(evidence: Evidence, seen: Sequence[Seen]) -> Iterator[tuple[int, Tensors, list[Seen]]]:
    """Yield the rounds, each with what clients began with, and the changes that began so.

    A client that was handed tensors of its own is yielded by itself.
    """
    for index in sorted({each.round_index for each in seen}):
        before = evidence.rounds[index].before
        changes = [each for each in seen if each.round_index == index]
        alike = [each for each in changes if all(torch.equal(each.before[name], before[name]) for name in each.change)]
        if alike:
            yield index, before, alike
        for each in changes:
            if not any(each is other for other in alike):
                yield index, each.before, [each]


def by_client(seen: Sequence[Seen]) -> Iterator[tuple[int, list[Seen]]]:
    """Yield each client with what was seen of it."""
    for client in sorted({each.client for each in seen}):
        yield client, [each for each in seen if each.client == client]
