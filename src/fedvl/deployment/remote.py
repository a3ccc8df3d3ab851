"""Clients on other machines: the engine that writes them messages and reads their answers.

A client's private tensors stay with it. The server knows each set of them by a name only: a
request names those to begin with, the answer those that resulted, and the names of what was
counted are in the server's journal in place of the tensors. So a client's training becomes its
present exactly when the round that it was for is committed, whoever is killed when.
"""

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch

from fedvl.config import FederationConfig
from fedvl.data import survey
from fedvl.deployment.audit_log import AuditLog
from fedvl.deployment.class_lists import NAMES_OF_CLASSES, names_of_tensors
from fedvl.deployment.messages import Header, Message, MessageKind, pack_tensors, unpack_tensors
from fedvl.deployment.own_counts import OTHER_RUN, PAIRED
from fedvl.deployment.summing import Received, SecureSums
from fedvl.errors import FedVLError
from fedvl.evaluation.counts import MAX_IMAGES, PAIR, Counts, misstated, misstated_pair, shapes_of_counts
from fedvl.evaluation.noisy_counts import coarse_shapes
from fedvl.federation.checks import (
    MAX_REPORTED,
    Refusal,
    Report,
    SpoiledSumError,
    refusal,
    sound_reports,
    sum_of_reports,
    unsound,
)
from fedvl.federation.fixed_point import (
    count_numbers,
    decode_reports,
    decode_updates,
    from_whole,
    no_update,
    unflat_statistics,
)
from fedvl.federation.local import Summed
from fedvl.federation.stacks import Trained
from fedvl.federation.statistics import Statistics, sum_of_statistics
from fedvl.methods.base import Method, Update
from fedvl.methods.roles import Shapes
from fedvl.runs.contents import Status
from fedvl.tensors import IntArray, Tensors, hash_as_tensor, placed, tensor_as_hash

STATE = "state"
WAITING = "waiting for clients"  # a phase of a run: clients are not connected
ANSWER_POLL_SECONDS = 0.1  # between looks for answers
LOOK_SECONDS = 2.0  # between looks for who is gone
MAX_NOTED = 3  # refusals of a client in a round: it may send as many messages as it likes
NOTICE_SECONDS = 60.0  # at most, to learn that the run is over and test the model; who is gone is not waited for


class Transport(Protocol):
    """What carries messages, and vouches for who sent them."""

    def connected(self) -> set[int]: ...

    def send(self, messages: Mapping[int, Message], seconds: float) -> dict[str, int]: ...

    def collect(self, tickets: Collection[str]) -> Iterable[tuple[str, int | None, Message | FedVLError]]: ...


class SiteCounts(NamedTuple):
    """Counts of test images of a site, or of all; ``paired``: of two models, if requested."""

    counts: Counts
    paired: IntArray | None


class Identity(NamedTuple):
    """Which run, of which experiment, messages belong to."""

    run: str
    experiment: str


class RemoteEngine:
    """The clients of a federation as :class:`~fedvl.federation.round.Federation` wants them."""

    def __init__(
        self,
        transport: Transport,
        method: Method,
        config: FederationConfig,
        clients: int,
        identity: Identity,
        device: torch.device | str = "cpu",
        notify: Callable[[Status], None] = lambda status: None,
        notes: Path | None = None,
        certificates: Mapping[int, str] | None = None,
        log: AuditLog | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.transport, self.method, self.config, self.clients = transport, method, config, clients
        self.identity, self.device, self.notify = identity, device, notify
        self.quorum = max(config.quorum, config.least_clients if config.secure_sum else 0)
        self.log = log or AuditLog()
        self.names = names
        self.sums = SecureSums(
            self._exchange,
            lambda clients, enough: self._wait_for(clients, time.monotonic() + config.deadline, enough),
            config,
            identity.run,
            identity.experiment,
            certificates or {},  # of the clients' parties, which sign the clients' keys
            notes,
            self.log,
            self._refuse,
            self._name,
        )
        self.private: dict[int, Tensors] = {}  # the name of each client's private tensors, once it has any
        self.last_seen: dict[int, float] = {}
        self.problems: list[Refusal] = []
        self.attempt = secrets.randbelow(2**30)  # no two requests of a run are alike, whenever the server was started
        self.late: dict[str, Header] = {}  # requests whose deadline is over
        self.round, self.reporters = 0, list[int]()  # of the latest exchange before a round
        self.next_look = 0.0  # for those who are gone

    # --- what a federation asks for

    @property
    def sizes(self) -> list[int]:
        """Unknown: each client counts for itself."""
        return []

    def train(
        self, round_index: int, cohort: Sequence[int], shared: Tensors, own: Mapping[int, Tensors] | None = None
    ) -> Sequence[Trained]:
        sent = (
            {client: pack_tensors(own[client]) for client in cohort}
            if own
            else dict.fromkeys(cohort, pack_tensors(shared))
        )
        answers = self._exchange("train", round_index, sent)
        trained = []
        for client in cohort:
            if client in answers:
                header, tensors = answers[client]
                private = {STATE: hash_as_tensor(header.state)} if header.state else {}
                update = Update(client, tensors, header.weight)
                trained.append(Trained(update, private, header.loss, header.examples))
        return trained

    def sum_updates(self, round_index: int, cohort: Sequence[int], shared: Tensors) -> Summed:
        """Return the sum of moves, weights and losses; raise SpoiledSumError if it is unsound."""
        total, states, sent = self.sums.sum("train", round_index, cohort, shared, len(no_update(shared)))
        problem = unsound(decode_updates(total, shared), len(states), self.config)
        self.sums.judge(list(states), problem and f"The sum of round {round_index + 1} {problem}.")
        trained = [
            Trained(Update(client, {}, 0.0), {STATE: hash_as_tensor(state)} if state else {}, 0.0, 0)
            for client, state in states.items()
        ]
        return Summed(total, list(states), trained, sent)

    def sum_statistics(self, round_index: int, cohort: Sequence[int], shared: Tensors) -> Statistics:
        """Return the sums of the clients' statistics: of one secure sum, or of those that fit."""
        shapes = self.method.role.statistics_shapes
        if self.config.secure_sum:
            total, states, sent = self.sums.sum("train", round_index, cohort, shared, count_numbers(shapes))
            self.sums.judge(list(states), None)
            return Statistics(placed(unflat_statistics(from_whole(total), shapes), self.device), list(states), sent)
        answers = self._exchange("train", round_index, dict.fromkeys(cohort, pack_tensors(shared)))
        each = {client: answer.tensors for client, answer in answers.items()}
        noise = self.method.task.noise
        found, refusals = sum_of_statistics(each, shapes, self.device, noise and noise.clip)
        for client, reason in refusals:
            self._refuse(client, reason)
        # the server knows single sums without noise anyway; they give the value of each coalition of clients
        kept = self.method.exchanges == 1 and noise is None
        return found._replace(each={client: each[client] for client in found.clients} if kept else {})

    def personalise(self, shared: Tensors) -> None:
        """Do nothing: clients do it when the run is over."""

    def keep(self, trained: Iterable[Trained]) -> None:
        for result in trained:
            if result.private:
                self.private[result.update.client] = result.private

    def refused(self) -> list[Refusal]:
        """What came and could not be used, since the last call."""
        problems, self.problems = self.problems, []
        return problems

    def report(self, round_index: int, shared: Tensors) -> tuple[list[Report], list[Refusal]]:
        """Collect reports and sum them if that is enough; without secure sums each is seen here."""
        if self.config.secure_sum:
            return self._report_in_sum(round_index, shared)
        answers = self._exchange("report", round_index, dict.fromkeys(range(self.clients), pack_tensors(shared)))
        consultation = self.method.consultation()
        assert consultation is not None
        reports = [Report(client, answers[client].tensors) for client in sorted(answers)]
        good, refusals = sound_reports(reports, consultation.report_shapes)
        self.round, self.reporters = round_index, [report.client for report in good if report.client is not None]
        for client in self.reporters:
            self._note_state(answers[client].header)
        refusals = [*self.refused(), *refusals]
        return [sum_of_reports(good)] if good and consultation.summed else good, refusals

    def _report_in_sum(self, round_index: int, shared: Tensors) -> tuple[list[Report], list[Refusal]]:
        consultation = self.method.consultation()
        assert consultation is not None
        shapes = consultation.report_shapes
        try:
            total, states, _ = self.sums.sum("report", round_index, range(self.clients), shared, count_numbers(shapes))
            tensors = {name: tensor.to(self.device) for name, tensor in decode_reports(total, shapes).items()}
            beyond = any(bool((tensor.abs() > MAX_REPORTED).any()) for tensor in tensors.values())
            self.sums.judge(list(states), "The sum of the reports is out of range." if beyond else None)
        except SpoiledSumError:  # clients go on with what they adopted before
            return [], self.refused()
        self.round, self.reporters = round_index, list(states)
        for client, state in states.items():
            if state:
                self.private[client] = {STATE: hash_as_tensor(state)}
        return [Report(None, tensors)], self.refused()

    def adopt(self, settlements: Mapping[int | None, Tensors]) -> None:
        answers = {client: settlements.get(client, settlements.get(None)) for client in self.reporters}
        payloads = {client: pack_tensors(answer) for client, answer in answers.items() if answer is not None}
        for answer in self._exchange("adopt", self.round, payloads).values():
            self._note_state(answer.header)

    def evaluate(self, number: int, request: Tensors, classes: int) -> dict[int | None, SiteCounts]:
        """Collect the counts of an evaluation of the finished run: of each client, or their sum.

        ``reporters`` are the clients that they are of.
        """
        shapes: Shapes = {**shapes_of_counts(classes), **({PAIRED: (len(PAIR),)} if OTHER_RUN in request else {})}

        def problem_of(tables: dict[str, IntArray]) -> str | None:
            if tables.keys() != shapes.keys():
                return "its counts are not those that were requested"
            counts, paired = split_pair(tables)
            problem = misstated(counts, classes)
            return problem or (None if paired is None else misstated_pair(paired, Counts(**counts)))

        found = self._counts("evaluate", number, request, shapes, problem_of)
        split = {client: split_pair(tables) for client, tables in found.items()}
        return {client: SiteCounts(Counts(**counts), paired) for client, (counts, paired) in split.items()}

    def evaluate_with_noise(self, number: int, request: Tensors, classes: int) -> dict[int | None, dict[str, IntArray]]:
        """Collect coarse counts to which clients have added noise: of each client, or their sum."""
        shapes: Shapes = {**coarse_shapes(classes)}

        def problem_of(tables: dict[str, IntArray]) -> str | None:
            if {name: table.shape for name, table in tables.items()} != shapes:
                return "its counts are not those that were requested"
            beyond = any((np.abs(table) > MAX_IMAGES).any() for table in tables.values())
            return "its counts are too large" if beyond else None

        return self._counts("evaluate", number, request, shapes, problem_of)

    def class_names(self) -> dict[int, list[str]]:
        """Return the names of classes of each client whose policy lets them leave."""
        asked = dict.fromkeys(range(self.clients), pack_tensors({}))
        found: dict[int, list[str]] = {}
        for client, answer in self._exchange(NAMES_OF_CLASSES, self.config.rounds + 1, asked).items():
            try:
                found[client] = names_of_tensors(answer.tensors)
            except FedVLError as error:
                self._refuse(client, str(error))
        return found

    def survey(self, classes: int) -> dict[int | None, survey.Tables]:
        """Collect what the clients say of their images before training: each, or their sum."""
        shapes: Shapes = {**survey.survey_shapes(classes)}

        def problem_of(tables: survey.Tables) -> str | None:
            sites = len(self.reporters) if self.config.secure_sum else 1
            return survey.misstated_survey(tables, classes, sites)

        return self._counts("survey", 1, {}, shapes, problem_of)

    def _counts(
        self,
        kind: Literal["evaluate", "survey"],
        number: int,
        request: Tensors,
        shapes: Shapes,
        problem_of: Callable[[dict[str, IntArray]], str | None],
    ) -> dict[int | None, dict[str, IntArray]]:
        """Collect tables of whole numbers: of each client, or their sum."""
        round_index = self.config.rounds + number
        if self.config.secure_sum:
            total, states, _ = self.sums.sum(kind, round_index, range(self.clients), request, count_numbers(shapes))
            tables = {
                name: table.round().long().numpy()
                for name, table in unflat_statistics(from_whole(total), shapes).items()
            }
            self.reporters = list(states)
            problem = problem_of(tables)
            self.sums.judge(list(states), problem and f"The sum of the counts cannot be used: {problem}.")
            return {None: tables}
        answers = self._exchange(kind, round_index, dict.fromkeys(range(self.clients), pack_tensors(request)))
        found: dict[int | None, dict[str, IntArray]] = {}
        for client, answer in answers.items():
            tables = {name: tensor.cpu().numpy() for name, tensor in answer.tensors.items()}
            whole = all(tensor.dtype == torch.int64 for tensor in answer.tensors.values())
            problem = problem_of(tables) if whole else "its counts are not whole numbers"
            if problem:
                self._refuse(client, problem)
            else:
                found[client] = tables
        self.reporters = [client for client in found if client is not None]
        return found

    def finish(self, shared: Tensors, rounds: int, told: Collection[int] = ()) -> set[int]:
        """Send all who are there and were not told yet the final tensors; return who answered."""
        limited = min(self.config.deadline, NOTICE_SECONDS)
        left = self.transport.connected() - set(told)
        return set(self._exchange("finish", rounds, dict.fromkeys(left, pack_tensors(shared)), seconds=limited))

    def private_of(self, client: int) -> Tensors:
        """Private tensors stay with their client."""
        return {}

    def local_flops(self, shared: Tensors) -> int | None:
        """Unknown: clients train on machines and data of their own."""
        return None

    # --- messages

    def _note_state(self, header: Header) -> None:
        if header.state:
            self.private[header.client] = {STATE: hash_as_tensor(header.state)}

    def _states_of_others(self, client: int) -> set[str]:
        return {tensor_as_hash(held[STATE]) for other, held in self.private.items() if other != client}

    def _request(self, kind: MessageKind, round_index: int, client: int, sum_attempt: int) -> Header:
        private = self.private.get(client)
        return Header(
            run=self.identity.run,
            experiment=self.identity.experiment,
            round=round_index,
            attempt=self.attempt,
            kind=kind,
            sum_attempt=sum_attempt,
            client=client,
            state=tensor_as_hash(private[STATE]) if private else "",
        )

    def _exchange(
        self,
        kind: MessageKind,
        round_index: int,
        payloads: Mapping[int, bytes],
        *,
        seconds: float | None = None,
        enough: int | None = None,
        sum_attempt: int = 0,
    ) -> dict[int, Received]:
        """Send requests and wait for the answers until the deadline; note what is no answer.

        With ``enough`` answers (default: the quorum) disconnected clients are not awaited.
        """
        end = time.monotonic() + (seconds or self.config.deadline)
        enough = self.quorum if enough is None else enough
        there = self._wait_for(payloads, end, enough)
        self.attempt += 1
        requests = {client: self._request(kind, round_index, client, sum_attempt) for client in sorted(there)}
        self._show(kind, round_index, list(requests))
        messages = {client: self.log.send(Message(request, payloads[client])) for client, request in requests.items()}
        tickets = self.transport.send(messages, max(end - time.monotonic(), 1.0)) if messages else {}
        waiting = {ticket: requests[client] for ticket, client in tickets.items()}
        answers: dict[int, Received] = {}
        while waiting:
            for ticket, sender, message in self.transport.collect([*waiting, *self.late]):
                if self._is_forged(waiting.get(ticket) or self.late.get(ticket), sender, message):
                    continue
                request = waiting.pop(ticket, None)
                if request is None:
                    self._refuse_late(ticket, sender, message)
                    continue
                answer = self._open(request, message)
                if answer is not None:
                    answers[request.client] = answer
                self._show(kind, round_index, [late.client for late in waiting.values()])
            if not waiting or time.monotonic() >= end or self._hopeless(waiting, len(answers) >= enough):
                break
            time.sleep(ANSWER_POLL_SECONDS)
        self.late |= waiting
        return answers

    def _wait_for(self, clients: Collection[int], end: float, enough: int) -> set[int]:
        """Return the connected clients once they are enough, or when time is up."""
        shown: set[int] | None = None
        while True:
            there = self.transport.connected() & set(clients)
            if len(there) >= min(enough, len(clients)) or time.monotonic() >= end:
                return there
            if there != shown:
                missing = sorted(set(clients) - there)
                self.notify(Status(phase=WAITING, waiting_for=missing, connected=sorted(there)))
                shown = there
            time.sleep(ANSWER_POLL_SECONDS)

    def _hopeless(self, waiting: Mapping[str, Header], enough: bool) -> bool:
        """Return whether enough clients answered and everyone still awaited has disconnected."""
        if not enough or time.monotonic() < self.next_look:
            return False
        self.next_look = time.monotonic() + LOOK_SECONDS
        return not self.transport.connected() & {request.client for request in waiting.values()}

    def _is_forged(self, request: Header | None, sender: int | None, message: Message | FedVLError) -> bool:
        """Tell whether somebody else answers in a client's name, which is still awaited."""
        if request is None or sender == request.client or (sender is None and isinstance(message, FedVLError)):
            return False
        if sender is not None:
            self._refuse(sender, f"it answered in the name of client {request.client}")
        return True

    def _open(self, request: Header, message: Message | FedVLError) -> Received | None:
        try:
            if isinstance(message, FedVLError):
                raise message
            self.last_seen[request.client] = time.time()
            header = message.header
            if not header.answers(request):
                raise FedVLError("it answers a request of another run, round or client")
            self.log.receive(header, message.payload)
            if header.problem:
                raise FedVLError(f"it says: {header.problem}")
            if odd := header.misplaced(message.payload):
                raise FedVLError(f"there is no place for {odd} in its answer")
            if header.state and header.state in self._states_of_others(request.client):
                raise FedVLError("it names the private tensors of another client")
            if header.idle:
                return None
            tensors = unpack_tensors(message.payload, self.config.max_message_bytes) if message.payload else {}
        except FedVLError as error:
            self._refuse(request.client, str(error))
            return None
        return Received(header, {name: tensor.to(self.device) for name, tensor in tensors.items()})

    def _refuse_late(self, ticket: str, sender: int | None, message: Message | FedVLError) -> None:
        request = self.late.pop(ticket, None)
        if isinstance(message, FedVLError) and request is not None:
            return  # nothing came, and nothing will: a drop-out of its round
        if request is not None and not isinstance(message, FedVLError):
            self._log_late(request, message)
            self._refuse(request.client, f"its answer of round {request.round + 1} came too late")
        elif sender is not None:
            self._refuse(sender, "it answered twice, or what it was not asked")

    def _name(self, client: int) -> str:
        return self.names[client] if client < len(self.names) else f"client {client}"

    def _log_late(self, request: Header, message: Message) -> None:
        """Write down an answer that is not used: the client has it in its log as sent."""
        with suppress(FedVLError):  # what is no message of ours, or has no head
            header = message.header
            if header.answers(request):
                self.log.receive(header, message.payload)

    def _refuse(self, client: int, reason: str) -> None:
        """Note a refusal in characters that a terminal can show, since it may quote the client."""
        if sum(problem.client == client for problem in self.problems) >= MAX_NOTED:
            return
        noted = refusal(client, "".join(character if character.isprintable() else "?" for character in reason))
        self.problems.append(noted)
        self.log.append("refused", run=self.identity.run, **noted._asdict())

    def _show(self, kind: MessageKind, round_index: int, waiting: list[int]) -> None:
        self.notify(
            Status(
                phase=kind,
                round=round_index + 1,
                waiting_for=sorted(waiting),
                connected=sorted(self.transport.connected()),
                last_seen={str(client): moment for client, moment in self.last_seen.items()},
            )
        )


def split_pair(tables: dict[str, IntArray]) -> tuple[dict[str, IntArray], IntArray | None]:
    """Return the counts of one model, and those of two if there are any."""
    return {name: table for name, table in tables.items() if name != PAIRED}, tables.get(PAIRED)
