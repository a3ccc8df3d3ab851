"""A client's side of a federation: train, keep private tensors in its own folder, and answer.

Private tensors are files named after their SHA-256, salted so that the server cannot try out
guesses. Every request names those to begin with, so nothing is lost or counted twice when either
side is killed; files that no request can name any more are removed. What a party draws at random
(batches, residuals, noise) comes from a secret of its own: whoever knows the experiment's seed
could draw the same otherwise.
"""

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedvl.deployment.audit_log import AuditLog
from fedvl.deployment.class_lists import NAMES_OF_CLASSES
from fedvl.deployment.keys import write_private
from fedvl.deployment.messages import CONFIRM, REVEAL, SHARE, STEPS, Header, Message, pack_tensors, unpack_tensors
from fedvl.deployment.own_counts import requested_noise
from fedvl.deployment.secure_sum import OFFERS, PROTOCOL, ROSTER, SumId, SumMember
from fedvl.errors import FedVLError
from fedvl.federation.accounting import Account, Step, epsilon_of
from fedvl.federation.fixed_point import flat_statistics, to_whole
from fedvl.federation.local import LocalEngine
from fedvl.federation.privacy import ClientPrivacy, RecordPrivacy, stop_before
from fedvl.federation.records import Budget, Unit
from fedvl.federation.stacks import Trained
from fedvl.federation.statistics_privacy import StatisticsPrivacy
from fedvl.files import read_json, write_whole
from fedvl.methods.base import Update
from fedvl.tensors import Tensors, digest, load, save

BUDGET = ("round", "of", "unit", "epsilon", "delta", "sampling", "planned", "rate", "sigma")  # of an entry of the log
COUNTS = ("evaluate", "survey")  # requests of counts, which belong to no round
ROUNDS_KEPT = 3  # with the present one: the server's journal may fall back to the others


class Cost(NamedTuple):
    """What an answer spends of the privacy of a client or its records: steps of noise of its
    own.
    """

    unit: Unit
    step: Step
    steps: int
    account: Account


class Party:
    """One client in one run; its engine holds the data of this client alone."""

    def __init__(
        self,
        number: int,
        engine: LocalEngine,
        folder: Path,
        rehearsal: bool = False,
        sums: Callable[[Path], SumMember] | None = None,
        log: AuditLog | None = None,
        counts: Callable[[Tensors, int], Tensors | None] | None = None,
        survey: Callable[[int], Tensors] | None = None,
        names: Callable[[], Tensors] | None = None,
    ) -> None:
        self.number, self.engine, self.folder = number, engine, folder
        self.device = engine.data.labels.device
        self.limit = engine.federation.max_message_bytes
        self.finished: Tensors | None = None  # the final shared tensors, once the run is over
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (folder / "salt").is_file():
            write_private(folder / "salt", secrets.token_bytes(32))
        self.salt = (folder / "salt").read_bytes()
        self.log = log or AuditLog()  # has the budget of all runs
        self.counts, self.least_cell = counts, 1  # of its own test images; of the policy
        self.survey, self.names = survey, names  # counts of its images before training, and names of their classes
        self.allow_counts: Callable[[Cost | None], None] = lambda cost: None  # by its policy; raises
        self.draws = hashlib.sha256(b"budget" + self.salt).hexdigest()  # who draws again spends again
        self.sums: SumMember | None = None
        if engine.federation.secure_sum:
            assert sums is not None, "an experiment of secure sums sends nothing else"
            self.sums = sums(folder)
            self.sums.share = engine.federation.sum_threshold
        if not rehearsal:
            engine.private_seed = int.from_bytes(hashlib.sha256(b"randomness" + self.salt).digest())

    def answer(self, message: Message) -> Message:
        """The answer to a request; what goes wrong here is told, and ends nothing."""
        header = message.header
        try:
            return self._answer(header, message.payload)
        except FedVLError as error:
            return Message(header.model_copy(update={"problem": str(error)[:500]}))

    def _answer(self, request: Header, payload: bytes) -> Message:
        self._permit(request)
        asked = hashlib.sha256(f"{request.state} ".encode() + payload).hexdigest()
        before = read_json(self._reply(request))
        if before is not None and self._answered(request, before, asked):
            return self._repeat(request, before)
        if request.kind in ("adopt", "train", "report", "finish"):
            self._begin(request)
        received = {name: t.to(self.device) for name, t in unpack_tensors(payload, self.limit).items()}
        if request.kind == "finish":
            self.engine.check_received(received)
            if self.engine.method.role.statistics:
                self.engine.personalise(received)
            self.finished = received
            return Message(request)
        masked = self.sums is not None and request.kind != NAMES_OF_CLASSES
        header, tensors = self._work_masked(request, received) if masked else self._work(request, received)
        content = pack_tensors(tensors) if tensors is not None else b""
        self._note(header, content, asked)
        return Message(header, content)

    def _answered(self, request: Header, before: dict[str, Any], asked: str) -> bool:
        """Return whether a request gets its earlier answer: a round or an attempt has one."""
        if self.sums is not None:
            return request.kind in ("adopt", "keys") or before["sum_attempt"] == request.sum_attempt
        if request.kind in COUNTS and before["asked"] != asked:  # other counts would give the difference away
            raise FedVLError("This client has answered this evaluation with other counts; request another (--number).")
        return request.kind in COUNTS or bool(before["asked"] != asked)

    def _work_masked(self, request: Header, received: Tensors) -> tuple[Header, Tensors | None]:
        """Take one step of secure aggregation; numbers leave masked only."""
        assert self.sums is not None
        sums, step = self.sums, SumId.of(request)
        if request.kind == "keys":
            return request, sums.entry()
        if request.kind == "adopt":
            header, tensors = self._work(request, received)
            write_whole(
                self.folder / "adopted",
                hashlib.sha256(f"{request.round} {digest(received)}".encode()).hexdigest().encode(),
            )
            return header, tensors
        if request.kind in SHARE.values():
            if sums.left_out(step):  # two sums that differ by one client tell about it: its person can see how often
                self.log.append("left_out", run=request.run, round=request.round, message=step.kind)
            adopted = self.folder / "adopted"
            return request, sums.offer(step, received.get(ROSTER), adopted.read_text() if adopted.is_file() else "")
        if request.kind in CONFIRM.values():
            signature = sums.confirm(step, received)
            self.log.append(
                "survivors",
                run=request.run,
                round=request.round + 1,
                message=step.kind,
                attempt=step.attempt,
                digest=sums.signed_digest(step),
            )
            return request, signature
        if request.kind in REVEAL.values():
            return request, sums.reveal(step, received)
        if OFFERS not in received:
            raise FedVLError("This experiment sends nothing but sums, and the request names no clients to sum over.")
        worked: list[Header] = []

        def numbers() -> Tensor:
            plain = {name: tensor for name, tensor in received.items() if name not in PROTOCOL}
            header, tensors = self._work(request, plain)
            if header.problem:
                raise FedVLError(header.problem)
            worked.append(header.model_copy(update={"weight": 0.0, "loss": 0.0, "examples": 0, "idle": False}))
            return self._whole_numbers(header, tensors, plain)

        answer = sums.mask(step, received, numbers)
        return worked[0], answer

    def _whole_numbers(self, header: Header, tensors: Tensors | None, received: Tensors) -> Tensor:
        if header.kind in COUNTS:
            assert tensors is not None
            return to_whole(flat_statistics(tensors), self.engine.method.task.clients)
        if header.kind == "report":
            return self.engine.part_of_report(header.round, self.number, tensors)
        if self.engine.method.role.statistics:
            assert tensors is not None
            return self.engine.part_of_statistics(header.round, self.number, tensors)
        trained = None
        if tensors is not None:
            update = Update(self.number, tensors, header.weight)
            trained = Trained(update, {}, header.loss, header.examples)
        return self.engine.part_of_sum(header.round, self.number, received, trained)

    def _work(self, request: Header, received: Tensors) -> tuple[Header, Tensors | None]:
        """Report, adopt, train, count or compute statistics; undeclared tensors are refused."""
        if request.kind == "evaluate":
            found = self._count(request.round, received)
            return request.model_copy(update={"idle": found is None}), found
        if request.kind in ("survey", NAMES_OF_CLASSES):
            if self.survey is None or self.names is None:
                raise FedVLError("This client is not there for a survey; its person starts fedvl client with --survey.")
            if request.kind == NAMES_OF_CLASSES:
                return request, self.names()
            return request, self.survey(1 if self.sums else self.least_cell)
        if request.kind == "adopt":
            self.engine.adopt({self.number: received})
            return request.model_copy(update={"state": self._keep(request.round)}), None
        if request.kind == "report":
            self.spend(request.round, "report")
            reports, refusals = self.engine.reports(request.round, received)
            if not reports:
                problem = "".join(refusal.reason for refusal in refusals)
                return request.model_copy(update={"idle": not refusals, "problem": problem}), None
            return request.model_copy(update={"state": self._keep(request.round)}), reports[0].tensors
        self.spend(request.round, "train")
        if self.engine.method.role.statistics:
            self.engine.check_received(received)
            if self.sums is None and not self.engine.rows.counts[self.number]:
                return request.model_copy(update={"idle": True}), None
            # in a secure sum the clip and the noise come with the whole numbers
            compute = self.engine.statistics_of if self.sums else self.engine.sent_statistics
            return request, compute(request.round, self.number, received)
        trained = self.engine.train(request.round, [self.number], received)
        if not trained:
            return request.model_copy(update={"idle": True}), None
        self.engine.keep(trained)
        result = trained[0]
        reply = {"weight": result.update.weight, "loss": result.loss, "examples": result.examples}
        return request.model_copy(update={"state": self._keep(request.round), **reply}), result.update.tensors

    def _count(self, round_index: int, received: Tensors) -> Tensors | None:
        """Return the counts of an evaluation; book the noise before it is drawn."""
        assert self.counts is not None
        shares = self.engine.federation.least_clients if self.sums else 1
        noise = requested_noise(received, len(self.engine.method.task.class_names), shares)
        spent = noise is not None and (round_index + 1, "evaluate", noise.step) in [
            (each.round, each.of, Step(*each.step)) for each in self.spent
        ]
        if not spent:
            self.allow_counts(None if noise is None else Cost("record", noise.step, 1, "rdp"))
        found = self.counts(received, 1 if self.sums else self.least_cell)
        if noise is None or found is None:
            return found
        if not spent:
            steps = Counter({noise.step: 1})
            for entry in self.log.entries("budget"):
                if entry["draws"] == self.draws and entry["unit"] == "record":
                    steps[Step(entry["rate"], entry["sigma"])] += entry["steps"]
            epsilon = epsilon_of(steps, noise.delta, "rdp")
            budget = Budget(unit="record", epsilon=epsilon, delta=noise.delta, sampling="each image in each count")
            self._book(round_index, "evaluate", budget, Cost("record", noise.step, 1, "rdp"))
        return noise.added(found, self.engine.private_seed, self.number, round_index)

    # --- what is spent of its images' privacy

    @property
    def spent(self) -> list[Budget]:
        """Return the client's budget after each noisy release in this run."""
        mine = (entry for entry in self.log.entries("budget") if entry["draws"] == self.draws)
        return [Budget(**{name: entry[name] for name in BUDGET if name in entry}) for entry in mine]

    @property
    def noise(self) -> RecordPrivacy | ClientPrivacy | StatisticsPrivacy | None:
        """The noise that this client adds itself: to its steps or statistics, or a share of that of
        a sum.
        """
        if statistics := self.engine.statistics_noise:
            return None if statistics.by_server else statistics
        return self.engine.hidden or self.engine.shared_noise

    def cost(self, round_index: int, kind: str = "train") -> Cost | None:
        """Return what an update or a report spends; None if it spends nothing more."""
        noise, records = self.noise, self.engine.sizes[self.number]
        if noise is None or not records or (round_index + 1, kind) in [(each.round, each.of) for each in self.spent]:
            return None
        if isinstance(noise, RecordPrivacy):
            return Cost("record", *noise.steps(records, noise.rounds), "pld") if kind == "train" else None
        step = noise.step_of(kind)
        unit: Unit = "record" if noise.config.unit == "record" else "client"
        return Cost(unit, step, 1, noise.account) if step else None

    def spend(self, round_index: int, kind: str) -> None:
        """Write down what an answer spends before it is made; refuse one too many of its run."""
        noise, cost = self.noise, self.cost(round_index, kind)
        if noise is None or cost is None:
            return
        if isinstance(noise, RecordPrivacy):
            spent = noise.spend(self.spent, self.engine.sizes)
        else:
            steps = Counter([cost.step, *(Step(*each.step) for each in self.spent)])
            epsilon = epsilon_of(steps, noise.config.delta, noise.account)
            stop_before(epsilon, noise.config.epsilon, round_index + 1)
            sampling = "every client in every round"
            spent = Budget(unit=cost.unit, epsilon=epsilon, delta=noise.config.delta, sampling=sampling)
        self._book(round_index, kind, spent, cost)

    def _book(self, round_index: int, kind: str, spent: Budget, cost: Cost) -> None:
        told = {"run": self.folder.name, "round": round_index + 1, "of": kind, "draws": self.draws, **spent.to_dict()}
        (rate, sigma) = cost.step
        self.log.append("budget", **told, rate=rate, sigma=sigma, steps=cost.steps, account=cost.account)

    # --- what may be asked

    def _permit(self, request: Header) -> None:
        """Refuse what the experiment, to which this client's person agreed, does not hold."""
        if request.client != self.number:
            raise FedVLError(f"This is client {self.number}, and the request is for client {request.client}.")
        if self.finished is not None:
            raise FedVLError("The run is over for this client.")
        rounds, consultation = self.engine.federation.rounds, self.engine.method.consultation()
        last = rounds if request.kind == "finish" else rounds - 1
        evaluates = request.kind.endswith((*COUNTS, NAMES_OF_CLASSES))
        if evaluates or (request.kind == "keys" and request.round > rounds):
            fits = request.round > rounds
        else:
            fits = request.round <= last and (request.kind != "finish" or request.round == rounds)
        if not fits:
            raise FedVLError(
                f"Its experiment has {rounds} rounds; there is no '{request.kind}' in {request.round + 1}."
            )
        consults = request.kind in ("adopt", "report") or request.kind.endswith("_report")
        if consults and not (consultation and consultation.due(request.round)):
            raise FedVLError(f"The method has no '{request.kind}' before round {request.round + 1}.")
        if request.kind in ("keys", *STEPS) and self.sums is None:
            raise FedVLError("This experiment has no secure sums.")
        if request.kind == "adopt" and not self._reply(request.model_copy(update={"kind": "report"})).is_file():
            raise FedVLError("It was asked to adopt the answer to a report that it never sent.")
        answered = sorted({int(path.name[:6]) for path in self.folder.glob("[0-9]*-*.answer")})
        if len(answered) >= ROUNDS_KEPT and request.round < answered[0]:  # its answer may have been forgotten
            raise FedVLError(f"Round {request.round + 1} is long over for this client.")

    def _reply(self, request: Header) -> Path:
        return self.folder / f"{request.round:06d}-{request.kind}.json"

    def _note(self, header: Header, content: bytes, asked: str) -> None:
        """Keep what was answered, so that a round has one answer; older ones are removed."""
        told = header.model_dump(include={"state", "examples", "weight", "loss", "idle", "problem", "sum_attempt"})
        write_whole(self._reply(header).with_suffix(".answer"), content)
        write_whole(self._reply(header), json.dumps({**told, "asked": asked}).encode())
        self._forget((".json", ".answer", ".sum"))

    def _forget(self, suffixes: tuple[str, ...]) -> None:
        """Remove files of such kinds that are older than the last rounds."""
        files = [path for path in self.folder.glob("[0-9]*-*.*") if path.suffix in suffixes]
        newest = sorted({path.name[:6] for path in files})[-ROUNDS_KEPT:]
        for path in files:
            if path.name[:6] not in newest:
                path.unlink()

    def _repeat(self, request: Header, before: dict[str, Any]) -> Message:
        """Answer as before: two answers to one round would give single images away."""
        told = {name: value for name, value in before.items() if name != "asked"}
        return Message(request.model_copy(update=told), self._reply(request).with_suffix(".answer").read_bytes())

    # --- private tensors

    def _begin(self, request: Header) -> None:
        """Load the private tensors that the request names; remove those too old to be named."""
        self.engine.private.pop(self.number, None)
        if request.state:
            path = self._find(request.state)
            tensors = load(path) if path else {}
            if self._name(tensors) != request.state:
                raise FedVLError(
                    "Its private tensors of an earlier round are lost or damaged; restore its folder, or start a new run."
                )
            self.engine.private[self.number] = {name: tensor.to(self.device) for name, tensor in tensors.items()}
            assert path is not None
            path.rename(self.folder / file_name(request.round, request.state))
        # of the rounds that it took part in: a server that names a late round must not make it forget
        self._forget((".safetensors",))

    def _keep(self, round_index: int) -> str:
        """Write the present private tensors; their name."""
        private = self.engine.private.get(self.number, {})
        if not private:
            return ""
        name = self._name(private)
        save(self.folder / file_name(round_index, name), private)
        return name

    def _name(self, tensors: Tensors) -> str:
        return hashlib.sha256(self.salt + digest(tensors).encode()).hexdigest()

    def _find(self, name: str) -> Path | None:
        return max(self.folder.glob(f"*-{name}.safetensors"), default=None)


def file_name(round_index: int, name: str) -> str:
    return f"{round_index:06d}-{name}.safetensors"
