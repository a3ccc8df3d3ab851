"""Local training of a chunk: all its clients move in one kernel."""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from threading import Lock

import torch
from torch import Tensor

from fedvl.config import FederationConfig, PrivacyConfig, TrainingConfig
from fedvl.federation.chunks import LABELS, Chunk, Done
from fedvl.federation.fixed_point import rounding_error
from fedvl.federation.optimisers import Optimiser
from fedvl.federation.orders import Orders, draw_orders, draw_private_orders, rates_of_steps
from fedvl.federation.privacy import RecordPrivacy, clipped_move
from fedvl.federation.stacks import Column, SampleRows, Stack, columns_of, stacks_of
from fedvl.federation.steps import GradientStep, gradient_step, prefix
from fedvl.federation.threads import side_by_side, with_fitting_threads
from fedvl.methods.base import Batch, Method, Samples
from fedvl.methods.parts.losses import UNIT
from fedvl.seeding import derived_seed, keys_of
from fedvl.tensors import Tensors, count_bytes, placed

WORKING_SET = {"cpu": 2**26, "cuda": 2**31}  # bytes that the clients of a chunk may take, if their number is not set
COPIES = 6  # of what a client trains: as it began, as it is, gradient, momentum, what is sent
LIGHT_INPUTS = frozenset(
    {"features", "embeddings", "candidates", "class_list", UNIT}
)  # with which a step holds little else
LEAST_CHUNK, MAX_CHUNK = 10, 4096


class ChunkTraining:
    """A method, its data, and how clients train on their rows of them."""

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
        self.rows = SampleRows.of(rows)
        self.training = training
        self.federation = federation
        self.seed = seed
        self.private_seed = seed  # of what clients draw for themselves; a party has one that nobody else knows
        self.privacy = privacy or PrivacyConfig()
        hides_images = self.privacy.unit == "record"
        of = "unit" if UNIT in data.inputs else "image"
        self.hidden = RecordPrivacy(self.privacy, training, federation.rounds, of) if hides_images else None
        self._gradient_steps = {same: self._gradient_step(same, replay=True) for same in (True, False)}
        self.progress: Callable[[int, int], None] = lambda done, total: None  # steps of a round
        self._steps_done = self._steps_planned = 0
        self._advancing = Lock()  # by several threads
        keep_freed_memory()

    @property
    def sizes(self) -> list[int]:
        """The clients' numbers of records: images, or units of several images."""
        return self._units if UNIT in self.data.inputs else self.rows.counts

    @cached_property
    def _units(self) -> list[int]:
        return [len(torch.unique(self.data.inputs[UNIT][rows])) for rows in self.rows]

    def _gradient_step(self, same: bool, replay: bool) -> GradientStep:
        device = self.data.labels.device.type
        return gradient_step(self.method, self.training, self.federation, self.hidden, device, same, replay)

    @cached_property
    def start(self) -> Tensors:
        """The method's first shared tensors: they say what may be received and is sent."""
        return placed(self.method.first_shared(self.seed), self.data.labels.device)

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
        return max(LEAST_CHUNK, min(working_set(self.data.labels.device) // max(taken, 1), MAX_CHUNK))

    @property
    def _light(self) -> bool:
        """Whether a step takes little else than what is trained, and no pass through an encoder."""
        return not self.method.through_encoder and LIGHT_INPUTS.issuperset(self.data.inputs)

    def _steps(self, samples: int) -> int:
        """Return the steps of a client's round; with private records, about as many are drawn."""
        return self.training.steps(samples)

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
        largest = max(map(self.rows.counts.__getitem__, clients))
        orders = self._orders(round_index, chunk, numbers, largest)
        mask = (orders.positions < largest).float()
        steps = [min(count, most_steps) for count in orders.steps] if most_steps else orders.steps
        received = shared if same else {name: torch.stack([begin[name] for begin in begins]) for name in shared}
        tensors = {
            name: tensor.expand(len(clients), *tensor.shape).clone() if same else tensor.clone()
            for name, tensor in received.items()
        }
        tensors |= private
        rates_of = {name: self._rate_factor(name, shared) for name in tensors}
        moving = {name: tensor for name, tensor in tensors.items() if rates_of[name] is not None}
        still = {name: tensor for name, tensor in tensors.items() if name not in moving}
        records = [self.sizes[client] for client in clients] if self.hidden else used
        rates = rates_of_steps(self.training, round_index, self.federation.rounds, records, steps[0], device)
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
        return self._split(clients, tensors, received, same, means)

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
            units = self.data.inputs[UNIT][self.rows.padded(numbers, largest)] if UNIT in self.data.inputs else None
            return draw_private_orders(self.hidden, self.private_seed, round_index, chunk.clients, chosen, units)
        return draw_orders(self.training, self.private_seed, round_index, numbers, chosen, chunk.used)

    def _rate_factor(self, name: str, shared: Tensors) -> float | None:
        """Return the factor on a tensor's learning rate; None if gradients do not move it."""
        if name in self.method.role.given:
            return None
        role = self.method.role.shared(name) if name in shared else self.method.role.private(name)
        return role.rate if role.trained else None

    def _split(self, clients: list[int], tensors: Tensors, received: Tensors, same: bool, losses: Tensor) -> Done:
        """Split what training had in hand into what clients send and what they keep."""
        role = self.method.role
        names = [name for name in tensors if name not in received]
        lasting = [name for name in names if role.private(name).lasts]
        sent: dict[str, Column] = {name: tensors[name] for name in [*self.start, *role.sent] if name in tensors}
        if role.has_ends:
            ended = [
                self._ended(client, row, tensors, received if same else {n: t[row] for n, t in received.items()})
                for row, client in enumerate(clients)
            ]
            sent = columns_of([{name: own[name] for name in [*self.start, *role.sent]} for own in ended])
            kept = stacks_of((c, {name: own[name] for name in lasting}) for c, own in zip(clients, ended, strict=True))
        else:
            kept = self._stacks(clients, {name: tensors[name] for name in lasting})
        if self.privacy.unit == "client" and self.federation.secure_sum:  # else the server cuts, which knows the norms
            assert self.privacy.clip is not None, "requirements.py asks for it"
            assert same, "a secure sum has no tensors for single clients"
            clip = self.privacy.clip - rounding_error(received)
            each = [{name: column[row] for name, column in sent.items()} for row in range(len(clients))]
            sent = columns_of([clipped_move(one, received, clip) for one in each])
        return Done(clients, sent, kept, losses)

    def _ended(self, client: int, row: int, tensors: Tensors, received: Tensors) -> Tensors:
        """Return one client's tensors with those that the method makes when training ends."""
        size, role = self.rows.counts[client], self.method.role
        own = {name: t[row, :size] if name in role.per_sample else t[row] for name, t in tensors.items()}
        samples = self.data.take(self.rows[client])
        ends = role.ends(received, (name for name in tensors if name not in received))
        return own | {name: make(name, own, received, samples) for name, make in ends.items()}

    def _stacks(self, clients: list[int], tensors: Tensors) -> list[Stack]:
        """Sort private tensors by the sizes of clients, where they have a row per sample."""
        per_sample = self.method.role.per_sample & tensors.keys()
        if not per_sample:
            return [Stack(clients, tensors)] if tensors else []
        by_size: dict[int, list[int]] = {}
        for row, client in enumerate(clients):
            by_size.setdefault(self.rows.counts[client], []).append(row)
        found = []
        for size, rows in by_size.items():
            here = torch.tensor(rows, device=next(iter(tensors.values())).device)
            cut = {name: t[here, :size] if name in per_sample else t[here] for name, t in tensors.items()}
            found.append(Stack([clients[row] for row in rows], cut))
        return found

    def _hidden(
        self, hidden: RecordPrivacy, gradients: Tensors, clients: list[int], round_index: int, step: int
    ) -> Tensors:
        """Return the noisy mean of each client's cut gradients."""
        means = [
            hidden.noisy_mean(
                {name: tensor[row] for name, tensor in gradients.items()},
                self.sizes[client],
                self.private_seed,
                round_index,
                client,
                step,
            )
            for row, client in zip(range(len(next(iter(gradients.values())))), clients, strict=False)
        ]
        return {name: torch.stack([mean[name] for mean in means]) for name in gradients}


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
