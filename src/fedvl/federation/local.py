"""Local training of many clients in one process: all clients of a chunk move in one kernel.

Clients are rows of stacked tensors. A client with fewer samples is padded and masked; one with fewer batches stops earlier:
clients are sorted by their number of batches, so those still moving are a prefix, and a prefix of a tensor is a view.
"""

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from fedvl.config import FederationConfig, TrainingConfig
from fedvl.federation.checks import Refusal, Report, sound_reports, sum_of_reports
from fedvl.federation.optimisers import Optimiser, learning_rate
from fedvl.methods.base import Batch, Method, Samples, Update
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

LABELS = "labels"  # the private tensor that replaces the labels of a client's samples; -1: not to be trained on

GradientStep = Callable[[Tensors, Tensors, Batch], tuple[Tensors, tuple[Tensor, Tensors]]]


class Trained(NamedTuple):
    """What local training leaves: the update that is sent, and what stays with the client."""

    update: Update
    private: Tensors
    loss: float


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
    ) -> None:
        self.method = method
        self.data = data
        self.rows = list(rows)
        self.training = training
        self.federation = federation
        self.seed = seed
        self.private: dict[int, Tensors] = {}
        keep_freed_memory()

    @property
    def clients(self) -> int:
        return len(self.rows)

    def train(
        self, round_index: int, cohort: Sequence[int], shared: Tensors, own: Mapping[int, Tensors] | None = None
    ) -> list[Trained]:
        """Train each client of the cohort that has data, from the same shared tensors or each from its ``own``.

        The result is in the order of the cohort.
        """
        used = {client: self._used(client) for client in cohort}
        working = sorted((client for client in cohort if len(used[client])), key=lambda c: (-len(used[c]), c))
        size = 1 if self.federation.one_by_one else self.federation.chunk
        trained: dict[int, Trained] = {}
        for first in range(0, len(working), size):
            chunk = working[first : first + size]
            begins = [own[client] for client in chunk] if own else [shared]
            for result in self._train_chunk(round_index, chunk, [used[client] for client in chunk], begins):
                trained[result.update.client] = result
        return [trained[client] for client in cohort if client in trained]

    def keep(self, trained: Iterable[Trained]) -> None:
        """Adopt the private tensors of clients whose round was committed."""
        for result in trained:
            if result.private:
                self.private[result.update.client] = result.private

    def refused(self) -> list[Refusal]:
        """What came from clients and could not even be read: nothing, where nothing travels."""
        return []

    def report(self, round_index: int, shared: Tensors) -> tuple[list[Report], list[Refusal]]:
        """What all clients that have data say before a round: their reports, or only the sum if the method needs no more."""
        consultation, reports = self.method.consultation, []
        assert consultation is not None
        for client in self._with_data():
            tensors = self.private_of(client)
            with torch.no_grad():
                sent, changed = consultation.report(
                    round_index, {**shared, **tensors}, self.data.take(self.rows[client])
                )
            self.private[client] = {**tensors, **changed}
            reports.append(Report(client, sent))
        good, refusals = sound_reports(reports, consultation.shapes)
        return [sum_of_reports(good)] if good and consultation.summed else good, refusals

    def adopt(self, settlements: Mapping[int | None, Tensors]) -> None:
        """Give the clients the server's answers: each its own, or all the one under None."""
        assert self.method.consultation is not None
        for client in self._with_data():
            answer = settlements.get(client, settlements.get(None))
            if answer is not None:
                private = self.private_of(client)
                self.private[client] = {**private, **self.method.consultation.adopt(private, answer)}

    def private_of(self, client: int) -> Tensors:
        """What a client keeps for itself; for one that never took part, what it would begin with."""
        if client in self.private:
            return self.private[client]
        if type(self.method).join is Method.join or not len(self.rows[client]):
            return {}  # nothing to keep: spare the copy of the client's data
        return self.method.join(self.data.take(self.rows[client]), torch_generator(self.seed, "join", client))

    def local_flops(self, shared: Tensors) -> int:
        """Floating-point operations of a round of the client with the most data: torch's count of its first step, times steps."""
        from torch.utils.flop_counter import FlopCounterMode

        used = {client: self._used(client) for client in range(self.clients)}
        client = max(used, key=lambda c: len(used[c]))
        if not len(used[client]):
            return 0
        with FlopCounterMode(display=False) as counter:
            self._train_chunk(0, [client], [used[client]], [shared], most_steps=1)
        steps = self.training.local_epochs * -(-len(used[client]) // self.training.batch_size)
        return int(counter.get_total_flops()) * steps

    def _with_data(self) -> list[int]:
        return [client for client in range(self.clients) if len(self.rows[client])]

    def _used(self, client: int) -> Tensor:
        """Positions of the samples that a client trains on now."""
        everything = torch.arange(len(self.rows[client]))
        if not len(everything) or LABELS not in self.method.per_sample:
            return everything
        return everything[self.private_of(client)[LABELS].cpu() >= 0]

    def _train_chunk(
        self,
        round_index: int,
        clients: list[int],
        used: list[Tensor],
        begins: Sequence[Tensors],
        most_steps: int | None = None,
    ) -> list[Trained]:
        """Train clients that are sorted by how many samples they use (``used``: their positions), the most first.

        ``begins``: what each of them begins with, or one set of tensors for all.
        """
        shared, same = begins[0], len(begins) == 1
        largest = max(len(self.rows[client]) for client in clients)
        positions, mask = self._batches(round_index, clients, used, largest)
        steps = [min(int(count), most_steps or int(count)) for count in mask.any(-1).sum(-1)]
        joined = [self.private_of(client) for client in clients]
        received = shared if same else {name: torch.stack([begin[name] for begin in begins]) for name in shared}
        tensors = {
            name: tensor.expand(len(clients), *tensor.shape).clone() if same else tensor.clone()
            for name, tensor in received.items()
        }
        tensors |= self._stacked_private(joined, largest)
        moving = {name: tensor for name, tensor in tensors.items() if self._moves(name, shared)}
        still = {name: tensor for name, tensor in tensors.items() if name not in moving}
        rates = self._rates(round_index, used, max(steps))
        optimiser = Optimiser(self.training, rates[0], moving)
        gradient_step = self._gradient_step(same)
        generators = [torch_generator(self.seed, "noise", round_index, client) for client in clients]
        losses = torch.zeros(len(clients), dtype=torch.float64)
        padded_rows = pad(pad_sequence([self.rows[client] for client in clients], batch_first=True), (0, 1))
        whole = (
            {name: tensor[padded_rows] for name, tensor in self.data.inputs.items()}
            if self.method.sees_whole_client
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
                noise=self._noise(generators[:active]),
                whole=prefix(whole, active),
            )
            gradients, (loss, changed) = gradient_step(prefix(moving, active), prefix(still, active), batch)
            optimiser.rate = rates[step]
            optimiser.step(gradients, active)
            for name, tensor in changed.items():
                still[name][:active] = tensor.clone()  # it may be the very tensor that it is written to
            losses[:active] += loss.double().cpu()
        return [
            self._leave(
                client,
                {name: tensor[row] for name, tensor in tensors.items()},
                shared,
                len(used[row]),
                float(losses[row]) / steps[row],
            )
            for row, client in enumerate(clients)
        ]

    def _moves(self, name: str, shared: Tensors) -> bool:
        return self.method.trains(name) if name in shared else name in self.method.trained_private

    def _leave(self, client: int, tensors: Tensors, shared: Tensors, used: int, loss: float) -> Trained:
        """What a client sends and what it keeps, out of all that its training had in hand."""
        size = len(self.rows[client])
        private = {
            name: (tensor[:size] if name in self.method.per_sample else tensor).clone()
            for name, tensor in tensors.items()
            if name not in shared
        }
        sent = {name: tensors[name] for name in shared}
        if self.method.extra_shapes():
            sent |= self.method.extras({**private, **sent}, self.data.take(self.rows[client]))
        update = Update(client, sent, 1.0 if self.method.counts_clients_equally else float(used))
        return Trained(update, private if self.method.private_lasts else {}, loss)

    def _batches(self, round_index: int, clients: list[int], used: list[Tensor], filler: int) -> tuple[Tensor, Tensor]:
        """Positions of each client's samples (clients x steps x batch) in a fresh order for each epoch, and which are real."""
        width = min(self.training.batch_size, len(used[0]))
        orders = []
        for client, own in zip(clients, used, strict=True):
            generator = torch_generator(self.seed, "order", round_index, client)
            rest = torch.full((-len(own) % width,), filler)
            epochs = [
                torch.cat([own[torch.randperm(len(own), generator=generator)], rest])
                for _ in range(self.training.local_epochs)
            ]
            orders.append(torch.cat(epochs).view(-1, width))
        positions = pad_sequence(orders, batch_first=True, padding_value=filler)
        positions = positions.to(self.data.labels.device)
        return positions, (positions < filler).float()

    def _rates(self, round_index: int, used: list[Tensor], steps: int) -> Sequence[float | Tensor]:
        """The learning rate of each step: one for all clients, or one for each where it falls from epoch to epoch."""
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
        """Private tensors clients first; those with a row a sample are padded to one row more than the largest client."""
        stacked = {}
        for name in joined[0]:
            parts = [tensors[name] for tensors in joined]
            if name in self.method.per_sample:
                parts = [torch.cat([part, part.new_zeros(largest + 1 - len(part), *part.shape[1:])]) for part in parts]
            stacked[name] = torch.stack(parts)
        return stacked

    def _noise(self, generators: list[torch.Generator]) -> Tensors:
        drawn = [self.method.noise(generator) for generator in generators]
        return {name: torch.stack([noise[name] for noise in drawn]).to(self.data.labels.device) for name in drawn[0]}

    def _gradient_step(self, same: bool) -> GradientStep:
        """Gradients of the method's objective for stacked clients: by one kernel, or for one client without batching.

        ``same``: whether all received the same tensors, which are then not stacked.
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
            """Clients do not touch each other, so the gradient of the sum of their losses is each one's own."""
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in moving.items()}
            losses, changed = stacked(leaves, still, batch)
            gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
            detached = {name: tensor.detach() for name, tensor in changed.items()}
            return dict(zip(leaves, gradients, strict=True)), (losses.detach(), detached)

        # Only of the class that wrote the loss: whoever changes the loss has no closed form unless it writes one too.
        author = next(
            kind for kind in type(self.method).__mro__ if vars(kind).keys() & {"loss", "objective", "gradients"}
        )
        closed_form: Any = getattr(self.method, "gradients", None) if "gradients" in vars(author) else None

        def in_closed_form(moving: Tensors, still: Tensors, batch: Batch) -> tuple[Tensors, tuple[Tensor, Tensors]]:
            gradients, losses, changed = closed_form({**still, **moving}, batch)
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

        if self.federation.one_by_one:
            return alone
        return in_closed_form if closed_form else together


def keep_freed_memory() -> None:
    """Ask the C library to keep what a step frees for the next step; handing it back costs as much as the arithmetic.

    Only glibc has this call; elsewhere nothing is lost but speed.
    """
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
