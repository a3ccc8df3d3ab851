"""Local training of many clients in one process: all clients of a chunk move in one kernel.

Clients are rows of stacked tensors. A client with fewer samples is padded and masked; one with
fewer batches stops earlier: clients are sorted by their number of batches, so those still moving
are a prefix, and a prefix of a tensor is a view.
"""

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from fedvl.config import FederationConfig, PrivacyConfig, TrainingConfig
from fedvl.draws import keys_of
from fedvl.errors import FedVLError
from fedvl.federation.checks import Refusal, Report, foreign, misshapen, sound_reports, sum_of_reports
from fedvl.federation.fixed_point import (
    FIGURES,
    decode_reports,
    encode_report,
    encode_update,
    no_report,
    no_update,
    rounding_error,
    sum_of,
    to_whole,
)
from fedvl.federation.optimisers import Optimiser
from fedvl.federation.orders import Orders, draw_orders, draw_private_orders, rates_of_steps
from fedvl.federation.privacy import ClientPrivacy, RecordPrivacy, clipped
from fedvl.federation.private_tensors import PrivateTensors
from fedvl.federation.stacks import (
    Answers,
    Cohort,
    Folded,
    Held,
    Rows,
    Shelf,
    Trained,
    Updates,
    columns_of,
    in_turn,
    order_of_mean,
    shelved,
)
from fedvl.federation.steps import GradientStep, gradient_step, prefix
from fedvl.federation.threads import side_by_side, with_fitting_threads
from fedvl.methods.base import Batch, Method, Samples
from fedvl.seeding import derived_seed, torch_generator
from fedvl.tensors import Tensors, count_bytes, count_elements, placed

Integers = NDArray[np.int64]
Places = Integers  # client, samples it trains on, number of its shelf, row in it: one column each

LABELS = "labels"  # the private tensor that replaces a client's labels; -1: not trained on
MOST_FIRST = 4096  # clients whose first private tensors are made in one kernel
WORKING_SET = {"cpu": 2**26, "cuda": 2**31}  # bytes that the clients of a chunk may take, if their number is not set
COPIES = 6  # of what a client trains: as it began, as it is, gradient, momentum, what is sent
LIGHT_INPUTS = frozenset({"features", "embeddings", "candidates", "class_list"})  # with which a step holds little else
LEAST_CHUNK, MOST_CHUNK = 10, 4096


class Summed(NamedTuple):
    """What a round leaves where the server learns only the sum, in whole numbers."""

    total: Tensor
    clients: list[int]  # whose numbers are in it
    trained: list[Trained]  # what stays with them
    bytes_up: int


class Chunk(NamedTuple):
    """Clients that train in one kernel, who has most to train on first."""

    clients: list[int]
    used: list[int]  # samples that each trains on
    private: Tensors  # stacked; with a row per sample, padded to one more than the largest client has
    begins: Sequence[Tensors]  # one state for all, or each client's own


class Done(NamedTuple):
    """What training leaves of a chunk, in its order of clients."""

    clients: list[int]
    sent: dict[str, Held]
    private: list[Shelf]
    losses: Tensor


class Spread(Protocol):
    """What trains the chunks of a round in several processes."""

    def train(self, round_index: int, chunks: Sequence[Chunk], engine: "LocalEngine") -> list[Done]: ...


class LocalEngine:
    """The clients of one process: their rows of the data and their private tensors."""

    def __init__(
        self,
        method: Method,
        data: Samples,
        rows: Sequence[Tensor],
        training: TrainingConfig,
        federation: FederationConfig,
        seed: int,
        privacy: PrivacyConfig | None = None,
    ) -> None:
        self.method = method
        self.data = data
        self.rows = Rows.of(rows)
        self.training = training
        self.federation = federation
        self.seed = seed
        self.private_seed = seed  # of what clients draw for themselves; a party has one that nobody else knows
        self.privacy = privacy or PrivacyConfig()
        hides_images = self.privacy.unit == "record"
        self.hidden = RecordPrivacy(self.privacy, training, federation.rounds) if hides_images else None
        everybody, shares = method.task.clients, self.privacy.unit == "client" and federation.secure_sum
        self.shared_noise = (
            ClientPrivacy(self.privacy, federation.rounds, everybody, everybody, seed) if shares else None
        )
        self.private: PrivateTensors = PrivateTensors()
        self._gradient_steps = {same: self._gradient_step(same, replay=True) for same in (True, False)}
        self.progress: Callable[[int, int], None] = lambda done, total: None  # steps of a round
        self._steps_done = self._steps_planned = 0
        self._advancing = Lock()  # by several threads
        self.processes: Spread | None = None  # where there are several, started by torchrun
        self._joins = type(method).join is not Method.join  # until the method is seen to keep nothing with a client
        keep_freed_memory()

    def _gradient_step(self, same: bool, replay: bool) -> GradientStep:
        device = self.data.labels.device.type
        return gradient_step(self.method, self.training, self.federation, self.hidden, device, same, replay)

    @property
    def clients(self) -> int:
        return len(self.rows)

    @property
    def sizes(self) -> list[int]:
        return self.rows.counts

    def train(
        self, round_index: int, cohort: Sequence[int], shared: Tensors, own: Mapping[int, Tensors] | None = None
    ) -> Sequence[Trained]:
        """Train the clients that have data, from the shared tensors or each from its ``own``."""
        return self._trained(round_index, cohort, shared, own)

    def _trained(
        self, round_index: int, cohort: Sequence[int], shared: Tensors, own: Mapping[int, Tensors] | None = None
    ) -> Cohort:
        chunks = self._chunks(cohort, shared, own)
        summed = [name for name in shared if self.method.role.needs(name) == "sum"]
        folds = own is None and self._can_fold(chunks)

        def again(some: list[int]) -> Updates:
            return self._trained(round_index, some, shared).stack

        clients = sum(len(chunk.clients) for chunk in chunks)
        folded = {name: Folded(shared[name], clients) for name in summed if folds}
        return self._cohort(round_index, cohort, chunks, folded, again)

    def _can_fold(self, chunks: Sequence[Chunk]) -> bool:
        """Whether updates may be summed chunk by chunk, of which a cohort takes no more memory.

        Nothing but checks and the mean may look at them, and clients must train in the mean's order.
        """
        config = self.federation
        looked_at = config.attack or config.drift or config.secure_sum or self.privacy.unit == "client"
        if len(chunks) < 2 or looked_at or config.robust != "mean":
            return False
        clients = [client for chunk in chunks for client in chunk.clients]
        return in_turn(order_of_mean(clients, [weight for chunk in chunks for weight in self._weights(chunk)]))

    def _weights(self, chunk: Chunk) -> list[float]:
        return [1.0] * len(chunk.clients) if self._alike else [float(used) for used in chunk.used]

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
    ) -> Cohort:
        """Train the chunks; put what they leave into the order of clients."""
        self._steps_done, self._steps_planned = 0, sum(self._steps(chunk.used[0]) for chunk in chunks)
        if self.processes and chunks:
            results: Iterable[Done] = self.processes.train(round_index, chunks, self)
        else:
            results = self.train_chunks(round_index, chunks, len(chunks) > 1)
        trained = {client for chunk in chunks for client in chunk.clients}
        clients = [client for client in cohort if client in trained]
        place = {client: number for number, client in enumerate(clients)}
        sent: dict[str, Held | Folded] = {**folded}
        weights = torch.zeros(len(clients), dtype=torch.float64)
        # there until all are trained: what is read of a GPU waits for it
        losses = torch.zeros_like(weights, device=self.data.labels.device)
        shelves: list[Shelf] = []
        for chunk, done in zip(chunks, results, strict=True):
            rows = torch.tensor([place[client] for client in done.clients])
            own = torch.tensor(self._weights(chunk), dtype=torch.float64)
            add_columns(sent, done.sent, rows, own, len(clients))
            weights[rows], losses[rows.to(losses.device)] = own, done.losses
            shelves += done.private
        examples = [1] * len(clients) if self._alike else [self.rows.counts[client] for client in clients]
        told = losses.tolist() if self.privacy.unit == "none" else [0.0] * len(clients)
        return Cohort(Updates(clients, sent, weights.tolist(), again), shelves, told, examples)

    def _chunks(self, cohort: Sequence[int], shared: Tensors, own: Mapping[int, Tensors] | None) -> list[Chunk]:
        """Share clients that have data out to chunks: those of one have tensors of the same shapes."""
        for handed in own.values() if own else [shared]:
            self.check_received(handed)
        shelves = self._begun([client for client in cohort if self.rows.counts[client]], shared, own)
        groups: dict[object, list[Places]] = {}
        for number, shelf in enumerate(shelves):
            for shapes, places in self._places(number, shelf, own):
                groups.setdefault(shapes, []).append(places)
        chunks = []
        for group in groups.values():
            found = np.concatenate(group, axis=1)
            client, used, number, row = found[:, np.lexsort((found[0], -found[1]))]
            for first in range(0, len(client), self.chunk):
                some = slice(first, first + self.chunk)
                members = client[some].tolist()
                private = self._stacked_private(members, number[some], row[some], shelves)
                begins = [own[member] for member in members] if own else [shared]
                chunks.append(Chunk(members, used[some].tolist(), private, begins))
        return chunks

    def _places(self, number: int, shelf: Shelf, own: Mapping[int, Tensors] | None) -> Iterable[tuple[object, Places]]:
        """Return the places of clients that have samples, by the shapes of their tensors."""
        per_sample = self.method.role.per_sample
        shapes = frozenset((name, t.shape[1:]) for name, t in shelf.tensors.items() if name not in per_sample)
        clients = np.array(shelf.clients, dtype=np.int64)
        used = self.rows.sizes_known[clients]
        if LABELS in shelf.tensors:
            used = (shelf.tensors[LABELS] >= 0).sum(1).cpu().numpy()
        places = np.stack([clients, used, np.full_like(clients, number), np.arange(len(clients))])[:, used > 0]
        if own is None:
            return [(shapes, places)] if places.size else []
        handed = [frozenset((name, tensor.shape) for name, tensor in own[client].items()) for client in places[0]]
        return [((shapes, kind), places[:, [each == kind for each in handed]]) for kind in set(handed)]

    @cached_property
    def chunk(self) -> int:
        """The clients of a chunk: as set, or by what one of them takes.

        Neither free memory nor the round matters: the same run has the same chunks everywhere.
        """
        if self.federation.one_by_one:
            return 1
        if self.federation.chunk or not self._light:
            return self.federation.chunk or LEAST_CHUNK
        numbers = sum(math.prod(draw.shape) for draw in self.method.noise().values())
        inputs = sum(tensor[:1].nbytes for tensor in self.data.inputs.values()) * max(self.rows.counts, default=0)
        taken = COPIES * (count_bytes(self.start) + 4 * numbers) + 2 * inputs
        return max(LEAST_CHUNK, min(working_set(self.data.labels.device) // max(taken, 1), MOST_CHUNK))

    @property
    def _light(self) -> bool:
        """Whether a step takes little else than what is trained, and no pass through an encoder."""
        return not self.method.through_encoder and LIGHT_INPUTS.issuperset(self.data.inputs)

    def _stacked_private(
        self, clients: list[int], numbers: Integers, rows: Integers, shelves: Sequence[Shelf]
    ) -> Tensors:
        """Stack private tensors; pad those with a row per sample to one more than the largest."""
        names, per_sample = list(shelves[numbers[0]].tensors), self.method.role.per_sample
        if not names:
            return {}
        largest = int(self.rows.sizes_known[clients].max())
        stacked: Tensors = {}
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            for name in names:
                tensor = shelves[number].tensors[name]
                shape = tensor.shape[1:]
                long = (largest + 1, *shape[1:]) if name in per_sample else shape
                if name not in stacked:
                    stacked[name] = tensor.new_zeros(len(clients), *long)
                target = stacked[name][:, : shape[0]] if name in per_sample else stacked[name]
                here, there = (torch.from_numpy(index).to(tensor.device) for index in (places, rows[places]))
                target[here] = tensor[there]
        return stacked

    @cached_property
    def start(self) -> Tensors:
        """The method's first shared tensors: they say what may be received and is sent."""
        return placed(self.method.start(torch_generator(self.seed, "start")), self.data.labels.device)

    def check_received(self, tensors: Tensors) -> None:
        """Refuse what the method does not declare: a server could name private tensors."""
        if reason := foreign(tensors, self.start, self.method.role):
            raise FedVLError(f"What the server sent is refused: {reason}.")

    def keep(self, trained: Sequence[Trained]) -> None:
        """Adopt the private tensors of clients whose round was committed."""
        for shelf in Answers.of(trained).shelves():
            self.private.put(shelf)

    def refused(self) -> list[Refusal]:
        """Return the messages that could not be read: none, since nothing travels."""
        return []

    def sum_updates(self, round_index: int, cohort: Sequence[int], shared: Tensors) -> Summed:
        """Train as :meth:`train` does; return the sum that a server learns, and what stays here."""
        trained = {result.update.client: result for result in self.train(round_index, cohort, shared)}
        parts = [self.part_of_sum(round_index, client, shared, trained.get(client)) for client in cohort]
        total = sum_of(parts, self.federation.least_clients)
        return Summed(total, list(cohort), list(trained.values()), sum(part.nbytes for part in parts))

    def part_of_sum(self, round_index: int, client: int, shared: Tensors, trained: Trained | None) -> Tensor:
        """Return one client's part of a sum of updates, with its share of the noise."""
        part, everybody = no_update(shared), self.method.task.clients
        if trained is not None:
            update = trained.update
            part = encode_update(update.tensors, shared, update.weight, trained.loss, everybody)
        if self.shared_noise is None:
            return part
        # who has nothing to train on adds its share too: fewer would be too little
        least, numbers = self.federation.least_clients, count_elements(shared)
        noise = self.shared_noise.share(numbers, least, self.private_seed, round_index, client)
        return part + pad(to_whole(noise, everybody), (0, FIGURES))

    def report(self, round_index: int, shared: Tensors) -> tuple[list[Report], list[Refusal]]:
        """Collect the reports of all clients that have data, or their sum if that is enough."""
        consultation = self.method.consultation()
        assert consultation is not None
        good, refusals = self.reports(round_index, shared)
        if good and self.federation.secure_sum:
            parts = [encode_report(report.tensors, self.method.task.clients) for report in good]
            parts += [no_report(consultation.report_shapes)] * (self.clients - len(parts))
            total = sum_of(parts, self.federation.least_clients)
            return [Report(None, decode_reports(total, consultation.report_shapes))], refusals
        return [sum_of_reports(good)] if good and consultation.summed else good, refusals

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
        private, begins = self.private_of(client), self.method.role.begins
        if not begins or not self.rows.counts[client]:
            return private
        tensors, samples = {**private, **received}, self.data.take(self.rows[client])
        with torch.no_grad():
            return {**private, **{name: make(tensors, samples) for name, make in begins.items()}}

    def _begun(self, clients: list[int], shared: Tensors, own: Mapping[int, Tensors] | None) -> list[Shelf]:
        """Return the private tensors that training begins with, of clients that have data."""
        role = self.method.role
        if self._joins or role.begins or role.renews_private:
            return shelved((client, self.begun(client, own[client] if own else shared)) for client in clients)
        new = [client for client in clients if client not in self.private]
        return [*self.private.shelves(clients), *(self._first_shelves(new) if role.firsts else [Shelf(new, {})])]

    def _first_shelves(self, clients: list[int]) -> list[Shelf]:
        """Make the first private tensors of clients, all of a size in one kernel."""
        by_size: dict[int, list[int]] = {}
        for client in clients:
            by_size.setdefault(self.rows.counts[client], []).append(client)
        return [Shelf(members, self._first(members)) for members in by_size.values()]

    def _first(self, clients: list[int]) -> Tensors:
        """Make the first private tensors of clients of the same size, stacked."""
        firsts, size = self.method.role.firsts, self.rows.counts[clients[0]]
        numbers = torch.tensor(clients, device=self.data.labels.device)

        def make(inputs: Tensors, labels: Tensor) -> Tensors:
            return {name: first(Samples(inputs, labels)) for name, first in firsts.items()}

        parts = []
        with torch.no_grad():
            for some in torch.split(numbers, MOST_FIRST):
                samples = self.data.take(self.rows.padded(some, size))
                parts.append(torch.func.vmap(make)(samples.inputs, samples.labels))
        return {name: torch.cat([part[name] for part in parts]) for name in firsts}

    def local_flops(self, shared: Tensors) -> int:
        """Count the largest client's operations in a round: its first step, times steps."""
        used = {client: self._used(client, self.begun(client, shared)) for client in self._with_data()}
        if not used:
            return 0
        largest = max(used, key=lambda client: used[client])
        return self._step_flops(largest, shared) * self._steps(used[largest])

    def _step_flops(self, client: int, handed: Tensors) -> int:
        """Count the operations of a client's first step."""
        from torch.utils.flop_counter import FlopCounterMode

        private = self.begun(client, handed)
        if not (used := self._used(client, private)):
            return 0
        stacked = self._stacked_private([client], np.array([0]), np.array([0]), shelved([(client, private)]))
        plain = self._gradient_step(same=True, replay=False)
        with FlopCounterMode(display=False) as counter:
            self.train_chunk(0, Chunk([client], [used], stacked, [handed]), 1, plain)
        return int(counter.get_total_flops())

    def _used(self, client: int, private: Tensors) -> int:
        """Return how many samples a client trains on."""
        return int((private[LABELS] >= 0).sum()) if LABELS in private else self.rows.counts[client]

    def _steps(self, samples: int) -> int:
        """Return the steps of a client's round; with private records, about as many are drawn."""
        return self.training.local_epochs * -(-samples // self.training.batch_size)

    def _with_data(self) -> list[int]:
        return [client for client, size in enumerate(self.rows.counts) if size]

    def train_chunks(self, round_index: int, chunks: Sequence[Chunk], several: bool) -> Iterator[Done]:
        """Train chunks of a round that has ``several``, here or in other processes, or only one."""

        def train(chunk: Chunk) -> Done:
            return self.train_chunk(round_index, chunk)

        if several and self._light and self.data.labels.device.type == "cpu":
            return side_by_side(train, chunks, torch.get_num_threads())
        return map(train, chunks)

    @with_fitting_threads
    def train_chunk(
        self, round_index: int, chunk: Chunk, most_steps: int | None = None, step_of: GradientStep | None = None
    ) -> Done:
        """Train the clients of a chunk in one kernel."""
        clients, used, private, begins = chunk
        shared, same, device = begins[0], len(begins) == 1, self.data.labels.device
        numbers = torch.tensor(clients, device=device)
        largest = max(self.rows.counts[client] for client in clients)
        orders = self._orders(round_index, chunk, numbers, largest)
        mask = (orders.positions < largest).float()
        steps = [min(count, most_steps or count) for count in orders.steps]
        received = shared if same else {name: torch.stack([begin[name] for begin in begins]) for name in shared}
        tensors = {
            name: tensor.expand(len(clients), *tensor.shape).clone() if same else tensor.clone()
            for name, tensor in received.items()
        }
        tensors |= private
        rates_of = {name: self._rate_factor(name, shared) for name in tensors}
        moving = {name: tensor for name, tensor in tensors.items() if rates_of[name] is not None}
        still = {name: tensor for name, tensor in tensors.items() if name not in moving}
        rates = rates_of_steps(self.training, round_index, self.federation.rounds, used, steps[0], device)
        factors = {name: rates_of[name] or 0.0 for name in moving}
        optimiser = Optimiser(self.training, rates[0], moving, factors, once=steps[0] == 1)
        step_of = step_of or self._gradient_steps[same]
        noise = self.method.noise()
        seeds = {name: derived_seed(self.private_seed, "noise", name, round_index) for name in noise}
        losses = torch.zeros(len(clients), dtype=torch.float64, device=device)
        padded_rows = self.rows.padded(numbers, largest + 1)
        by_client = self.method.scope == "client"
        whole = {name: tensor[padded_rows] for name, tensor in self.data.inputs.items()} if by_client else {}
        active = len(clients)
        for step in range(steps[0]):
            while steps[active - 1] <= step:
                active -= 1
            position = orders.positions[:active, step]
            rows = padded_rows[:active].gather(1, position)
            batch = Batch(
                inputs={name: tensor[rows] for name, tensor in self.data.inputs.items()},
                labels=still[LABELS][:active].gather(1, position) if LABELS in still else self.data.labels[rows],
                mask=mask[:active, step],
                position=position,
                received=shared if same else prefix(received, active),
                noise={name: draw(keys_of(seeds[name], numbers[:active], step)) for name, draw in noise.items()},
                whole=prefix(whole, active),
            )
            gradients, (loss, changed) = step_of(prefix(moving, active), prefix(still, active), batch)
            if self.hidden:
                gradients = self._hidden(self.hidden, gradients, clients, round_index, step)
            optimiser.rate = rates[step]
            optimiser.step(gradients, active)
            for name, tensor in changed.items():
                still[name][:active] = tensor.clone()  # it may be the very tensor that it is written to
            losses[:active] += loss.double()
            self._advance()
        means = losses / torch.tensor(steps, device=device)
        return self._split(clients, tensors, shared, means)

    def _advance(self) -> None:
        with self._advancing:
            self._steps_done += 1
            self.progress(min(self._steps_done, self._steps_planned), self._steps_planned)

    def _orders(self, round_index: int, chunk: Chunk, numbers: Tensor, largest: int) -> Orders:
        """Draw which samples each client's steps have, of those that it trains on."""
        chosen = torch.arange(largest, device=numbers.device) < self.rows.sizes[numbers][:, None]
        if LABELS in chunk.private:
            chosen &= chunk.private[LABELS][:, :largest] >= 0
        if self.hidden:
            return draw_private_orders(self.hidden, self.private_seed, round_index, chunk.clients, chosen)
        return draw_orders(self.training, self.private_seed, round_index, numbers, chosen, chunk.used)

    def _rate_factor(self, name: str, shared: Tensors) -> float | None:
        """Return the factor on a tensor's learning rate; None if gradients do not move it."""
        if name in self.method.role.given:
            return None
        role = self.method.role.shared(name) if name in shared else self.method.role.private(name)
        return role.rate if role.trained else None

    def _split(self, clients: list[int], tensors: Tensors, shared: Tensors, losses: Tensor) -> Done:
        """Split what training had in hand into what clients send and what they keep."""
        role = self.method.role
        names = [name for name in tensors if name not in shared]
        lasting = [name for name in names if role.private(name).lasts]
        sent: dict[str, Held] = {name: tensors[name] for name in [*self.start, *role.sent] if name in tensors}
        if role.ends:
            ended = [self._ended(client, row, tensors) for row, client in enumerate(clients)]
            sent = columns_of([{name: own[name] for name in [*self.start, *role.sent]} for own in ended])
            kept = shelved((c, {name: own[name] for name in lasting}) for c, own in zip(clients, ended, strict=True))
        else:
            kept = self._shelves(clients, {name: tensors[name] for name in lasting})
        if self.privacy.unit == "client" and self.federation.secure_sum:  # else the server cuts, which knows the norms
            assert self.privacy.clip is not None, "requirements.py asks for it"
            clip = self.privacy.clip - rounding_error(shared)
            each = [{name: column[row] for name, column in sent.items()} for row in range(len(clients))]
            sent = columns_of([clipped(one, shared, clip) for one in each])
        return Done(clients, sent, kept, losses)

    def _ended(self, client: int, row: int, tensors: Tensors) -> Tensors:
        """Return one client's tensors with those that the method makes when training ends."""
        size, role = self.rows.counts[client], self.method.role
        own = {name: t[row, :size] if name in role.per_sample else t[row] for name, t in tensors.items()}
        samples = self.data.take(self.rows[client])
        return own | {name: make(own, samples) for name, make in role.ends.items()}

    def _shelves(self, clients: list[int], tensors: Tensors) -> list[Shelf]:
        """Sort private tensors by the sizes of clients, where they have a row per sample."""
        per_sample = self.method.role.per_sample & tensors.keys()
        if not per_sample:
            return [Shelf(clients, tensors)] if tensors else []
        by_size: dict[int, list[int]] = {}
        for row, client in enumerate(clients):
            by_size.setdefault(self.rows.counts[client], []).append(row)
        found = []
        for size, rows in by_size.items():
            here = torch.tensor(rows, device=next(iter(tensors.values())).device)
            cut = {name: t[here, :size] if name in per_sample else t[here] for name, t in tensors.items()}
            found.append(Shelf([clients[row] for row in rows], cut))
        return found

    def _hidden(
        self, hidden: RecordPrivacy, gradients: Tensors, clients: list[int], round_index: int, step: int
    ) -> Tensors:
        """Return the noisy mean of each client's cut gradients."""
        means = [
            hidden.noisy_mean(
                {name: tensor[row] for name, tensor in gradients.items()},
                len(self.rows[client]),
                self.private_seed,
                round_index,
                client,
                step,
            )
            for row, client in zip(range(len(next(iter(gradients.values())))), clients, strict=False)
        ]
        return {name: torch.stack([mean[name] for mean in means]) for name in gradients}


def alike(known: Tensor, column: Tensor) -> bool:
    return known.shape[1:] == column.shape[1:] and known.dtype == column.dtype


def add_columns(
    whole: dict[str, Held | Folded], part: Mapping[str, Held], rows: Tensor, weights: Tensor, count: int
) -> None:
    """Write a chunk's columns to their rows of the whole: one tensor, while shapes agree."""
    for name, column in part.items():
        known = whole.get(name)
        if isinstance(known, Folded):
            assert isinstance(column, Tensor), "what is summed has one shape"
            known.add(column, weights, rows)
            continue
        if known is None and isinstance(column, Tensor):
            known = whole[name] = column.new_empty(count, *column.shape[1:])
        if isinstance(known, Tensor) and isinstance(column, Tensor) and alike(known, column):
            first, last = int(rows[0]), int(rows[-1])
            in_a_row = last - first == len(rows) - 1 and bool((rows.diff() == 1).all())
            known[slice(first, last + 1) if in_a_row else rows.to(column.device)] = column
            continue
        each = whole[name] = list(known) if known is not None else [torch.empty(0)] * count
        for row, tensor in zip(rows.tolist(), column, strict=True):
            each[row] = tensor


def working_set(device: torch.device) -> int:
    return WORKING_SET.get(device.type, WORKING_SET["cpu"])


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory for the next step; returning it costs as much as a step."""
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 32 * 2**20)
        mallopt(trim_threshold, 2**30)
        mallopt(top_pad, 64 * 2**20)
