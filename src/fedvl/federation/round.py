"""The only loop: (consult ->) choose -> train -> check -> merge -> evaluate -> commit."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch

from fedvl.config import FederationConfig
from fedvl.errors import FedVLError
from fedvl.federation.checks import (
    Refusal,
    Report,
    SpoiledSumError,
    all_same,
    compare_moves,
    diverged,
    mean_loss,
    sort_out,
    sum_of_reports,
    unsound,
)
from fedvl.federation.fixed_point import decode_updates, moved
from fedvl.federation.journal import BEST, SERVER, Journal, RoundState, best_round, chosen_round, read_state
from fedvl.federation.local import LocalEngine, Summed
from fedvl.federation.merging import drift, last_updates, merge, moves_of
from fedvl.federation.one_step import mean_step
from fedvl.federation.privacy import ClientPrivacy, RecordPrivacy
from fedvl.federation.private_tensors import PrivateTensors
from fedvl.federation.records import Budget, Record, Refused, RoundFigures
from fedvl.federation.robust import RULES, Rule, by_root
from fedvl.federation.stacks import Answers, Trained, Updates
from fedvl.federation.statistics import Statistics, no_statistics
from fedvl.federation.statistics_privacy import StatisticsPrivacy
from fedvl.methods.base import Mean, Method, overrides
from fedvl.seeding import numpy_generator
from fedvl.tensors import ByClient, Tensors, count_bytes, flatten


class Engine(Protocol):
    """Where clients are trained: in this process or on other machines."""

    @property
    def private(self) -> MutableMapping[int, Tensors]: ...

    @property
    def clients(self) -> int: ...

    @property
    def sizes(self) -> list[int]:
        """Return the clients' numbers of records, images or units; empty if unknown."""

    def train(
        self, round_index: int, cohort: Sequence[int], shared: Tensors, own: Mapping[int, Tensors] | None = None
    ) -> Sequence[Trained]: ...

    def sum_updates(self, round_index: int, cohort: Sequence[int], shared: Tensors) -> Summed: ...

    def sum_statistics(self, round_index: int, cohort: Sequence[int], shared: Tensors) -> Statistics: ...

    def personalise(self, shared: Tensors) -> None:
        """Let each client make what it keeps of a solution, unless it does so itself."""

    def keep(self, trained: Sequence[Trained]) -> None: ...

    def refused(self) -> list[Refusal]: ...

    def report(self, round_index: int, shared: Tensors) -> tuple[list[Report], list[Refusal]]: ...

    def adopt(self, settlements: Mapping[int | None, Tensors]) -> None: ...

    def private_of(self, client: int) -> Tensors:
        """Return a client's private tensors; nothing where they stay on its machine."""

    def local_flops(self, shared: Tensors) -> int | None:
        """Return the operations of a client's round; None where it is not known."""


class Consulted(NamedTuple):
    """What went over the wire before a round, besides the shared tensors."""

    consulted: int = 0  # clients
    bytes_up: int = 0
    bytes_down: int = 0
    refusals: Sequence[Refusal] = ()


class Gathered(NamedTuple):
    """A cohort, what its clients trained, which updates count, and what was handed out."""

    cohort: list[int]
    trained: Answers
    good: Updates
    refusals: list[Refusal]
    handed: ByClient
    usual: float  # move of a client, up to this round


class RoundOutcome(NamedTuple):
    """What a round comes to, before it is evaluated and committed."""

    cohort: list[int]
    dropped: list[int]
    counted: Answers
    refusals: list[Refusal]
    handed: ByClient
    merged: Tensors
    share: float  # of all clients that the mean is of; 0: of a round without any update
    last: ByClient
    loss: float | None
    bytes_up: int
    figures: RoundFigures
    server: Tensors = {}


@dataclass
class Federation:
    """A run between two rounds: shared tensors, last updates, and records so far.

    It begins with all tensors of the method's ``start``; those that stay on the server are apart.
    """

    method: Method
    engine: Engine
    config: FederationConfig
    seed: int
    shared: Tensors
    records: list[Record] = field(default_factory=list)
    journal: Journal | None = None
    last: ByClient = field(default_factory=dict)  # the tensors of each client's last update that the method needs
    examples: dict[int, int] = field(default_factory=dict)  # that each client declared when it first counted
    device: torch.device | str = "cpu"  # where restored tensors go
    root: LocalEngine | None = None  # the server's own images, as those of one client
    privacy: ClientPrivacy | RecordPrivacy | StatisticsPrivacy | None = None
    best: Tensors = field(default_factory=dict)  # all state of the best round, where rounds are validated
    server: Tensors = field(
        default_factory=dict
    )  # tensors that never leave the server, and the latest sums of statistics

    def __post_init__(self) -> None:
        self.shared, server = self.method.role.split(self.shared)
        sums = no_statistics(self.method.role.statistics_shapes, self.device)
        self.server = {**self.server, **server, **sums}

    @property
    def trains(self) -> bool:
        """Whether there is anything to train, shared or private."""
        return bool(self.shared or self.method.role.trained_private)

    def run(
        self,
        evaluate: Callable[[Tensors, ByClient, int], RoundFigures] = lambda shared, last, number: RoundFigures(),
        after_round: Callable[[Record], None] = lambda record: None,
    ) -> None:
        """Run the rounds that are still to come; a round that was committed is not run again."""
        for round_index in range(len(self.records), self.config.rounds):
            if self._out_of_patience():  # a run that was stopped before it could write its result
                return
            began = time.perf_counter()
            spent = RoundFigures(privacy=self._spend()) if self.privacy else RoundFigures()
            exchange = self._consult(round_index)
            found = self._outcome(round_index)
            self.engine.keep(found.counted)
            record = Record(
                round=round_index + 1,
                cohort=found.cohort,
                dropped=found.dropped,
                refused=[Refused(**refusal._asdict()) for refusal in (*exchange.refusals, *found.refusals)],
                loss=None if self.privacy else found.loss,  # noise does not cover it
                bytes_up=exchange.bytes_up + found.bytes_up,
                bytes_down=exchange.bytes_down + self._bytes_handed(found.handed, exchange.consulted),
                seconds=time.perf_counter() - began,
            ).joined(found.figures, spent, evaluate(found.merged, found.last, round_index + 1))
            self._commit(round_index + 1, found, record)
            self.shared, self.server, self.last = found.merged, found.server, found.last
            self._learn(record)
            self.records.append(record)
            after_round(record)

    def _spend(self) -> Budget:
        """Return what the rounds so far and the next one spend of the privacy budget."""
        assert self.privacy is not None
        before = [record.privacy for record in self.records if record.privacy]
        return self.privacy.spend(before, self.engine.sizes)

    def _outcome(self, round_index: int) -> "RoundOutcome":
        if self.method.role.statistics:
            return self._solve(round_index)
        if self.config.secure_sum:
            found = self._sum_up(round_index)
        else:
            found = self._step_together(round_index) if self.config.one_step else self._merge_each(round_index)
        return self._stepped(round_index, found) if found.share else found._replace(server=self.server)

    def _stepped(self, round_index: int, found: "RoundOutcome") -> "RoundOutcome":
        """Take the method's step on the mean."""
        before = {**self.shared, **self.server}
        stepped = self.method.step(before, Mean(found.merged, found.share))
        shapes = {**before, **found.merged}
        for name, tensor in stepped.items():
            if name not in shapes or tensor.shape != shapes[name].shape:
                raise FedVLError(
                    f"{type(self.method).__name__}.step returns {name!r} of shape {tuple(tensor.shape)}, which is not a "
                    "tensor of start in its shape; return tensors of start."
                )
            if stepped is not found.merged and not bool(tensor.isfinite().all()):
                raise FedVLError(
                    f"{name!r} is not finite after the server's step of round {round_index + 1}; lower the learning rates "
                    "and start a new run."
                )
        shared, server = self.method.role.split({**before, **stepped})
        return found._replace(merged=shared, server=server)

    def _step_together(self, round_index: int) -> "RoundOutcome":
        """Take the mean of the clients' single steps, without any of them by itself."""
        if not isinstance(self.engine, LocalEngine):
            raise FedVLError("federation.one_step is for simulations in one process; leave it out.")
        cohort, answering = self._choose(round_index, 0)
        found = mean_step(self.engine, round_index, answering, self.shared)
        return RoundOutcome(
            cohort=cohort,
            dropped=sorted(set(cohort) - set(found.clients)),
            counted=Answers(),
            refusals=[],
            handed=dict.fromkeys(cohort, self.shared),
            merged=found.merged,
            share=len(found.clients) / self.engine.clients,
            last={},
            loss=found.loss,
            bytes_up=len(found.clients) * count_bytes(self.shared),
            figures=RoundFigures(),
        )

    def _solve(self, round_index: int) -> "RoundOutcome":
        """Solve for the shared tensors, given the sums of the clients' statistics."""
        refusals: list[Refusal] = []
        noise = self.privacy if isinstance(self.privacy, StatisticsPrivacy) else None
        # the same noise on sums over other clients would show how they differ
        for attempt in range(1 if noise else self.config.attempts):
            cohort, answering = self._choose(round_index, attempt)
            found = self.engine.sum_statistics(round_index, answering, self.shared)
            refusals += self.engine.refused()
            if len(found.clients) >= self.config.quorum:
                break
        else:
            raise self._no_quorum(round_index, len(found.clients), refusals)
        if noise and noise.by_server:
            found = found._replace(total=noise.noised(found.total, noise.seed, round_index))
        # in the order in which a journal has them: sums over another order have other bits after a resumed run
        solved = {name: tensor.contiguous() for name, tensor in self.method.solve(self.shared, found.total).items()}
        for name, tensor in self.shared.items():
            if name not in solved or solved[name].shape != tensor.shape or not bool(solved[name].isfinite().all()):
                raise FedVLError(
                    f"{type(self.method).__name__}.solve must return every tensor of start in its shape and finite, and "
                    f"{name!r} is not."
                )
        self.engine.personalise(solved)
        return RoundOutcome(
            cohort=cohort,
            dropped=sorted(set(cohort) - set(found.clients)),
            counted=Answers(),
            refusals=refusals,
            handed=dict.fromkeys(cohort, self.shared),
            merged=solved,
            share=len(found.clients) / self.engine.clients,
            last=found.each,
            loss=None,
            bytes_up=found.bytes_up,
            figures=RoundFigures(),
            server=found.total,
        )

    def _commit(self, number: int, found: "RoundOutcome", record: Record) -> None:
        """Write the round down, with the tensors of the best one so far.

        Where rounds are validated all is written, since the best may be any; else what changed.
        """
        validated = "validation" in record.model_fields_set
        best = validated and best_round([*self.records, record]) == number
        if not (best or self.journal):  # to name the tensors of many clients takes its time
            return
        private = self.engine.private
        new = private.changed() if isinstance(private, PrivateTensors) and not validated else None
        adds = self.journal is not None and new is not None and self.journal.can_add(number)
        everything = self._everything(found, new if adds else None)
        earlier = dict[str, torch.Tensor]()
        if best:
            self.best = everything
        elif self.best:
            earlier = {f"{BEST}{name}": tensor for name, tensor in self.best.items()}
        if self.journal:
            self.journal.commit(number, everything | earlier, record, adds)

    def return_to_best(self) -> None:
        """Take back the tensors of the round that was best on the validation images."""
        self.engine.private.clear()
        self._place(read_state(self.best, self.device))

    def _out_of_patience(self) -> bool:
        best = best_round(self.records)
        return bool(self.config.patience and best and len(self.records) - best >= self.config.patience)

    def _merge_each(self, round_index: int) -> "RoundOutcome":
        """Check the update of each client, and merge those that are sound."""
        cohort, trained, good, refusals, handed, usual = self._gather(round_index)
        counted = trained.counted(good)
        merged, noise = self._merged(round_index, good)
        # in one process sizes are known, and nobody declares anything
        declared = {} if self.engine.sizes else {str(r.update.client): r.examples for r in counted if self._is_new(r)}
        return RoundOutcome(
            cohort=cohort,
            dropped=sorted(set(cohort) - set(trained.clients)),
            counted=counted,
            refusals=refusals,
            handed=handed,
            merged=merged,
            share=self.privacy.rate if isinstance(self.privacy, ClientPrivacy) else len(good) / self.engine.clients,
            last=last_updates(self.method, self.last, good),
            loss=mean_loss(counted.losses) if len(counted) else 0.0,
            bytes_up=trained.bytes,
            figures=RoundFigures(
                usual_move=usual,
                declared=declared,
            ).joined(noise, self._moved(counted, handed) if self.config.drift else RoundFigures()),
        )

    def _rule(self, round_index: int) -> Rule:
        """Return how moves are merged in this round."""
        if self.root is None:
            return RULES[self.config.robust]
        trained = self.root.train(round_index, [0], self.shared)
        self.root.keep(trained)
        summed = [name for name in self.shared if self.method.role.needs(name) == "sum"]
        root = moves_of(self.shared, Updates.of(Answers.of(trained).updates), summed)[0]
        return lambda moves, weights: by_root(moves, root)

    def _merged(self, round_index: int, good: Updates) -> tuple[Tensors, RoundFigures]:
        if not isinstance(self.privacy, ClientPrivacy):
            return merge(self.method, self.shared, good, self._rule(round_index)), RoundFigures()
        merged, clip = self.privacy.merge(round_index, self.shared, good, self.records)
        return merged, RoundFigures(clip=clip)

    def _sum_up(self, round_index: int) -> "RoundOutcome":
        """Take the sum of the clients' moves, of which no single one is known."""
        cohort, answering = self._choose(round_index, 0)
        try:
            summed = self.engine.sum_updates(round_index, answering, self.shared)
        except SpoiledSumError as error:
            return self._void(cohort, str(error))
        total = decode_updates(summed.total, self.shared)
        if reason := unsound(total, len(summed.clients), self.config):
            raise FedVLError(
                f"The sum of round {round_index + 1} {reason}; one of its clients is at fault: resume, or leave it out."
            )
        if isinstance(self.privacy, ClientPrivacy):
            # the clients have added the noise, in all directions
            moves = self.privacy.subspace.project(total.moves) if self.privacy.subspace else total.moves
            total = total._replace(weight=self.privacy.expected, moves=moves)
        return RoundOutcome(
            cohort=cohort,
            dropped=sorted(set(cohort) - set(summed.clients)),
            counted=Answers.of(summed.trained),
            refusals=self.engine.refused(),
            handed=dict.fromkeys(cohort, self.shared),
            merged=moved(self.shared, total),
            share=self.privacy.rate if isinstance(self.privacy, ClientPrivacy) else total.trained / self.engine.clients,
            last={},
            loss=total.loss / total.trained,
            bytes_up=summed.bytes_up,
            figures=RoundFigures(),
        )

    def _void(self, cohort: list[int], problem: str) -> "RoundOutcome":
        """Return a round without any update: its clients open one sum, which cannot be used."""
        return RoundOutcome(
            cohort=cohort,
            dropped=cohort,
            counted=Answers(),
            refusals=self.engine.refused(),
            handed=dict.fromkeys(cohort, self.shared),
            merged=self.shared,
            share=0.0,
            last={},
            loss=None,
            bytes_up=0,
            figures=RoundFigures(void=problem),
        )

    def restore(self) -> None:
        """Go on from the newest committed round of the journal, if there is one."""
        found = self.journal.latest() if self.journal else None
        if found is None:
            return
        tensors, self.records = found
        newest = {name: tensor for name, tensor in tensors.items() if not name.startswith(BEST)}
        self.best = chosen_round(tensors) if best_round(self.records) else {}
        for record in self.records:
            self._learn(record)
        self._place(read_state(newest, self.device))

    def _place(self, state: RoundState) -> None:
        """Go on from this state."""
        self.shared, self.server, self.last = state.shared, state.server, state.last
        if self.root is not None and self.engine.clients in state.private:
            self.root.private[0] = state.private.pop(self.engine.clients)
        self.engine.private.update(state.private)

    def _everything(self, found: "RoundOutcome", clients: Iterable[int] | None) -> Tensors:
        """Name state: shared/NAME, server/NAME, kept/CLIENT/NAME and CLIENT/NAME (private)."""
        named = {f"shared/{name}": tensor for name, tensor in found.merged.items()}
        named |= {f"{SERVER}{name}": tensor for name, tensor in found.server.items()}
        named |= {f"kept/{name}": tensor for name, tensor in flatten(found.last).items()}
        if self.root is not None:  # after the clients
            named |= flatten({self.engine.clients: self.root.private.get(0, {})})
        private = self.engine.private
        return named | flatten({client: private[client] for client in (private if clients is None else clients)})

    def _consult(self, round_index: int) -> Consulted:
        """Hold the method's exchange with all clients; it counts only if the round is committed."""
        consultation = self.method.consultation()
        if not (consultation and consultation.due(round_index)):
            return Consulted()
        reports, refusals = self.engine.report(round_index, self.shared)
        if not reports:
            return Consulted(refusals=refusals)
        total = sum_of_reports(reports).tensors
        if isinstance(self.privacy, ClientPrivacy):
            if not (self.config.secure_sum or isinstance(self.engine, LocalEngine)):
                # a server that restarts would draw new noise for counts that it has told already
                raise FedVLError("Between machines noise on reports is added by clients; use --secure-sum.")
            total = self.privacy.hide_counts(round_index, total, self.config.secure_sum)
        apart = not consultation.summed
        settlements = {
            report.client: consultation.settle(round_index, total, report.tensors if apart else None)
            for report in reports
        }
        self.engine.adopt(settlements)
        clients, answers = self.engine.clients, list(settlements.values())
        copies = 1 if apart else clients
        return Consulted(
            clients, clients * count_bytes(total), copies * sum(count_bytes(answer) for answer in answers), refusals
        )

    def _moved(self, trained: Sequence[Trained], handed: Mapping[int, Tensors]) -> RoundFigures:
        clients = [result.update.client for result in trained]
        before = [{**self.engine.private.get(client, {}), **handed[client]} for client in clients]
        after = [{**result.private, **result.update.tensors} for result in trained]
        role = self.method.role
        shared = [name for name in self.shared if role.shared(name).trained]
        names = [*shared, *(name for name in role.trained_private if name not in shared)]
        return RoundFigures.model_validate(drift(before, after, names))

    def _gather(self, round_index: int) -> "Gathered":
        """Redraw clients until a quorum gives usable updates, then fail."""
        refusals: list[Refusal] = []
        hidden = isinstance(self.privacy, ClientPrivacy)
        # a sample is taken as it comes, of nobody too: another draw would not be the one that is accounted for
        for attempt in range(1 if hidden else self.config.attempts):
            cohort, answering = self._choose(round_index, attempt)
            handed = self._handed(cohort)
            trained = Answers.of(self._train(round_index, answering, handed))
            asked = {
                **dict.fromkeys(cohort, 0),
                **dict(zip(trained.clients, trained.examples, strict=True)),
                **self.examples,
            }
            good, refused = sort_out(trained.updates, asked, handed, self.method, self.config)
            before = (self.records[-1].usual_move or 0.0) if self.records else 0.0
            role, ratio = self.method.role, self.config.max_norm_ratio
            far, usual = list[Refusal](), 0.0
            if not hidden:  # one client must not decide whether another counts
                good, far, usual = compare_moves(good, asked, handed, role, ratio, before)
            refusals += [*self.engine.refused(), *refused, *far]
            if len(good) >= (0 if hidden and len(cohort) < self.engine.clients else self.config.quorum):
                return Gathered(cohort, trained, good, refusals, handed, usual)
        if diverged(refused, len(trained)):
            raise FedVLError(
                f"Training diverged in round {round_index + 1}: of client {refused[-1].client}, {refused[-1].reason}; lower the "
                "learning rate (training.learning_rate) and start a new run."
            )
        raise self._no_quorum(round_index, len(good), refusals)

    def _no_quorum(self, round_index: int, answers: int, refusals: Sequence[Refusal]) -> FedVLError:
        reasons = f" Last refusal: client {refusals[-1].client}, {refusals[-1].reason}." if refusals else ""
        return FedVLError(
            f"Round {round_index + 1} got {answers} usable updates in its last of {self.config.attempts} attempts, fewer than "
            f"the quorum of {self.config.quorum}; committed rounds are safe: lower federation.quorum or wait for clients, "
            f"then resume.{reasons}"
        )

    def _handed(self, cohort: list[int]) -> ByClient:
        """Return what each client begins with: the shared tensors, unless the method says more."""
        if not overrides(self.method, "hand_out"):
            return dict.fromkeys(cohort, self.shared)
        return {client: self.method.hand_out(self.shared, self.last, client) for client in cohort}

    def _is_new(self, result: Trained) -> bool:
        return result.update.client not in self.examples

    def _learn(self, record: Record) -> None:
        """Hold clients to the examples that they declared when they first counted."""
        for client, examples in record.declared.items():
            self.examples.setdefault(int(client), examples)

    def _train(self, round_index: int, cohort: list[int], handed: ByClient) -> Sequence[Trained]:
        """Train from the shared tensors, or from what the method hands out to each client."""
        if self.config.sequential and round_index:
            return self._train_in_turn(round_index, cohort, handed)
        if all_same([self.shared, *handed.values()]):
            return self.engine.train(round_index, cohort, self.shared)
        return self.engine.train(round_index, cohort, self.shared, {client: handed[client] for client in cohort})

    def _train_in_turn(self, round_index: int, cohort: list[int], handed: ByClient) -> list[Trained]:
        """Train each client from the tensors of the one before; all send what the last one has."""
        trained: list[Trained] = []
        for client in cohort:
            shared = {name: trained[-1].update.tensors[name] for name in self.shared} if trained else {}
            before = {**handed[client], **shared}
            trained += self.engine.train(round_index, [client], self.shared, {client: before})
        last = trained[-1].update.tensors if trained else {}
        return [result._replace(update=result.update._replace(tensors=last)) for result in trained]

    def _bytes_handed(self, handed: ByClient, consulted: int) -> int:
        """Count what went down; a client that was consulted has the shared tensors already."""
        given = self.method.role.given
        if not consulted:
            several = Counter(map(id, handed.values()))  # most are the same
            states = dict(zip(map(id, handed.values()), handed.values(), strict=True))
            return sum(number * count_bytes(states[key]) for key, number in several.items())
        extra = sum(count_bytes({name: tensors[name] for name in given}) for tensors in handed.values())
        return count_bytes(self.shared) * consulted + extra

    def _choose(self, round_index: int, attempt: int) -> tuple[list[int], list[int]]:
        """Return a round's clients and those who answer; draws are as if nobody had withdrawn."""
        drawn = self._draw(round_index, attempt)
        withdrawn = () if self.method.scope == "pooled" else self.config.withdrawn
        if not (withdrawn or self.config.dropout):
            return drawn, drawn
        answering = set(self._answering(drawn, round_index, attempt))
        cohort = [client for client in drawn if client not in withdrawn]
        return cohort, [client for client in cohort if client in answering]

    def _draw(self, round_index: int, attempt: int) -> list[int]:
        if isinstance(self.privacy, ClientPrivacy):
            return self.privacy.choose(round_index)
        generator = numpy_generator(self.seed, "choose", round_index, attempt)
        count = min(self.config.per_round or self.engine.clients, self.engine.clients)
        drawn: list[int] = np.sort(generator.choice(self.engine.clients, count, replace=False)).tolist()
        return drawn

    def _answering(self, cohort: list[int], round_index: int, attempt: int) -> list[int]:
        if not self.config.dropout:
            return cohort
        draws = numpy_generator(self.seed, "dropout", round_index, attempt).random(len(cohort))
        return [client for client, draw in zip(cohort, draws, strict=True) if draw >= self.config.dropout]
