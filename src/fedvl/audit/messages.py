"""Record the messages of a run: every tensor and number that leaves a client."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedvl.federation.checks import Refusal, Report, sum_of_reports
from fedvl.federation.fixed_point import SumOfUpdates, decode_updates
from fedvl.federation.local import LocalEngine, Summed
from fedvl.federation.stacks import Answers, Trained
from fedvl.federation.statistics import Statistics
from fedvl.methods.base import Update
from fedvl.tensors import ByClient, Tensors

WEIGHT, LOSS, EXAMPLES = "weight in the mean", "training loss", "number of examples"
NUMBERS = (WEIGHT, LOSS, EXAMPLES)
REPORTED, LOW_BITS = "report of ", "low bits of "
BITS = 8  # lowest bits of a 32-bit number, in which a method could hide others

Settlements = Mapping[int | None, Tensors]


class Message(NamedTuple):
    """What one client sent in one round, and what it was handed before."""

    client: int
    round_index: int
    before: Tensors
    update: Update
    loss: float
    report: Tensors  # of the consultation before the round; empty without one
    examples: int = 0


class Round(NamedTuple):
    """What every client sees of a round, and what the server knows of it besides."""

    before: Tensors
    after: Tensors
    weight: float  # of all clients whose updates were merged
    tailored: bool  # whether clients were handed tensors of their own
    total: SumOfUpdates | None = None  # under secure aggregation
    report: Tensors = {}  # sum of the reports
    settlements: Settlements = {}
    statistics: Tensors = {}  # sums of a training-free method's statistics, as the server gets them


class Seen(NamedTuple):
    """What an observer sees in one round that depends on one client's images."""

    client: int
    round_index: int
    before: Tensors
    change: Tensors  # of the shared tensors
    beside: Tensors = {}  # everything else: sent tensors, reports, numbers

    @property
    def items(self) -> Tensors:
        return {**self.change, **self.beside}


def subtract(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> Tensors:
    """Return the changes of the tensors that both have in one shape."""
    return {
        name: after[name].float() - tensor.float()
        for name, tensor in before.items()
        if name in after and after[name].shape == tensor.shape
    }


def seen_in(message: Message) -> Seen:
    """Return everything that a server sees of a message."""
    sent = message.update.tensors
    change = subtract(sent, message.before)
    beside = {name: tensor.float() for name, tensor in sent.items() if name not in change}
    beside |= {f"{REPORTED}{name}": tensor.float() for name, tensor in message.report.items()}
    beside |= numbers(message.update.weight, message.loss, message.examples)
    beside |= {f"{LOW_BITS}{name}": low_bits(tensor) for name, tensor in sent.items() if tensor.dtype == torch.float32}
    return Seen(message.client, message.round_index, message.before, change, beside)


def seen_in_sum(message: Message, happened: Round) -> Seen:
    """Return what a server sees of a message that is part of a secure sum."""
    beside = {f"{REPORTED}{name}": tensor.float() for name, tensor in happened.report.items()}
    if happened.total is not None:
        beside |= numbers(happened.total.weight, happened.total.loss, happened.total.trained)
    beside |= happened.statistics
    change = {} if happened.statistics else subtract(happened.after, happened.before)
    return Seen(message.client, message.round_index, happened.before, change, beside)


def numbers(weight: float, loss: float, examples: float) -> Tensors:
    values = zip(NUMBERS, (weight, loss, examples), strict=True)
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values}


def low_bits(tensor: Tensor) -> Tensor:
    """Return the lowest bits of 32-bit numbers."""
    bits: Tensor = tensor.contiguous().view(torch.int32) & (2**BITS - 1)
    return bits.float()


class Recorder:
    """Keep what the first few clients of an engine send, and what the server answers them."""

    def __init__(self, engine: LocalEngine, clients: int) -> None:
        self.engine, self.most = engine, clients
        self.messages: dict[int, list[Message]] = {}
        self._begin()
        for name in ("train", "sum_updates", "sum_statistics", "reports", "adopt"):
            # on the instance, so that the engine's own calls pass here too
            vars(engine)[name] = partial(getattr(self, f"_{name}"), getattr(engine, name))

    def _begin(self) -> None:
        self.reports: ByClient = {}
        self.report: Tensors = {}
        self.settlements: Settlements = {}
        self.weights: dict[int, float] = {}
        self.total: SumOfUpdates | None = None
        self.tailored = False
        self.statistics: Tensors = {}

    def end_round(self, before: Tensors, after: Tensors) -> Round:
        """Return what was seen of the round, and begin the next."""
        weight = sum(self.weights.values())
        found = Round(before, after, weight, self.tailored, self.total, self.report, self.settlements, self.statistics)
        self._begin()
        return found

    def _train(
        self,
        train: Callable[..., Sequence[Trained]],
        round_index: int,
        cohort: Sequence[int],
        shared: Tensors,
        own: Mapping[int, Tensors] | None = None,
    ) -> Sequence[Trained]:
        answers = Answers.of(train(round_index, cohort, shared, own))
        if not self.engine.federation.sequential:  # else clients train one by one
            self.weights = {}
        self.weights |= zip(answers.clients, answers.weights, strict=True)
        self.tailored = own is not None
        for place, client in enumerate(answers.clients):
            if client in self.messages or len(self.messages) < self.most:
                update, _, loss, examples = answers[place]
                earlier = [m for m in self.messages.get(client, []) if m.round_index != round_index]
                before, report = own[client] if own else shared, self.reports.get(client, {})
                message = Message(client, round_index, before, update, loss, report, examples)
                self.messages[client] = [*earlier, message]
        return answers

    def _sum_updates(
        self, sum_updates: Callable[..., Summed], round_index: int, cohort: Sequence[int], shared: Tensors
    ) -> Summed:
        summed = sum_updates(round_index, cohort, shared)
        self.total = decode_updates(summed.total, shared)
        return summed

    def _sum_statistics(
        self, sum_statistics: Callable[..., Statistics], round_index: int, cohort: Sequence[int], shared: Tensors
    ) -> Statistics:
        found = sum_statistics(round_index, cohort, shared)
        self.statistics = found.total
        for client in filter(self.engine.rows.counts.__getitem__, cohort):
            if client in self.messages or len(self.messages) < self.most:
                sent = Update(client, self.engine.sent_statistics(round_index, client, shared), 0.0)
                earlier = [m for m in self.messages.get(client, []) if m.round_index != round_index]
                self.messages[client] = [*earlier, Message(client, round_index, shared, sent, 0.0, {})]
        return found

    def _reports(
        self, reports: Callable[..., tuple[list[Report], list[Refusal]]], round_index: int, shared: Tensors
    ) -> tuple[list[Report], list[Refusal]]:
        good, refusals = reports(round_index, shared)
        self.reports = {report.client: report.tensors for report in good if report.client is not None}
        self.report = sum_of_reports(good).tensors if good else {}
        return good, refusals

    def _adopt(self, adopt: Callable[[Settlements], None], settlements: Settlements) -> None:
        self.settlements = settlements
        adopt(settlements)
