"""Canaries for one-run auditing: images, or clients, that are in a run by the toss of a coin.

At record level canaries are images with wrong labels that some clients train on; the auditor looks
for what each does to its client's messages. At client level they are updates of full norm, each in
a random direction; the auditor looks for them in the model that everybody sees.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.audit.evidence import Evidence, only_first
from fedvl.audit.finding import Epsilon
from fedvl.audit.imitation import ONE_STEP, Began, CannotImitateError, imitate, joined
from fedvl.audit.messages import Recorder, subtract
from fedvl.audit.one_run import CONFIDENCE, audit_guesses, epsilon_bound
from fedvl.evaluation.statistics import Numbers
from fedvl.federation.checks import length
from fedvl.federation.fixed_point import SUMMED_FIGURES, encode_update, rounding_error
from fedvl.federation.local import LocalEngine, Summed
from fedvl.federation.privacy import ClientPrivacy
from fedvl.federation.records import RoundFigures
from fedvl.federation.round import Federation
from fedvl.federation.stacks import Updates
from fedvl.methods.base import Samples, Update
from fedvl.runs.experiment import local_engine, make_federation
from fedvl.seeding import numpy_generator, torch_generator
from fedvl.tensors import Tensors

EPSILON_FINDING = "empirical-epsilon"
MAX_CANARIES, MAX_ROUNDS = 400, 10
FEW_CANARIES = 120  # images, where an encoder runs in each step
FAR = 2.0  # norm of a canary's update, as a multiple of what it is cut to or of the farthest client
MAX_ORTHOGONAL = 2**16  # numbers of a model, beyond which directions are not made orthogonal
AMPLITUDES = 60  # amplitudes of canaries that are tried
RIDGE = 1e-3  # of the least squares, as a share of the mean square of a signature


class Tossed(NamedTuple):
    """Canaries by their scores, and by whether they were in the run."""

    scores: Numbers
    included: NDArray[np.bool_]
    rounds: int
    spent: float  # epsilon that the account says of these rounds


def empirical_epsilon(evidence: Evidence) -> Epsilon | None:
    """Return the claimed epsilon and a lower bound of the true one; None without noise."""
    privacy = evidence.experiment.privacy
    if evidence.method.role.statistics and privacy.unit != "none":
        raise CannotImitateError("Canaries are placed in training, and this method sends sums of statistics.")
    if privacy.unit == "none" or not evidence.messages:
        return None
    tossed = toss_images(evidence) if privacy.unit == "record" else toss_clients(evidence)
    bound = audit_guesses(tossed.scores, tossed.included, privacy.delta)
    most = epsilon_bound(bound.canaries, bound.canaries, bound.canaries, privacy.delta)
    violated = bound.epsilon > privacy.epsilon
    whose = "images" if privacy.unit == "record" else "clients"
    verdict = (
        "The claimed guarantee does not hold."
        if violated
        else "This does not contradict the claim, and does not prove it: so many canaries can show an epsilon of "
        f"{most:.2g} at most."
    )
    return Epsilon(
        unit=privacy.unit,
        claimed=privacy.epsilon,
        delta=privacy.delta,
        spent=tossed.spent,
        rounds=tossed.rounds,
        bound=bound.epsilon,
        most=most,
        confidence=CONFIDENCE,
        canaries=bound.canaries,
        guesses=bound.guesses,
        right=bound.right,
        violated=violated,
        sentence=(
            f"Claimed: epsilon {privacy.epsilon:g} at delta {privacy.delta:g}. Measured: at least {bound.epsilon:.2f} at "
            f"{CONFIDENCE:.0%} confidence (one run of {tossed.rounds} rounds, {bound.canaries} canary {whose}, {bound.right} of "
            f"{bound.guesses} guesses right; Steinke et al., 2023). {verdict}"
        ),
    )


def tosses(count: int) -> NDArray[np.bool_]:
    return numpy_generator(0, "canaries").random(count) < 0.5


# --- images


class Planted(NamedTuple):
    """A client's canaries: its images without any, and the rows and coins of the canaries."""

    client: int
    base: Tensor
    canaries: Tensor
    included: NDArray[np.bool_]

    @property
    def rows(self) -> Tensor:
        return torch.cat([self.base, self.canaries[torch.from_numpy(self.included).to(self.base.device)]])


def toss_images(evidence: Evidence) -> Tossed:
    """Run the rounds with canary images, and score these by what was sent."""
    samples, planted = plant(evidence)
    rows = [own[:0] for own in evidence.training.rows]
    for each in planted:
        rows[each.client] = each.rows
    training = replace(evidence.training, samples=samples, rows=rows)
    engine = local_engine(replace(evidence.prepared, training=training))
    recorder = Recorder(engine, len(rows))
    federation = make_federation(evidence.prepared, engine)
    began = begin_rounds(federation, rounds_of(evidence))
    sent = {
        client: {message.round_index: message for message in messages} for client, messages in recorder.messages.items()
    }
    by_round: dict[int, list[tuple[int, Numbers, Numbers]]] = {}
    starts = np.cumsum([0, *(len(each.canaries) for each in planted)])
    for number, effects in enumerate(effects_of(evidence, samples, planted, began)):
        for index, message in sent.get(planted[number].client, {}).items():
            change = flat(subtract(message.update.tensors, message.before))
            by_round.setdefault(index, []).append((number, *coefficients(effects[index], change)))
    scores = np.zeros(starts[-1])
    for parts in by_round.values():
        usual = amplitude(*(np.concatenate([part[place] for part in parts]) for place in (1, 2)))
        for number, found, precision in parts:
            scores[starts[number] : starts[number + 1]] += precision * usual * (found - usual / 2)
    return Tossed(scores, np.concatenate([each.included for each in planted]), len(began), spent_by(federation))


def plant(evidence: Evidence) -> tuple[Samples, list[Planted]]:
    """Give clients canaries with wrong labels; no coin changes a client's number of batches."""
    batch, training = evidence.experiment.training.batch_size, evidence.training
    clients = [client for client, rows in enumerate(training.rows) if len(rows)]
    pool = evidence.own
    most = FEW_CANARIES if slow(evidence) else MAX_CANARIES
    each = max(1, min(batch - 1, len(pool) // len(clients), -(-most // len(clients))))
    clients = clients[: min(len(pool), most) // each]
    canaries = mislabelled(evidence, pool.take(torch.arange(each * len(clients), device=pool.labels.device)))
    samples = joined(evidence, training.samples, canaries)
    coins, found = tosses(each * len(clients)), []
    for number, client in enumerate(clients):
        rows = training.rows[client]
        room = -(-len(rows) // batch) * batch - each  # so that all canaries fit into the last batch
        places = torch.arange(number * each, (number + 1) * each, device=rows.device)
        coins_here = coins[number * each : (number + 1) * each]
        found.append(Planted(client, rows[: max(1, room)], len(training.samples) + places, coins_here))
    return samples, found


def mislabelled(evidence: Evidence, samples: Samples) -> Samples:
    """Give images wrong labels, by which they move a model far."""
    classes, generator = evidence.classes, torch_generator(0, "wrong labels")
    moved = torch.randint(1, max(classes, 2), samples.labels.shape, generator=generator).to(samples.labels.device)
    labels = (samples.labels + moved) % classes
    inputs = dict(samples.inputs)
    if "candidates" in inputs:
        inputs["candidates"] = torch.nn.functional.one_hot(labels, classes).to(inputs["candidates"])
    return Samples(inputs, labels)


def effects_of(
    evidence: Evidence, samples: Samples, planted: Sequence[Planted], began: Sequence[Began]
) -> Iterator[list[Tensor]]:
    """Yield by client and round what a step does without a canary, and what each adds to it."""
    rows = [
        own
        for each in planted
        for own in (each.base, *(torch.cat([each.base, row]) for row in torch.split(each.canaries, 1)))
    ]
    sums = (
        torch.stack([flat(seen.change) * len(own) for seen in of_rounds])  # a step is a mean
        for own, of_rounds in zip(rows, imitate(evidence, samples, rows, began, ONE_STEP, noise="cut"), strict=True)
    )
    for each in planted:
        found = torch.stack(list(islice(sums, 1 + len(each.canaries))), dim=1)
        yield [torch.cat([of_round[:1], of_round[1:] - of_round[0]]) for of_round in found]


def coefficients(effects: Tensor, change: Tensor) -> tuple[Numbers, Numbers]:
    """Return by least squares how much of each canary is in a change, and its precision."""
    gram = effects @ effects.T
    usual = float(gram.diagonal()[1:].mean())
    inverse = torch.linalg.inv(gram + (RIDGE * usual + 1e-30) * torch.eye(len(gram), dtype=gram.dtype))
    found = inverse @ (effects @ change)
    noise = float((change - effects.T @ found).square().sum()) / max(len(change) - len(gram), 1)
    precision = 1 / (inverse.diagonal().clamp(min=1e-30) * max(noise, 1e-30))
    return found[1:].numpy(), precision[1:].numpy()


def amplitude(found: Numbers, precision: Numbers) -> float:
    """Return the likeliest coefficient of a canary that is in, if half of them are."""
    largest = float(np.abs(found).max()) or 1.0
    grid = largest * np.geomspace(1e-3, 1.0, AMPLITUDES)
    # of each coefficient the likelihood of being in, as a multiple of that of being left out
    gains = precision * (found * grid[:, None] - grid[:, None] ** 2 / 2)
    return float(grid[int(np.logaddexp(0.0, gains).sum(1).argmax())])


def flat(tensors: Tensors) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)]).double().cpu()


# --- clients


class CanaryFederation(Federation):
    """A federation whose noisy mean has the updates of canary clients in it."""

    canaries: "Canaries"

    def _merged(self, round_index: int, good: Updates) -> tuple[Tensors, RoundFigures]:
        """Add the canaries to the updates before they are cut and summed."""
        norms = [length(subtract(update.tensors, self.shared)) for update in good]
        own = self.canaries.updates(round_index, self.shared, FAR * max([*norms, 1e-6]))
        merged, figures = super()._merged(round_index, Updates.of([*good, *own]))
        assert figures.clip is not None, "updates of a private run are clipped"
        self.canaries.learn(self.shared, good, figures.clip)
        return merged, figures


class Canaries:
    """Clients that each move in a direction of their own, if the coin and the sample say so."""

    def __init__(self, shared: Tensors, privacy: ClientPrivacy, count: int) -> None:
        self.privacy, self.included = privacy, tosses(count)
        numbers = sum(tensor.numel() for tensor in shared.values())
        directions = torch.randn(count, numbers, generator=torch_generator(0, "canary directions"))
        if numbers < MAX_ORTHOGONAL:  # of many numbers random directions hardly meet
            directions = torch.linalg.qr(directions.T)[0].T
        self.directions = normalize(directions, dim=1)
        self.draws = numpy_generator(0, "canary sample")
        self.real: list[Tensor] = []  # what the other clients moved in each round, all together
        self.clips: list[float] = []

    def moves(self, round_index: int) -> list[int]:
        """Return the canaries that take part in a round."""
        drawn = self.draws.random(len(self.included)) < self.privacy.rate
        return np.flatnonzero(self.included & drawn).tolist()

    def updates(self, round_index: int, shared: Tensors, norm: float) -> list[Update]:
        norm = max(norm, FAR * (self.privacy.config.clip or 0.0))
        first = self.privacy.clients  # numbers that no client has
        return [Update(first + j, self._moved(shared, j, norm), 1.0) for j in self.moves(round_index)]

    def summed(self, round_index: int, shared: Tensors, clients: int) -> Tensor:
        """Return the canaries' part of a secure sum: what they move alone, and no other number."""
        assert self.privacy.config.clip is not None, "requirements.py asks for it"
        norm = self.privacy.config.clip - rounding_error(shared)
        total = torch.zeros(sum(tensor.numel() for tensor in shared.values()) + SUMMED_FIGURES, dtype=torch.long)
        for j in self.moves(round_index):
            part = encode_update(self._moved(shared, j, norm), shared, 1.0, 0.0, clients)
            total[:-SUMMED_FIGURES] += part[:-SUMMED_FIGURES]
        return total

    def learn(self, shared: Tensors, updates: Iterable[Update], clip: float) -> None:
        """Note what the other clients moved: an auditor knows all but coins and noise."""
        total = torch.zeros(self.directions.shape[1], dtype=torch.float64)
        for update in updates:
            moves = {name: update.tensors[name].double() - shared[name].double() for name in shared}
            moves = self.privacy.subspace.project(moves) if self.privacy.subspace else moves
            total += flat(moves) * min(1.0, clip / max(length(moves), 1e-30))
        self.real.append(total)
        self.clips.append(clip)

    def scores(self, changes: Sequence[Tensor]) -> Numbers:
        """Return how much of each canary is in the model's changes, over all rounds."""
        found = np.zeros(len(self.included))
        for change, real, clip in zip(changes, self.real, self.clips, strict=True):
            left = self.privacy.expected * change - real
            found += (self.directions.double() @ left).numpy() / clip
        return found

    def _moved(self, shared: Tensors, number: int, norm: float) -> Tensors:
        parts = torch.split(norm * self.directions[number].double(), [shared[name].numel() for name in sorted(shared)])
        return {
            name: shared[name] + part.view(shared[name].shape).to(shared[name])
            for name, part in zip(sorted(shared), parts, strict=True)
        }


def toss_clients(evidence: Evidence) -> Tossed:
    """Run the rounds with canary clients, and score these by the model that everybody sees."""
    prepared = evidence.prepared
    engine = local_engine(prepared)
    plain = make_federation(prepared, engine)
    assert isinstance(plain.privacy, ClientPrivacy), "its unit is a client"
    federation = CanaryFederation(**vars(plain))
    count = min(MAX_CANARIES, sum(tensor.numel() for tensor in plain.shared.values()) // 2)
    canaries = federation.canaries = Canaries(plain.shared, plain.privacy, count)
    if plain.config.secure_sum:
        add_to_sums(engine, canaries)
    began = begin_rounds(federation, rounds_of(evidence))
    states = [*(before for _, before in began), federation.shared]
    changes = [flat(subtract(after, before)) for before, after in pairwise(states)]
    return Tossed(canaries.scores(changes), canaries.included, len(began), spent_by(federation))


def add_to_sums(engine: LocalEngine, canaries: Canaries) -> None:
    """Add the canaries to every secure sum of an engine."""
    add, clients = engine.sum_updates, engine.method.task.clients

    def with_canaries(round_index: int, cohort: Sequence[int], shared: Tensors) -> Summed:
        summed = add(round_index, cohort, shared)
        canaries.learn(shared, [trained.update for trained in summed.trained], float("inf"))  # they are cut already
        canaries.clips[-1] = canaries.privacy.config.clip or 1.0
        return summed._replace(total=summed.total + canaries.summed(round_index, shared, clients))

    vars(engine)["sum_updates"] = with_canaries


# --- rounds


def slow(evidence: Evidence) -> bool:
    """Whether training runs an encoder in each step."""
    return evidence.slow or evidence.method.through_encoder


def rounds_of(evidence: Evidence) -> int:
    return len(evidence.rounds) if slow(evidence) else min(MAX_ROUNDS, evidence.experiment.federation.rounds)


def spent_by(federation: Federation) -> float:
    """Return the epsilon that the rounds of a private run have spent."""
    spent = federation.records[-1].privacy
    assert spent is not None, "every round of a private run has its budget"
    return spent.epsilon


def begin_rounds(federation: Federation, rounds: int) -> list[Began]:
    """Run the first rounds; return what each began with."""
    began: list[Began] = []
    federation.config = only_first(federation, rounds)

    def evaluate(shared: Tensors, last: Any, number: int) -> RoundFigures:
        began.append((number - 1, federation.shared))
        return RoundFigures()

    federation.run(evaluate)
    return began
