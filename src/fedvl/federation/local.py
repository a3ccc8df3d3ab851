"""The clients of one process: whom a round trains, what they send, and what they keep."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedvl.errors import FedVLError
from fedvl.federation.checks import Refusal, Report, foreign, misshapen, sound_reports, sum_of_reports
from fedvl.federation.chunks import LABELS, Chunk, Done, add_columns, share_out_to_chunks
from fedvl.federation.count_noise import check_report, count_noise
from fedvl.federation.fixed_point import (
    SUMMED_FIGURES,
    decode_reports,
    encode_report,
    encode_update,
    flat_statistics,
    from_whole,
    no_report,
    no_update,
    sum_of_parts,
    to_whole,
    unflat_statistics,
    with_same_figures,
)
from fedvl.federation.privacy import ClientPrivacy
from fedvl.federation.private_tensors import PrivateTensors
from fedvl.federation.stacks import (
    Answers,
    Column,
    Folded,
    Stack,
    Trained,
    Updates,
    in_turn,
    order_of_mean,
    stacks_of,
)
from fedvl.federation.statistics import Statistics, clipped_statistics, statistics_over, sum_of_statistics
from fedvl.federation.statistics_privacy import StatisticsPrivacy, statistics_privacy
from fedvl.federation.steps import first, first_batch
from fedvl.federation.training import ChunkTraining
from fedvl.methods.base import Batch, Samples, overrides
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors, count_bytes, count_elements, placed

MAX_FIRST = 4096  # clients whose first private tensors are made in one kernel


class Summed(NamedTuple):
    """What a round leaves where the server learns only the sum, in whole numbers."""

    total: Tensor
    clients: list[int]  # whose numbers are in it
    trained: list[Trained]  # what stays with them
    bytes_up: int


class ChunkSpread(Protocol):
    """What trains the chunks of a round in several processes."""

    def train(self, round_index: int, chunks: Sequence[Chunk], engine: "LocalEngine") -> list[Done]: ...


class LocalEngine(ChunkTraining):
    """The clients of one process: their rows of the data and their private tensors."""

    processes: ChunkSpread | None = None  # where there are several, started by torchrun
    known: Statistics | None = None  # sums that follow from those of another run

    @cached_property
    def private(self) -> PrivateTensors:
        return PrivateTensors()

    @cached_property
    def shared_noise(self) -> ClientPrivacy | None:
        """The noise of which each client adds a share, where the server learns only a sum."""
        if not (self.privacy.unit == "client" and self.federation.secure_sum):
            return None
        everybody, federation = self.method.task.clients, self.federation
        counts = count_noise(self.method, self.start, federation.rounds, federation.least_clients)
        return ClientPrivacy(self.privacy, federation.rounds, everybody, everybody, self.seed, counts=counts)

    @cached_property
    def statistics_noise(self) -> StatisticsPrivacy | None:
        """The noise on statistics, of clients or of the server."""
        return statistics_privacy(self.method, self.privacy, self.federation)

    @cached_property
    def _joins(self) -> bool:
        """Whether the method keeps something with a client, until it is seen to keep nothing."""
        return overrides(self.method, "join")

    @property
    def clients(self) -> int:
        return len(self.rows)

    def train(
        self, round_index: int, cohort: Sequence[int], shared: Tensors, own: Mapping[int, Tensors] | None = None
    ) -> Sequence[Trained]:
        """Train the clients that have data, from the shared tensors or each from its ``own``."""
        return self._trained(round_index, cohort, shared, own)

    def _trained(
        self, round_index: int, cohort: Sequence[int], shared: Tensors, own: Mapping[int, Tensors] | None = None
    ) -> Answers:
        for handed in own.values() if own else [shared]:
            self.check_received(handed)
        chunks = self._chunks(cohort, shared, own)
        summed = [name for name in shared if self.method.role.needs(name) == "sum"]
        folds = own is None and self._can_fold(chunks)

        def again(some: list[int]) -> Updates:
            return Updates.of(self._trained(round_index, some, shared).updates)

        clients = sum(len(chunk.clients) for chunk in chunks)
        folded = {name: Folded(shared[name], clients) for name in summed if folds}
        return self._cohort(round_index, cohort, chunks, folded, again)

    def _chunks(self, cohort: Sequence[int], shared: Tensors, own: Mapping[int, Tensors] | None) -> list[Chunk]:
        with_data = list(filter(self.rows.counts.__getitem__, cohort))
        stacks = self._begun(with_data, shared, own)
        return share_out_to_chunks(stacks, self.rows, self.method.role, self.chunk, shared, own)

    def _can_fold(self, chunks: Sequence[Chunk]) -> bool:
        """Whether updates may be summed chunk by chunk, of which a cohort takes no more memory.

        Nothing but checks and the mean may look at them; clients must train in the mean's order.
        """
        config = self.federation
        looked_at = config.attack or config.drift or config.secure_sum or self.privacy.unit == "client"
        if len(chunks) < 2 or looked_at or config.robust != "mean":
            return False
        clients = [client for chunk in chunks for client in chunk.clients]
        return in_turn(order_of_mean(clients, [weight for chunk in chunks for weight in self._weights(chunk)]))

    def _weights(self, chunk: Chunk) -> list[float]:
        return [1.0] * len(chunk.clients) if self._alike else list(map(float, chunk.used))

    @property
    def _alike(self) -> bool:
        """Whether all weigh the same: nobody need know then how many examples a client has."""
        return self.method.weighting == "clients" or self.privacy.unit == "client"

    def _cohort(
        self,
        round_index: int,
        cohort: Sequence[int],
        chunks: Sequence[Chunk],
        folded: Mapping[str, Folded],
        again: Callable[[list[int]], Updates],
    ) -> Answers:
        """Train the chunks; put what they leave into the order of clients."""
        self._steps_done, self._steps_planned = 0, sum(self._steps(chunk.used[0]) for chunk in chunks)
        if self.processes and chunks:
            results: Iterable[Done] = self.processes.train(round_index, chunks, self)
        else:
            results = self.train_chunks(round_index, chunks, len(chunks) > 1)
        trained = set[int]().union(*(chunk.clients for chunk in chunks))
        clients = list(filter(trained.__contains__, cohort))
        place = dict(zip(clients, range(len(clients)), strict=True))
        sent: dict[str, Column | Folded] = {**folded}
        weights = torch.zeros(len(clients), dtype=torch.float64)
        # there until all are trained: what is read of a GPU waits for it
        losses = torch.zeros_like(weights, device=self.data.labels.device)
        stacks: list[Stack] = []
        for chunk, done in zip(chunks, results, strict=True):
            rows = torch.tensor(list(map(place.__getitem__, done.clients)))
            own = torch.tensor(self._weights(chunk), dtype=torch.float64)
            add_columns(sent, done.sent, rows, own, len(clients))
            weights[rows], losses[rows.to(losses.device)] = own, done.losses
            stacks += done.private
        examples = [1] * len(clients) if self._alike else list(map(self.rows.counts.__getitem__, clients))
        told = losses.tolist() if self.privacy.unit == "none" else [0.0] * len(clients)
        return Answers(Updates(clients, sent, weights.tolist(), again), stacks, told, examples)

    def check_received(self, tensors: Tensors) -> None:
        """Refuse what the method does not declare: a server could name private tensors."""
        if reason := foreign(tensors, self.start, self.method.role):
            raise FedVLError(f"What the server sent is refused: {reason}.")

    def keep(self, trained: Sequence[Trained]) -> None:
        """Adopt the private tensors of clients whose round was committed."""
        for stack in Answers.of(trained).private:
            self.private.put(stack)

    def refused(self) -> list[Refusal]:
        """Return the messages that could not be read: none, since nothing travels."""
        return []

    def sum_updates(self, round_index: int, cohort: Sequence[int], shared: Tensors) -> Summed:
        """Train as :meth:`train` does; return the sum that a server learns, and what stays here."""
        trained = {result.update.client: result for result in self.train(round_index, cohort, shared)}
        parts = [self.part_of_sum(round_index, client, shared, trained.get(client)) for client in cohort]
        total = sum_of_parts(parts, self.federation.least_clients)
        return Summed(total, list(cohort), list(trained.values()), sum(part.nbytes for part in parts))

    def part_of_sum(self, round_index: int, client: int, shared: Tensors, trained: Trained | None) -> Tensor:
        """Return one client's part of a sum of updates, with its share of the noise."""
        part, everybody = no_update(shared), self.method.task.clients
        if trained is not None:
            update = trained.update
            part = encode_update(update.tensors, shared, update.weight, trained.loss, everybody)
        if self.shared_noise is None:
            return part
        # who has nothing to train on adds its share too, and the same figures: noise covers the moves alone
        least, numbers = self.federation.least_clients, count_elements(shared)
        noise = self.shared_noise.share(numbers, least, self.private_seed, round_index, client)
        return with_same_figures(part, everybody) + pad(to_whole(noise, everybody), (0, SUMMED_FIGURES))

    def sum_statistics(self, round_index: int, cohort: Sequence[int], shared: Tensors) -> Statistics:
        """Return the sums of the clients' statistics, or those that are known already.

        They are computed over all samples together, in the order of the data, where nothing needs a
        single client's: the partition then changes no bit.
        """
        if self.known is not None:
            return self.known
        self.check_received(shared)
        role, device, noise = self.method.role, self.data.labels.device, self.statistics_noise
        if self.federation.secure_sum:
            parts = (
                self.part_of_statistics(round_index, client, self.statistics_of(round_index, client, shared))
                for client in cohort
            )
            total = sum_of_parts(parts, self.federation.least_clients)
            sums = placed(unflat_statistics(from_whole(total), role.statistics_shapes), device)
            return Statistics(sums, list(cohort), len(cohort) * total.nbytes)
        clients = list(filter(self.rows.counts.__getitem__, cohort))
        if self.federation.one_by_one or noise:
            each = {client: self.sent_statistics(round_index, client, shared) for client in clients}
            return sum_of_statistics(each, role.statistics_shapes, device, noise.clip if noise else None)[0]
        rows = torch.cat([self.rows.samples[:0], *map(self.rows.__getitem__, clients)]).sort().values
        found = statistics_over(self.method, self.data, rows, shared)
        return Statistics(found, clients, len(clients) * count_bytes(found))

    def statistics_of(self, round_index: int, client: int, shared: Tensors) -> Tensors:
        """Return the statistics of a client's samples."""
        return statistics_over(self.method, self.data, self.rows[client], shared)

    def sent_statistics(self, round_index: int, client: int, shared: Tensors) -> Tensors:
        """Return what a client sends by itself: with noise, unless the server adds it."""
        noise, statistics = self.statistics_noise, self.statistics_of(round_index, client, shared)
        if noise is None or noise.by_server:
            return statistics
        return noise.noised(statistics, self.private_seed, round_index, client)

    def personalise(self, shared: Tensors) -> None:
        """Let each client make of a solution what it keeps for itself, if the method says what."""
        ends = self.method.role.ends(shared)
        for client in self._with_data() if ends else ():
            samples = self.data.take(self.rows[client])
            with torch.no_grad():
                self.private[client] = {name: make(name, shared, shared, samples) for name, make in ends.items()}

    def part_of_statistics(self, round_index: int, client: int, statistics: Tensors) -> Tensor:
        """Return one client's part of a secure sum of statistics, with its share of the noise."""
        if noise := self.statistics_noise:
            statistics = noise.noised(
                clipped_statistics(statistics, noise.clip), self.private_seed, round_index, client
            )
        return to_whole(flat_statistics(statistics), self.method.task.clients)

    def report(self, round_index: int, shared: Tensors) -> tuple[list[Report], list[Refusal]]:
        """Collect the reports of all clients that have data, or their sum if that is enough."""
        consultation = self.method.consultation()
        assert consultation is not None
        good, refusals = self.reports(round_index, shared)
        if good and self.federation.secure_sum:
            sent = {report.client: report.tensors for report in good}
            parts = [self.part_of_report(round_index, client, sent.get(client)) for client in range(self.clients)]
            total = sum_of_parts(parts, self.federation.least_clients)
            return [Report(None, decode_reports(total, consultation.report_shapes))], refusals
        return [sum_of_reports(good)] if good and consultation.summed else good, refusals

    def part_of_report(self, round_index: int, client: int, report: Tensors | None) -> Tensor:
        """Return one client's part of a sum of reports, with its share of the noise."""
        consultation, everybody = self.method.consultation(), self.method.task.clients
        assert consultation is not None
        part = no_report(consultation.report_shapes) if report is None else encode_report(report, everybody)
        if self.shared_noise is None:
            return part
        noise = self.shared_noise.share_of_counts(len(part), self.private_seed, round_index, client)
        return part + to_whole(noise, everybody)

    def reports(self, round_index: int, shared: Tensors) -> tuple[list[Report], list[Refusal]]:
        """Collect the report of each client that has data."""
        consultation, reports = self.method.consultation(), []
        assert consultation is not None
        self.check_received(shared)
        for client in self._with_data():
            tensors = self.private_of(client)
            with torch.no_grad():
                sent, changed = consultation.report(
                    round_index, {**shared, **tensors}, self.data.take(self.rows[client])
                )
            if self.privacy.unit == "client" and consultation.sensitivity is not None:
                check_report(sent, consultation.sensitivity)
            self.private[client] = {**tensors, **changed}
            reports.append(Report(client, sent))
        return sound_reports(reports, consultation.report_shapes)

    def adopt(self, settlements: Mapping[int | None, Tensors]) -> None:
        """Give each client the server's answer: its own, or the one under None."""
        consultation = self.method.consultation()
        assert consultation is not None
        for client in self._with_data():
            answer = settlements.get(client, settlements.get(None))
            if answer is not None:
                if reason := misshapen(answer, consultation.settlement_shapes):
                    raise FedVLError(f"What the server sent is refused: {reason}.")
                private = self.private_of(client)
                self.private[client] = {**private, **consultation.adopt(private, answer)}

    def private_of(self, client: int) -> Tensors:
        """Return a client's private tensors; before its first round, those it would begin with."""
        kept = self.private.get(client, {})
        if (kept and not self.method.role.renews_private) or not self.rows.counts[client]:
            return kept
        if not self._joins and not self.method.role.firsts:
            return kept
        generator = torch_generator(self.private_seed, "join", client)
        with torch.no_grad():
            drawn = self.method.first_private(self.data.take(self.rows[client]), generator)
        joined = placed(drawn, self.data.labels.device)
        # a method that keeps nothing is not asked again: that copies a client's data
        self._joins = self._joins and joined.keys() != self.method.role.firsts.keys()
        return {**joined, **kept}

    def begun(self, client: int, received: Tensors) -> Tensors:
        """Return the private tensors that a client's training begins with."""
        private, role = self.private_of(client), self.method.role
        if not role.has_begins or not self.rows.counts[client]:
            return private
        tensors, samples = {**private, **received}, self.data.take(self.rows[client])
        begins = role.begins(private)
        with torch.no_grad():
            return {**private, **{name: make(name, tensors, received, samples) for name, make in begins.items()}}

    def _begun(self, clients: list[int], shared: Tensors, own: Mapping[int, Tensors] | None) -> list[Stack]:
        """Return the private tensors that training begins with, of clients that have data."""
        role = self.method.role
        if self._joins or role.has_begins or role.renews_private:
            return stacks_of((client, self.begun(client, own[client] if own else shared)) for client in clients)
        new = [client for client in clients if client not in self.private] if self.private else clients
        return [*self.private.stacks(clients), *(self._first_stacks(new) if role.firsts else [Stack(new, {})])]

    def _first_stacks(self, clients: list[int]) -> list[Stack]:
        """Make the first private tensors of clients, all of a size in one kernel."""
        by_size: dict[int, list[int]] = {}
        for client in clients:
            by_size.setdefault(self.rows.counts[client], []).append(client)
        return [Stack(members, self._first(members)) for members in by_size.values()]

    def _first(self, clients: list[int]) -> Tensors:
        """Make the first private tensors of clients of the same size, stacked."""
        firsts, size = self.method.role.firsts, self.rows.counts[clients[0]]
        numbers = torch.tensor(clients, device=self.data.labels.device)

        def make(inputs: Tensors, labels: Tensor) -> Tensors:
            return {name: first(Samples(inputs, labels)) for name, first in firsts.items()}

        parts = []
        with torch.no_grad():
            for some in torch.split(numbers, MAX_FIRST):
                samples = self.data.take(self.rows.padded(some, size))
                parts.append(torch.func.vmap(make)(samples.inputs, samples.labels))
        return {name: torch.cat([part[name] for part in parts]) for name in firsts}

    def local_flops(self, shared: Tensors) -> int:
        """Count the largest client's operations in a round: its first step, times steps."""
        if self.method.role.statistics:
            return self._statistics_flops(shared)
        used = {client: self._used(client, self.begun(client, shared)) for client in self._with_data()}
        if not used:
            return 0
        largest = max(used, key=lambda client: used[client])
        return self._step_flops(largest, shared) * self._steps(used[largest])

    def first_step(self, client: int, handed: Tensors) -> tuple[Tensors, Batch] | None:
        """Return all tensors and the batch of a client's first step; None if it takes none."""
        given: list[tuple[Tensors, Batch]] = []

        def record(moving: Tensors, still: Tensors, batch: Batch) -> tuple[Tensors, tuple[Tensor, Tensors]]:
            given.append((first({**moving, **still}), first_batch(batch, same=True)))
            return {name: torch.zeros_like(tensor) for name, tensor in moving.items()}, (batch.mask.new_zeros(1), {})

        for chunk in self._chunks([client], handed, None):
            self.train_chunk(0, chunk, 1, record)
        return given[0] if given else None

    def _step_flops(self, client: int, handed: Tensors) -> int:
        """Count the operations of a client's first step."""
        from fedvl.federation.steps import Operations  # of use once in a run

        plain = self._gradient_step(same=True, replay=False)
        with Operations() as counted:
            for chunk in self._chunks([client], handed, None):
                self.train_chunk(0, chunk, 1, plain)
        return int(counted.total)

    def _statistics_flops(self, shared: Tensors) -> int:
        """Count the operations of the largest client's statistics."""
        from fedvl.federation.steps import Operations  # of use once in a run

        largest = max(range(self.clients), key=self.rows.counts.__getitem__)
        with Operations() as counted:
            self.statistics_of(0, largest, shared)
        return int(counted.total)

    def _used(self, client: int, private: Tensors) -> int:
        """Return how many samples a client trains on."""
        return int((private[LABELS] >= 0).sum()) if LABELS in private else self.rows.counts[client]

    def _with_data(self) -> list[int]:
        return [client for client, size in enumerate(self.rows.counts) if size]
