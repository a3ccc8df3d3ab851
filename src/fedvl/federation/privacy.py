"""Differential privacy: cut what one unit gives, add Gaussian noise, and count what is spent.

The unit is a client with all its images, hidden in the mean of a round, or a record,
one image of a client, hidden by the client in each of its steps (DP-SGD). Random numbers come from
SHAKE-256 of a seed and a purpose: the same again for a known seed, in simulation, and as secret as
the seed where it is a party's or the server's own.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvl.config import Experiment, PrivacyConfig, TrainingConfig
from fedvl.errors import FedVLError
from fedvl.federation.accounting import Account, Step, epsilon_of, least_sigma, sigma_for
from fedvl.federation.checks import length
from fedvl.federation.count_noise import CountNoise
from fedvl.federation.records import Budget, Record
from fedvl.methods.base import Update
from fedvl.seeding import derived_seed
from fedvl.tensors import Tensors, weighted_mean

RECORD_CLIP = 1.0
SEARCH_SHARE = 0.1  # of what the rounds spend, beside it, on finding the clip
SEARCH_STEPS = 6  # halvings of the range of the clip, on a scale of logarithms
TRACK_SHARE = 0.02  # of what a later round's sum spends, beside it, on one count that moves the clip
TRACK_RATE = 0.2  # of that move, on the same scale (Andrew et al., 2021)
SMALLEST, LARGEST = 2.0**-20, 2.0**4  # norms of updates that are found; others are cut or drowned


# --- random numbers


def uniforms(count: int, seed: int, *purpose: str | int) -> Tensor:
    """Draw numbers between 0 and 1, neither included, from a cryptographic stream."""
    text = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in purpose)])
    stream = np.frombuffer(hashlib.shake_256(text.encode()).digest(8 * count), dtype="<u8")
    return torch.from_numpy(((stream >> np.uint64(11)) + 0.5) * 2.0**-53)


def normals(count: int, seed: int, *purpose: str | int) -> Tensor:
    """Draw standard normal numbers from a cryptographic stream (Box and Muller)."""
    pairs = -(-count // 2)
    radius, angle = uniforms(2 * pairs, seed, *purpose).view(2, pairs)
    radius = (-2 * radius.log()).sqrt()
    return torch.cat([radius * (2 * math.pi * angle).cos(), radius * (2 * math.pi * angle).sin()])[:count]


def noise_for(tensors: Tensors, deviation: float, seed: int, *purpose: str | int) -> Tensors:
    """Draw noise of this deviation for every number, name by name."""
    return {
        name: (normals(tensor.numel(), seed, *purpose, name).view(tensor.shape) * deviation).to(tensor.device)
        for name, tensor in tensors.items()
    }


def noisy(tensors: Tensors, noise: Tensors) -> Tensors:
    return {name: (tensor.double() + noise[name]).to(tensor.dtype) for name, tensor in tensors.items()}


# --- cutting


class Subspace(NamedTuple):
    """Where updates may move: in public directions, as far as tensors have rows like features."""

    basis: Tensor  # orthonormal columns, of the features' width
    names: frozenset[str]  # of the tensors that are held to it

    def project(self, moves: Tensors) -> Tensors:
        return {
            name: move.double() @ self.basis @ self.basis.T if name in self.names else move
            for name, move in moves.items()
        }


def directions(features: Tensor, count: int) -> Tensor:
    """Return the orthonormal directions in which public features differ most."""
    centred = features.double() - features.double().mean(0)
    found: Tensor = torch.linalg.svd(centred, full_matrices=False).Vh
    if count > len(found):
        raise FedVLError(f"privacy.subspace is at most {len(found)} here, the server's images or the features' width.")
    return found[:count].T


def clipped_move(sent: Tensors, received: Tensors, clip: float) -> Tensors:
    """Shorten a move that is longer than ``clip``; one that is not stays as it is, to the bit."""
    moves = {name: sent[name].double() - received[name].double() for name in sent}
    norm = length(moves)
    if norm <= clip:
        return sent
    return {name: received[name].double() + move * (clip / norm) for name, move in moves.items()}


# --- what is spent


def stop_before(epsilon: float, ceiling: float, round_number: int) -> None:
    """Refuse a round that would spend more than there is."""
    if epsilon > ceiling * (1 + 1e-9):
        raise FedVLError(
            f"Round {round_number} would take epsilon to {epsilon:.3g}, above privacy.epsilon ({ceiling:g}); the model of the "
            "rounds before is the last that the budget allows."
        )


@dataclass(frozen=True)
class ClientPrivacy:
    """Hide each client in the mean of a round.

    The server adds the noise, and is trusted; in a secure sum each client adds a share of it.
    """

    config: PrivacyConfig
    rounds: int
    clients: int
    expected: int  # clients in a round, by which their sum is divided whoever answers
    seed: int
    subspace: Subspace | None = None
    counts: CountNoise | None = None  # on what clients report before rounds

    @property
    def rate(self) -> float:
        return self.expected / self.clients

    @cached_property
    def sigma(self) -> float:
        """The noise multiplier of a round's sum, so that all rounds together spend epsilon."""
        return least_sigma(
            self.config.epsilon, self.config.delta, lambda sigma: Counter(self._plan(sigma)), self.account
        )

    @property
    def account(self) -> Account:
        """The accountant: Rényi divergences bound discrete noise as they do Gaussian noise."""
        return "rdp" if self.counts else "pld"

    def _plan(self, sigma: float) -> Iterable[Step]:
        updates = 0 if self.counts and self.counts.alone else self.rounds
        yield from (Step(self.rate, self._with_search(sigma, first=index == 0)) for index in range(updates))
        if self.counts:
            yield from [self.counts.step(self._of_counts(sigma))] * len(self.counts.due)

    def _of_counts(self, sigma: float) -> float:
        """Return the noise multiplier of a report where that of an update is ``sigma``."""
        return self.counts.multiplier(sigma * self.rate, self.rounds) if self.counts else 0.0

    def _with_search(self, sigma: float, first: bool) -> float:
        """Return the noise multiplier of a round, where counts and the sum are one release."""
        if self.config.clip is not None:
            return sigma
        return sigma / math.sqrt(1 + (SEARCH_SHARE * self.rounds if first else TRACK_SHARE))

    def spend(self, before: Sequence[Budget], sizes: Sequence[int]) -> Budget:
        """Return the budget after another round, for its record; refuse a round too many."""
        due = len(before) in self.counts.due if self.counts else False
        counts = self.counts.step(self._of_counts(self.sigma)).sigma if self.counts and due else None
        step = Step(self.rate, self._with_search(self.sigma, first=not before))
        rounds = [(Step(*each.step), each.counts) for each in before]
        epsilon = epsilon_of(Counter(self._spent([*rounds, (step, counts)])), self.config.delta, self.account)
        stop_before(epsilon, self.config.epsilon, len(before) + 1)
        sampling = "every client in every round"
        if self.rate < 1:
            sampling = f"each client in a round by a secret chance of {self.rate:.4g} (Poisson sampling)"
        spent = Budget(unit="client", epsilon=epsilon, delta=self.config.delta, sampling=sampling, **step._asdict())
        return spent.model_copy(update={"counts": counts}) if due else spent

    def _spent(self, rounds: Iterable[tuple[Step, float | None]]) -> Iterable[Step]:
        """Return the noisy releases of rounds: updates, and reports before them."""
        for step, counts in rounds:
            if not (self.counts and self.counts.alone):
                yield step
            if counts is not None:
                yield Step(1.0, counts)

    def step_of(self, kind: str) -> Step | None:
        """Return the noisy release of an update ("train") or report; None where clients send
        none.
        """
        if kind == "report":
            return self.counts.step(self._of_counts(self.sigma)) if self.counts else None
        return None if self.counts and self.counts.alone else Step(self.rate, self.sigma)

    def hide_counts(self, round_index: int, total: Tensors, in_shares: bool) -> Tensors:
        """Return the denoised sum of reports, to which the server adds noise if clients did not."""
        if self.counts is None:
            return total
        sigma = self._of_counts(self.sigma)
        if not in_shares:
            total = self.counts.added(total, sigma, self.seed, round_index)
        return {name: self.counts.denoised(tensor, sigma) for name, tensor in total.items()}

    def share_of_counts(self, numbers: int, seed: int, *purpose: str | int) -> Tensor:
        """Draw a client's share of the noise on a sum of reports, in whole numbers."""
        assert self.counts is not None
        return self.counts.draw(numbers, self._of_counts(self.sigma), seed, *purpose)

    def choose(self, round_index: int) -> list[int]:
        """Draw the clients of a round, each by itself: the account is of such samples."""
        if self.expected == self.clients:
            return list(range(self.clients))
        drawn = uniforms(self.clients, self.seed, "choose", round_index) < self.rate
        return [client for client in range(self.clients) if drawn[client]]

    def clip_of(self, round_index: int, records: Sequence[Record], norms: Sequence[float]) -> float:
        """Return the norm to cut to: the setting, or near the median, found and followed by counts.

        A client moves a count less a half for each client by a half.
        """
        if self.config.clip is not None:
            return self.config.clip
        counts, share = (1, TRACK_SHARE) if records else (SEARCH_STEPS, SEARCH_SHARE * self.rounds)
        noise = normals(counts, self.seed, "clip", round_index) * 0.5 * self.sigma * math.sqrt(counts / share)

        def above(clip: float, index: int) -> float:
            return sum(0.5 if norm > clip else -0.5 for norm in norms) + float(noise[index])

        if records:
            last = records[-1].clip or 0.0
            part = min(max(above(last, 0) / self.expected, -0.5), 0.5)
            return min(max(last * math.exp(TRACK_RATE * part), SMALLEST), LARGEST)
        low, high = math.log2(SMALLEST), math.log2(LARGEST)
        for index in range(SEARCH_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if above(2**middle, index) > 0 else (low, middle)
        return float(2 ** ((low + high) / 2))

    def merge(
        self, round_index: int, shared: Tensors, updates: Sequence[Update], records: Sequence[Record]
    ) -> tuple[Tensors, float]:
        """Return the noisy mean of the cut updates, and the clip; who is missing has not moved."""
        if not shared:
            return shared, 0.0
        sent = [self._within(update.tensors, shared) for update in updates]
        moves = [{name: tensors[name] - shared[name] for name in shared} for tensors in sent]
        clip = self.clip_of(round_index, records, [length(move) for move in moves])
        cut = [clipped_move(tensors, shared, clip) for tensors in sent]
        mean = weighted_mean([shared, *cut], [self.expected - len(cut), *(1.0 for _ in cut)])
        return self.add_noise(round_index, mean, clip), clip

    def _within(self, sent: Tensors, shared: Tensors) -> Tensors:
        """Take out of an update what is not in the public subspace."""
        if self.subspace is None:
            return sent
        moves = self.subspace.project({name: sent[name].double() - shared[name].double() for name in shared})
        return {name: shared[name].double() + move for name, move in moves.items()}

    def share(self, numbers: int, least: int, seed: int, *purpose: str | int) -> Tensor:
        """Draw a client's share of a sum's noise: any ``least`` clients add all of it, or more."""
        assert self.config.clip is not None, "requirements.py asks for it"
        if not self.sigma:
            return torch.zeros(numbers, dtype=torch.float64)
        deviation = self.sigma * self.config.clip / math.sqrt(least)
        return normals(numbers, seed, "share of noise", *purpose) * deviation

    def add_noise(self, round_index: int, mean: Tensors, clip: float) -> Tensors:
        deviation = self.sigma * clip / self.expected if self.sigma else 0.0
        if not deviation:
            return mean
        noise = noise_for(mean, deviation, self.seed, "noise", round_index)
        return noisy(mean, self.subspace.project(noise) if self.subspace else noise)


# --- records


@dataclass(frozen=True)
class RecordPrivacy:
    """Hide each image of a client in the client's own steps, before anything leaves it.

    The number of a client's images is public: its weight and its number of steps follow from it.
    Where several images are of one unit, such as a patient, ``images`` counts units.
    """

    config: PrivacyConfig
    training: TrainingConfig
    rounds: int
    of: str = "image"

    @property
    def clip(self) -> float:
        return self.config.clip or RECORD_CLIP

    def batches(self, images: int) -> int:
        """Return the steps of an epoch, as in plain training; an image is in each by 1 / this."""
        return -(-images // self.training.batch_size)

    def sigma(self, images: int, rounds: int) -> float:
        """Return the noise multiplier of a client that takes part in so many rounds."""
        batches = self.batches(images)
        steps = rounds * self.training.local_epochs * batches
        return sigma_for(self.config.epsilon, 1 / batches, steps, self.config.delta)

    def spend(self, before: Sequence[Budget], sizes: Sequence[int]) -> Budget:
        """Return the budget after another round, for its record: of who spends the most.

        Where sizes are not known the ceiling is told: each client counts for itself.
        """
        planned = [*(each.planned or self.rounds for each in before), self.rounds]
        kinds = {self.batches(images): images for images in sizes if images}
        epsilon = max((self._epsilon(images, planned) for images in kinds.values()), default=self.config.epsilon)
        stop_before(epsilon, self.config.epsilon, len(planned))
        sampling = f"each {self.of} in a step by a secret chance (Poisson sampling), each client in every round"
        return Budget(unit="record", epsilon=epsilon, delta=self.config.delta, sampling=sampling, planned=self.rounds)

    def steps(self, images: int, rounds: int) -> tuple[Step, int]:
        """Return the steps of one round, of so many planned, and how many there are."""
        batches = self.batches(images)
        return Step(1 / batches, self.sigma(images, rounds)), self.training.local_epochs * batches

    def _epsilon(self, images: int, planned: Sequence[int]) -> float:
        spent = Counter[Step]()
        for rounds in planned:
            step, count = self.steps(images, rounds)
            spent[step] += count
        return epsilon_of(spent, self.config.delta)

    def draw(self, images: int, seed: int, *purpose: str | int) -> list[Tensor]:
        """Draw the images of each step of a round, each image by itself."""
        batches = self.batches(images)
        steps = self.training.local_epochs * batches
        drawn = uniforms(steps * images, seed, "batches", *purpose).view(steps, images)
        return [row.nonzero()[:, 0] for row in drawn < 1 / batches]

    def noisy_mean(self, total: Tensors, images: int, seed: int, *purpose: str | int) -> Tensors:
        """Add noise to the sum of a step's cut gradients; divide by the images expected in it."""
        deviation = self.sigma(images, self.rounds) * self.clip
        with_noise = noisy(total, noise_for(total, deviation, seed, "noise", *purpose)) if deviation else total
        return {name: tensor / (images / self.batches(images)) for name, tensor in with_noise.items()}


def row_gradients(gradients: Tensors, mask: Tensor, clip: float, units: Tensor | None = None) -> Tensors:
    """Return the sum of one client's gradients (rows first), each cut over all tensors.

    With ``units``, the mean gradient of each unit's rows is cut.
    """
    if units is not None:
        first = (units[:, None] == units).int().argmax(1)  # row of each unit that stands for all of them
        real = {name: gradient * mask.view(-1, *[1] * (gradient.dim() - 1)) for name, gradient in gradients.items()}
        count = torch.zeros_like(mask).index_add(0, first, mask)
        gradients = {
            name: torch.zeros_like(rows).index_add(0, first, rows)
            / count.clamp(min=1).view(-1, *[1] * (rows.dim() - 1))
            for name, rows in real.items()
        }
        mask = (count > 0).to(mask)
    norms = (
        torch.stack([gradient.reshape(len(mask), -1).pow(2).sum(1) for gradient in gradients.values()]).sum(0).sqrt()
    )
    factors = mask / (norms / clip).clamp(min=1)
    return {name: torch.tensordot(factors.to(gradient), gradient, 1) for name, gradient in gradients.items()}


def spent_on(experiment: Experiment) -> str:
    """Return what the budget is of: client, image, or the column of whose images they are."""
    return "client" if experiment.privacy.unit == "client" else experiment.data.unit or "image"


def noise_seed(experiment: Experiment) -> int:
    """Return the seed of a simulation's noise and samples.

    It is another one if clients withdrew or images were added: the difference of two models with
    the same noise would show what the noise hides.
    """
    withdrawn, additions = experiment.federation.withdrawn, experiment.data.additions
    if experiment.privacy.unit == "none" or not (withdrawn or additions):
        return experiment.seed
    seed = derived_seed(experiment.seed, "noise without", *sorted(withdrawn)) if withdrawn else experiment.seed
    return derived_seed(seed, "noise with", *additions) if additions else seed


def privacy_of(
    experiment: Experiment, seed: int, subspace: Subspace | None = None, counts: CountNoise | None = None
) -> ClientPrivacy | RecordPrivacy | None:
    """Return what the settings ask for; ``seed`` is of the server's noise."""
    config, federation, clients = experiment.privacy, experiment.federation, experiment.data.clients
    if config.unit == "client":
        expected = min(federation.per_round or clients, clients)
        return ClientPrivacy(config, federation.rounds, clients, expected, seed, subspace, counts)
    if config.unit == "record":
        return RecordPrivacy(config, experiment.training, federation.rounds, spent_on(experiment))
    return None
