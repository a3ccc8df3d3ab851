"""Local training of many clients in one process: all clients of a chunk move in one kernel.

Clients are rows of stacked tensors. A client with fewer samples is padded and masked; one with
fewer batches stops earlier: clients are sorted by their number of batches, so those still moving
are a prefix, and a prefix of a tensor is a view.
"""

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from fedvl.config import FederationConfig, PrivacyConfig, TrainingConfig
from fedvl.draws import keys_of, permutations
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
from fedvl.federation.graphs import Replayed
from fedvl.federation.optimisers import Optimiser, learning_rate
from fedvl.federation.privacy import ClientPrivacy, RecordPrivacy, clipped, row_gradients
from fedvl.methods.base import CLOSED_FORMS, Batch, Method, Samples, Update
from fedvl.seeding import derived_seed, torch_generator
from fedvl.tensors import Tensors, count_elements

LABELS = "labels"  # the private tensor that replaces a client's labels; -1: not trained on

GradientStep = Callable[[Tensors, Tensors, Batch], tuple[Tensors, tuple[Tensor, Tensors]]]


class Trained(NamedTuple):
    """What local training leaves: the update that is sent, and what stays with the client."""

    update: Update
    private: Tensors
    loss: float
    examples: int  # that the client declares; what it trained on may be fewer


class Summed(NamedTuple):
    """What a round leaves where the server learns only the sum, in whole numbers."""

    total: Tensor
    clients: list[int]  # whose numbers are in it
    trained: list[Trained]  # what stays with them
    bytes_up: int


class Member(NamedTuple):
    """A client of a chunk: the positions of the samples it trains on, and its private tensors."""

    client: int
    used: Tensor
    private: Tensors


class Chunk(NamedTuple):
    """Clients that train in one kernel, the largest first, from one state or each from its own."""

    members: list[Member]
    begins: Sequence[Tensors]


class Spread(Protocol):
    """What trains the chunks of a round in several processes."""

    def train(self, round_index: int, chunks: Sequence[Chunk], engine: "LocalEngine") -> list[list[Trained]]: ...


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
        self.rows = list(rows)
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
        self.private: dict[int, Tensors] = {}
        self._gradient_steps = {same: self._gradient_step(same) for same in (True, False)}
        self.progress: Callable[[int, int], None] = lambda done, total: None  # steps of a round
        self._steps_done = self._steps_planned = 0
        self.processes: Spread | None = None  # where there are several, started by torchrun
        self._joins = True  # until the method is seen to keep nothing with a client
        keep_freed_memory()

    @property
    def clients(self) -> int:
        return len(self.rows)

    @property
    def sizes(self) -> list[int]:
        return [len(rows) for rows in self.rows]

    def train(
        self, round_index: int, cohort: Sequence[int], shared: Tensors, own: Mapping[int, Tensors] | None = None
    ) -> list[Trained]:
        """Train the clients that have data, from the shared tensors or each from its ``own``."""
        for handed in own.values() if own else [shared]:
            self.check_received(handed)
        private = {client: self.begun(client, own[client] if own else shared) for client in cohort}
        used = {client: self._used(client, private[client]) for client in cohort}
        working = sorted((client for client in cohort if len(used[client])), key=lambda c: (-len(used[c]), c))
        size = 1 if self.federation.one_by_one else self.federation.chunk
        chunks = [
            Chunk([Member(c, used[c], private[c]) for c in some], [own[c] for c in some] if own else [shared])
            for members in self._alike(working, private, own)
            for some in (members[first : first + size] for first in range(0, len(members), size))
        ]
        self._steps_done, self._steps_planned = 0, sum(self._steps(len(chunk.members[0].used)) for chunk in chunks)
        if self.processes and chunks:
            results = self.processes.train(round_index, chunks, self)
        else:
            results = [self.train_chunk(round_index, chunk) for chunk in chunks]
        trained = {result.update.client: result for chunk in results for result in chunk}
        return [trained[client] for client in cohort if client in trained]

    def _alike(
        self, clients: list[int], private: Mapping[int, Tensors], own: Mapping[int, Tensors] | None
    ) -> Iterable[list[int]]:
        """Group clients by the shapes of their tensors, so that each group can be stacked."""
        groups: dict[object, list[int]] = {}
        for client in clients:
            tensors = {**private[client], **(own[client] if own else {})}
            per_sample = self.method.role.per_sample
            # as a set: what was restored from a journal comes in another order
            shapes = frozenset((name, tensor.shape) for name, tensor in tensors.items() if name not in per_sample)
            groups.setdefault(shapes, []).append(client)
        return groups.values()

    @cached_property
    def start(self) -> Tensors:
        """The method's first shared tensors: they say what may be received and is sent."""
        return self.method.start(torch_generator(self.seed, "start"))

    def check_received(self, tensors: Tensors) -> None:
        """Refuse what the method does not declare: a server could name private tensors."""
        if reason := foreign(tensors, self.start, self.method.role):
            raise FedVLError(f"What the server sent is refused: {reason}.")

    def keep(self, trained: Iterable[Trained]) -> None:
        """Adopt the private tensors of clients whose round was committed."""
        for result in trained:
            if result.private:
                self.private[result.update.client] = result.private

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
        if (kept and not self.method.role.renews_private) or not self._joins or not len(self.rows[client]):
            return kept
        joined = self.method.join(self.data.take(self.rows[client]), torch_generator(self.private_seed, "join", client))
        self._joins = bool(joined)  # a method that keeps nothing is not asked again: that copies a client's data
        return {**joined, **kept}

    def begun(self, client: int, received: Tensors) -> Tensors:
        """Return the private tensors that a client's training begins with."""
        private, begins = self.private_of(client), self.method.role.begins
        if not begins or not len(self.rows[client]):
            return private
        tensors, samples = {**private, **received}, self.data.take(self.rows[client])
        with torch.no_grad():
            return {**private, **{name: make(tensors, samples) for name, make in begins.items()}}

    def local_flops(self, shared: Tensors) -> int:
        """Count the largest client's operations in a round: its first step, times steps."""
        from torch.utils.flop_counter import FlopCounterMode

        privates = [self.begun(client, shared) for client in range(self.clients)]
        members = [Member(client, self._used(client, private), private) for client, private in enumerate(privates)]
        largest = max(members, key=lambda member: len(member.used))
        if not len(largest.used):
            return 0
        with FlopCounterMode(display=False) as counter:
            self.train_chunk(0, Chunk([largest], [shared]), most_steps=1)
        return int(counter.get_total_flops()) * self._steps(len(largest.used))

    def _steps(self, samples: int) -> int:
        """Return the steps of a client's round; with private records, about as many are drawn."""
        return self.training.local_epochs * -(-samples // self.training.batch_size)

    def _with_data(self) -> list[int]:
        return [client for client in range(self.clients) if len(self.rows[client])]

    def _used(self, client: int, private: Tensors) -> Tensor:
        """Return the positions of the samples that a client trains on now."""
        everything = torch.arange(len(self.rows[client]))
        return everything[private[LABELS].cpu() >= 0] if LABELS in private else everything

    def train_chunk(self, round_index: int, chunk: Chunk, most_steps: int | None = None) -> list[Trained]:
        """Train the clients of a chunk in one kernel."""
        members, begins = chunk
        clients, used = [member.client for member in members], [member.used for member in members]
        shared, same = begins[0], len(begins) == 1
        largest = max(len(self.rows[client]) for client in clients)
        numbers = torch.tensor(clients, device=self.data.labels.device)
        positions, steps = self._orders(round_index, clients, numbers, used, largest)
        steps = [min(count, most_steps or count) for count in steps]
        mask = (positions < largest).float()
        received = shared if same else {name: torch.stack([begin[name] for begin in begins]) for name in shared}
        tensors = {
            name: tensor.expand(len(clients), *tensor.shape).clone() if same else tensor.clone()
            for name, tensor in received.items()
        }
        tensors |= self._stacked_private([member.private for member in members], largest)
        rates_of = {name: self._rate_factor(name, shared) for name in tensors}
        moving = {name: tensor for name, tensor in tensors.items() if rates_of[name] is not None}
        still = {name: tensor for name, tensor in tensors.items() if name not in moving}
        rates = self._rates(round_index, used, max(steps))
        optimiser = Optimiser(self.training, rates[0], moving, {name: rates_of[name] or 0.0 for name in moving})
        gradient_step = self._gradient_steps[same]
        seeds = {name: derived_seed(self.private_seed, "noise", name, round_index) for name in self.method.noise()}
        losses = torch.zeros(len(clients), dtype=torch.float64, device=mask.device)
        padded_rows = pad(pad_sequence([self.rows[client] for client in clients], batch_first=True), (0, 1))
        whole = (
            {name: tensor[padded_rows] for name, tensor in self.data.inputs.items()}
            if self.method.scope == "client"
            else {}
        )
        for step in range(max(steps)):
            active = sum(step < count for count in steps)
            position = positions[:active, step]
            rows = padded_rows[:active].gather(1, position)
            batch = Batch(
                inputs={name: tensor[rows] for name, tensor in self.data.inputs.items()},
                labels=still[LABELS][:active].gather(1, position) if LABELS in still else self.data.labels[rows],
                mask=mask[:active, step],
                position=position,
                received=shared if same else prefix(received, active),
                noise={
                    name: draw(keys_of(seeds[name], numbers[:active], step))
                    for name, draw in self.method.noise().items()
                },
                whole=prefix(whole, active),
            )
            gradients, (loss, changed) = gradient_step(prefix(moving, active), prefix(still, active), batch)
            if self.hidden:
                gradients = self._hidden(self.hidden, gradients, clients, round_index, step)
            optimiser.rate = rates[step]
            optimiser.step(gradients, active)
            for name, tensor in changed.items():
                still[name][:active] = tensor.clone()  # it may be the very tensor that it is written to
            losses[:active] += loss.double()
            self._steps_done += 1
            self.progress(min(self._steps_done, self._steps_planned), self._steps_planned)
        means = (losses / torch.tensor(steps, device=losses.device)).tolist()
        return [
            self._split_update(
                client,
                {name: tensor[row] for name, tensor in tensors.items()},
                shared,
                len(used[row]),
                means[row],
            )
            for row, client in enumerate(clients)
        ]

    def _rate_factor(self, name: str, shared: Tensors) -> float | None:
        """Return the factor on a tensor's learning rate; None if gradients do not move it."""
        if name in self.method.role.given:
            return None
        role = self.method.role.shared(name) if name in shared else self.method.role.private(name)
        return role.rate if role.trained else None

    def _split_update(self, client: int, tensors: Tensors, shared: Tensors, used: int, loss: float) -> Trained:
        """Split what training had in hand into what a client sends and what it keeps."""
        size, role = len(self.rows[client]), self.method.role
        tensors = {name: tensor[:size] if name in role.per_sample else tensor for name, tensor in tensors.items()}
        names = [name for name in tensors if name not in shared]
        if role.ends:
            samples = self.data.take(self.rows[client])
            tensors |= {name: make(tensors, samples) for name, make in role.ends.items()}
        private = {name: tensors[name].clone() for name in names}
        sent = {name: tensors[name] for name in [*self.start, *role.sent]}
        if self.privacy.unit == "client" and self.federation.secure_sum:  # else the server cuts, which knows the norms
            assert self.privacy.clip is not None, "requirements.py asks for it"
            sent = clipped(sent, shared, self.privacy.clip - rounding_error(shared))
        # where all weigh the same nobody need know how many examples a client has
        alike = self.method.weighting == "clients" or self.privacy.unit == "client"
        update = Update(client, sent, 1.0 if alike else float(used))
        lasting = {name: tensor for name, tensor in private.items() if role.private(name).lasts}
        return Trained(update, lasting, loss if self.privacy.unit == "none" else 0.0, 1 if alike else size)

    def _orders(
        self, round_index: int, clients: list[int], numbers: Tensor, used: list[Tensor], filler: int
    ) -> tuple[Tensor, list[int]]:
        """Draw the samples of each client's steps (clients x steps x batch), and count its steps.

        ``filler`` is no sample: it fills the last batch, and stands after a client's last step.
        """
        if self.hidden:
            drawn = [
                self.hidden.draw(len(own), self.private_seed, round_index, client)
                for client, own in zip(clients, used, strict=True)
            ]
            width = max(1, *(len(step) for steps in drawn for step in steps))
            orders = [
                torch.stack([pad(step, (0, width - len(step)), value=filler) for step in steps]) for steps in drawn
            ]
            padded = pad_sequence(orders, batch_first=True, padding_value=filler)
            return padded.to(numbers.device), [len(order) for order in orders]
        counts = torch.tensor([len(own) for own in used], device=numbers.device)
        width, epochs = min(self.training.batch_size, len(used[0])), self.training.local_epochs
        places = pad_sequence(used, batch_first=True, padding_value=filler).to(numbers.device)
        chosen = places < filler
        seed = derived_seed(self.private_seed, "order", round_index)
        shuffled = torch.stack([permutations(seed, numbers, chosen, epoch) for epoch in range(epochs)], dim=1)
        batches = -(-counts // width)
        # step s of a client is its batch s % b of epoch s // b, where b is its number of batches
        step = torch.arange(epochs * int(batches[0]), device=numbers.device)
        epoch, batch = step // batches[:, None], step % batches[:, None]
        within = batch[..., None] * width + torch.arange(width, device=numbers.device)
        real = (epoch < epochs)[..., None] & (within < counts[:, None, None])
        flat = epoch.clamp(max=epochs - 1)[..., None] * places.shape[1] + within.clamp(max=places.shape[1] - 1)
        order = places.gather(1, shuffled.flatten(1).gather(1, flat.flatten(1))).view(flat.shape)
        return order.masked_fill_(~real, filler), (epochs * batches).tolist()

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

    def _rates(self, round_index: int, used: list[Tensor], steps: int) -> Sequence[float | Tensor]:
        """Return each step's rate: one for all, or one per client if it falls by epoch."""
        rounds = self.federation.rounds
        if self.training.schedule != "cosine-restarts":
            return [learning_rate(self.training, round_index, rounds)] * steps
        by_epoch = torch.tensor(
            [learning_rate(self.training, round_index, rounds, e) for e in range(self.training.local_epochs)]
        )
        batches = torch.tensor([-(-len(own) // self.training.batch_size) for own in used])
        epochs = torch.arange(steps)[:, None] // batches  # a client that has finished is not moved, whatever its rate
        rates = by_epoch[epochs.clamp(max=self.training.local_epochs - 1)].to(self.data.labels.device)
        return list(rates)

    def _stacked_private(self, joined: list[Tensors], largest: int) -> Tensors:
        """Stack private tensors; pad those with a row per sample to one more than the largest."""
        stacked = {}
        for name in joined[0]:
            parts = [tensors[name] for tensors in joined]
            if name in self.method.role.per_sample:
                parts = [torch.cat([part, part.new_zeros(largest + 1 - len(part), *part.shape[1:])]) for part in parts]
            stacked[name] = torch.stack(parts)
        return stacked

    def _gradient_step(self, same: bool) -> GradientStep:
        """Return the gradient step: in one kernel, in closed form, or client by client.

        ``same``: all clients received the same tensors, which are then not stacked.
        """

        device = self.data.labels.device.type
        mixed = device == "cuda" and self.training.precision == "bfloat16"  # a processor gains nothing by it

        def objective(moving: Tensors, still: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
            with torch.autocast(device, torch.bfloat16, enabled=mixed):
                return self.method.objective({**still, **moving}, batch)

        of_received = None if same else 0
        axes = Batch(inputs=0, labels=0, mask=0, position=0, received=of_received, noise=0, whole=0)  # type: ignore[arg-type]
        stacked = torch.func.vmap(objective, in_dims=(0, 0, axes))

        def together(moving: Tensors, still: Tensors, batch: Batch) -> tuple[Tensors, tuple[Tensor, Tensors]]:
            """Clients are independent, so the gradient of the summed loss is each one's own."""
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in moving.items()}
            losses, changed = stacked(leaves, still, batch)
            gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
            detached = {name: tensor.detach() for name, tensor in changed.items()}
            return dict(zip(leaves, gradients, strict=True)), (losses.detach(), detached)

        def by_row(moving: Tensors, still: Tensors, batch: Batch) -> Tensors:
            """Return the sum of one client's gradients, each image's cut before."""
            assert self.hidden is not None

            def of_row(inputs: Tensors, label: Tensor, mask: Tensor, position: Tensor) -> Tensors:
                row = batch._replace(inputs=lift(inputs), labels=label[None], mask=mask[None], position=position[None])
                return dict(torch.func.grad(lambda tensors: objective(tensors, still, row)[0])(moving))

            gradients = torch.func.vmap(of_row)(batch.inputs, batch.labels, batch.mask, batch.position)
            return row_gradients(gradients, batch.mask, self.hidden.clip)

        def row_by_row(moving: Tensors, still: Tensors, batch: Batch) -> tuple[Tensors, tuple[Tensor, Tensors]]:
            totals = torch.func.vmap(by_row, in_dims=(0, 0, axes))(moving, still, batch)
            return totals, (batch.mask.new_zeros(len(batch.mask)), {})

        closed_form = CLOSED_FORMS.get(type(self.method))  # of this very class: a subclass may have another loss

        def in_closed_form(moving: Tensors, still: Tensors, batch: Batch) -> tuple[Tensors, tuple[Tensor, Tensors]]:
            assert closed_form is not None
            gradients, losses, changed = closed_form(self.method, {**still, **moving}, batch)
            return gradients, (losses, changed)

        gradient = torch.func.grad_and_value(objective, has_aux=True)

        def alone(moving: Tensors, still: Tensors, batch: Batch) -> tuple[Tensors, tuple[Tensor, Tensors]]:
            single = batch._replace(
                inputs=first(batch.inputs),
                labels=batch.labels[0],
                mask=batch.mask[0],
                position=batch.position[0],
                received=batch.received if same else first(batch.received),
                noise=first(batch.noise),
                whole=first(batch.whole),
            )
            gradients, (loss, changed) = gradient(first(moving), first(still), single)
            return lift(gradients), (loss[None], lift(changed))

        if self.hidden:
            return row_by_row
        if self.federation.one_by_one:
            return alone
        batched = in_closed_form if closed_form else together
        return Replayed(batched) if device == "cuda" else batched


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory for the next step; returning it costs as much as a step."""
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 32 * 2**20)
        mallopt(trim_threshold, 2**30)
        mallopt(top_pad, 64 * 2**20)


def prefix(tensors: Tensors, count: int) -> Tensors:
    return {name: tensor[:count] for name, tensor in tensors.items()}


def first(tensors: Tensors) -> Tensors:
    return {name: tensor[0] for name, tensor in tensors.items()}


def lift(tensors: Tensors) -> Tensors:
    return {name: tensor[None] for name, tensor in tensors.items()}
