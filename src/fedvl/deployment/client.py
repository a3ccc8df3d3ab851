"""The process on a client's machine: encode its images once, then answer messages."""

import re
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from fedvl.config import Experiment
from fedvl.data.sources import Opener
from fedvl.deployment.audit_log import NO_HEAD, RehearsalLog, own_rounds
from fedvl.deployment.extras import check_extras
from fedvl.deployment.files import experiment_id
from fedvl.deployment.keys import write_private
from fedvl.deployment.link import Process, flower, most_bytes
from fedvl.deployment.membership import KEY, check_key, credentials
from fedvl.deployment.messages import Header, Kind, Message, pack_tensors, unpack_tensors, write
from fedvl.deployment.metrics import Answered
from fedvl.deployment.own_images import open_own
from fedvl.deployment.party import Party
from fedvl.deployment.policy import Policy, check_approved, policy_hash, read_experiments, read_policy
from fedvl.deployment.roster import needed_roster
from fedvl.deployment.secure_sum import Member
from fedvl.deployment.state import RUNS, begin_run, begun, log_of, log_secrets, open_state, read_party, state_of
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.federation.round import Federation
from fedvl.methods.base import Update
from fedvl.methods.mistakes import explained
from fedvl.report.loopback import page_server, served
from fedvl.report.page import write_report
from fedvl.report.prometheus import CONTENT_TYPE
from fedvl.report.reading import images_tested
from fedvl.report.tables import sure
from fedvl.runs.experiment import local_engine, make_judge
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import Prepared, prepare
from fedvl.runs.result import describe
from fedvl.tensors import Tensors

PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 40.0  # before a SuperNode that ended is started again
SHORT_SECONDS, MOST_SHORT = 60.0, 10  # a SuperNode that ends as soon as this, as often as this, will not live
MOST_REFUSALS = 2  # the first may be of a server that is just starting
MOST_RUNS = 200  # in a party's folder
SENDING_SECONDS = 2.0  # for the SuperNode to pass on the last answer


class Ready(NamedTuple):
    """An experiment with this client's images in place."""

    name: str
    prepared: Prepared


class Client:
    def __init__(self, folder: Path, data: str | None, display: Display, say: Callable[[str], None]) -> None:
        self.folder, self.data, self.say = folder, data, say
        self.rehearsal = data is None  # then it draws from the experiment's seed, to the bits of fedvl run
        self.file, self.state = read_party(folder), open_state(folder)
        self.log = RehearsalLog(log_of(folder).path) if self.rehearsal else log_of(folder)
        self.log.entries("approved")  # a log that does not fit is told before anything else
        self.policy_hash = ""  # of the policy that was read last
        self.roster = ""  # fingerprint of the roster that was read last
        self.ready: dict[str, Ready] = {}
        for name, experiment in read_experiments(folder, dataset=self.rehearsal).items():
            check_extras(experiment, data or experiment.data.dataset)
            torch.set_num_threads(experiment.federation.threads)  # text features depend on it too
            with explained(experiment.method.name):
                prepared = self._prepare(experiment, data, display)
            self.ready[experiment_id(experiment, prepared.method.task.encoder)] = Ready(name, prepared)
        self.parties: dict[str, Party] = {}
        self.finished = False
        self.stay = False  # for further runs when one is over

    def _prepare(self, experiment: Experiment, data: str | None, display: Display) -> Prepared:
        """Prepare the client's own images, or its share of the dataset for a rehearsal."""
        number = self.file.number
        if data is None:
            prepared = prepare(experiment, display)
            rows = [rows if client == number else rows[:0] for client, rows in enumerate(prepared.training.rows)]
            return replace(prepared, training=replace(prepared.training, rows=rows))
        own = open_own(data, self.file.class_names, self.file.templates)
        held = experiment.data.model_copy(update={"dataset": data, "classes": None, "partition": f"only:{number}"})
        opener = Opener(dataset=lambda name, root: own)
        return prepare(experiment.model_copy(update={"data": held}), display, opener, splits=list(own.splits))

    # --- answering

    def answer(self, message: Message) -> Message:
        """Answer a message; what the log does not hold does not leave."""
        header = message.read_header()
        try:
            reply = self.log.send(self._answer(header, message))
        except FedVLError as error:  # of the log itself
            reply = self._refusal(header, error)
        if problem := reply.read_header().problem:
            self.say(f"Refused: {problem}")
        return reply

    def _answer(self, header: Header, message: Message) -> Message:
        try:
            self.log.receive(header, message.payload)
            party = self._permitted(header)
        except FedVLError as error:
            return self._refusal(header, error)
        self.say("finish" if header.kind == "finish" else f"round {header.round + 1}: {header.kind}")
        try:
            with self._explained(self.ready[header.experiment].prepared):
                reply = party.answer(message)
        except FedVLError as error:  # its words may hold what must not leave
            self.say(str(error))
            return self._refusal(header, FedVLError("Its method failed; what it says is told there."))
        if party.finished is not None:
            self._finish(self.ready[header.experiment].prepared, header, party)
            del self.parties[header.run]
        return reply

    @contextmanager
    def _explained(self, prepared: Prepared) -> Iterator[None]:
        """Tell what is wrong in a method's own file."""
        with explained(prepared.experiment.method.name) as tried:
            tried.method, tried.samples = prepared.method, prepared.training.samples
            yield

    def _refusal(self, header: Header, error: FedVLError) -> Message:
        """Tell the server why there is no answer, and not where things are on this machine."""
        problem = str(error).replace(f"{self.state}/", "").replace(f"{self.folder}/", "")
        return write(header.model_copy(update={"problem": problem[:500], "log": ""}))

    def permit(self, experiment: str) -> Policy:
        """Refuse an experiment that was not approved, or that the policy does not allow."""
        if experiment not in self.ready:
            raise FedVLError("Its folder has no such experiment, or its model has other weights.")
        prepared = self.ready[experiment].prepared
        self._check_rehearsal(prepared.experiment)
        check_approved(self.log, experiment, self._roster(prepared.experiment), self.folder)
        policy = read_policy(self.state)
        images = len(prepared.training.rows[self.file.number])
        policy.check_experiment(prepared.experiment, prepared.method, images)
        return policy

    def _check_rehearsal(self, experiment: Experiment) -> None:
        """Refuse noise and secure aggregation in a rehearsal with others: its seed is public."""
        protected = experiment.privacy.unit != "none" or experiment.federation.secure_sum
        if self.rehearsal and protected and not self.file.on_this_machine:
            raise FedVLError(
                "Without --data this is a rehearsal, whose noise comes from the experiment's public seed; with --privacy or "
                "--secure-sum it is for a server on this machine alone: give --data."
            )

    def _roster(self, experiment: Experiment) -> str:
        """Return the fingerprint of the pinned roster, if the experiment needs one."""
        return needed_roster(self.folder, experiment)

    def _permitted(self, header: Header) -> Party:
        """Return the client in this run, if its person's policy lets it answer."""
        if not header.log:
            raise FedVLError(NO_HEAD)
        policy = self.permit(header.experiment)
        policy.check_time(datetime.now())
        if (found := policy_hash(self.state)) != self.policy_hash:
            self.log.append("policy", sha256=found)
            self.policy_hash = found
        if (roster := self._roster(self.ready[header.experiment].prepared.experiment)) not in ("", self.roster):
            self.parties.clear()  # whatever they checked by another roster is checked again
            self.roster = roster
        party = self.party(header)
        if party.sums is not None:
            party.sums.least = max(party.engine.federation.least_clients, policy.least_clients)
        if header.kind in ("train", "report") and (cost := party.cost(header.round, header.kind)):
            policy.check_budget(self.log.entries("budget"), *cost)
        return party

    def party(self, header: Header) -> Party:
        """Return the client in this run; several runs share its images, and nothing else."""
        begun(self.log, header.run, header.experiment)
        if header.run not in self.parties:
            self._check_room(header.run)
            folder = begin_run(self.log, self.state, header.run, header.experiment)
            prepared = self.ready[header.experiment].prepared
            torch.set_num_threads(prepared.experiment.federation.threads)
            engine = local_engine(prepared)
            sums = partial(self._member, header.run, engine.federation.least_clients)
            party = Party(self.file.number, engine, folder, self.rehearsal, sums, self.log)
            log_secrets(self.log, self.state, header.run)
            self.parties[header.run] = party
        return self.parties[header.run]

    def _member(self, run: str, least: int, folder: Path) -> Member:
        return Member(run, self.file.number, folder, credentials(self.folder, self.file), least)

    def _check_room(self, run: str) -> None:
        """Refuse further runs: each tells the server more about the same images, and takes disk."""
        if not self.stay and self.parties:
            raise FedVLError("It takes part in one run; with --stay it would in others.")
        kept = [path for path in (self.state / RUNS).glob("*") if path.name != run]
        if len(kept) >= MOST_RUNS:
            raise FedVLError(
                f"Its folder holds {len(kept)} runs; remove old ones from state/runs to take part in more."
            )

    def _finish(self, prepared: Prepared, header: Header, party: Party) -> None:
        """Leave a finished run: shared and own tensors, judged on its own test images."""
        assert party.finished is not None
        folder = RunFolder(party.folder)
        folder.describe(prepared.experiment)
        experiment, shared = prepared.experiment, party.finished
        tensors = {**shared, **party.engine.private_of(party.number)}
        judge = make_judge(prepared, party.engine)
        began = time.perf_counter()
        judged = [(judge.judge(tensors, {}), time.perf_counter() - began)] if len(judge.test) else []
        records = own_rounds(self.folder, header.run, party.number, header.round)
        federation = Federation(prepared.method, party.engine, experiment.federation, experiment.seed, shared, records)
        zero_shot = judge.judge_zero_shot() if judged else None
        result = describe(prepared, federation, judge, zero_shot, judged)
        if spent := party.spent:
            result["privacy"] = spent[-1]
            whose = "This client has" if spent[-1]["unit"] == "client" else "This client's images have"
            self.say(f"{whose} spent epsilon {spent[-1]['epsilon']:.2f} (delta {spent[-1]['delta']:g}).")
        given = ["--data", self.data] if self.data else []
        told = {
            "rounds": header.round,
            "partition": None,  # what the others hold is not known here
            "partition_counts": [prepared.training.counts[party.number].tolist()],
            "party": self.file.name,
            "command": shlex.join(["fedvl", "client", str(self.folder), *given]),
        }
        folder.write_rounds(records)
        folder.finish({**result, **told}, {}, tensors, {})
        write_report(folder.path)
        self.say(f"The run is over; the model, with what is this client's own, is in {folder.path}.")
        if judged:
            images = images_tested(result)
            before, after = (sure(result[key], images) for key in ("zero_shot_accuracy", "accuracy"))
            self.say(f"Accuracy on this client's own {images:,} test images: {after}; zero-shot: {before}.")
        self.say(
            f"Ask the model with fedvl predict {self.folder} IMAGES; fedvl serve, export and report take {self.folder} too."
        )
        self.finished = True

    # --- the process that connects

    def serve(self, stay: bool, metrics: int | None = None) -> None:
        """Answer the server until the run is over, or for ever; offer metrics on a port."""
        self.stay = stay
        check_key(self.folder)
        refusals = [self._why_not(experiment) for experiment in self.ready]
        if all(refusals):
            raise FedVLError(refusals[0])
        self.log.append("started")  # what was in flight before may be lost
        secret, port = secrets.token_hex(32), free_port()
        images = max(len(ready.prepared.training.rows[self.file.number]) for ready in self.ready.values())
        answered = Answered(images)
        with self._secret_file(secret) as secret_file, ExitStack() as stack:
            if metrics is not None:
                stack.enter_context(served(page_server(metrics, "/metrics", answered.text, CONTENT_TYPE, "--metrics")))
            node = Supervised(self.folder, self.file.server, port, secret_file, most_bytes(self.folder))

            def answer(message: Message) -> Message:
                node.connected()
                began, run = time.perf_counter(), message.read_header().run
                reply = self.answer(message)
                spent = self.parties[run].spent if run in self.parties else None
                answered.count(message, reply, time.perf_counter() - began, spent)
                return reply

            try:
                flower().answer_messages(
                    f"127.0.0.1:{port}", secret, answer, lambda: node.check() and (stay or not self.finished)
                )
                time.sleep(SENDING_SECONDS)
            finally:
                node.process.stop()

    def _why_not(self, experiment: str) -> str:
        try:
            self.permit(experiment)
        except FedVLError as error:
            return str(error)
        return ""

    @contextmanager
    def _secret_file(self, secret: str) -> Iterator[Path]:
        path = self.state / "secret"
        path.unlink(missing_ok=True)
        write_private(path, secret.encode())
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    # --- what would leave

    def dry_run(self) -> list[dict[str, Any]]:
        """Return what one round would send, what would stay, and what attacks learn of it."""
        found = []
        for identity, ready in self.ready.items():
            with self._explained(ready.prepared):
                found.append(self._rehearse(identity, ready))
        return found

    def _rehearse(self, identity: str, ready: Ready) -> dict[str, Any]:
        from fedvl.audit.messages import Message as OwnMessage  # a client at work does not wait for these
        from fedvl.audit.own_update import audit_own

        experiment = ready.prepared.experiment
        summed = experiment.federation.secure_sum
        open_sums = experiment.federation.model_copy(update={"secure_sum": False})  # to show what a mask would hide
        prepared = replace(ready.prepared, experiment=experiment.model_copy(update={"federation": open_sums}))
        method, engine = prepared.method, local_engine(prepared)
        shared = method.first_shared(ready.prepared.experiment.seed)
        handed = method.hand_out(shared, {}, self.file.number)
        sent: dict[str, Tensors] = {}
        consultation = method.consultation()
        kinds: list[Kind] = ["report", "adopt", "train"] if consultation and consultation.due(0) else ["train"]
        with TemporaryDirectory() as folder:
            party, state = Party(self.file.number, engine, Path(folder)), ""
            for kind in kinds:
                payload = handed if kind == "train" else shared
                if kind == "adopt" and consultation:
                    own = None if consultation.summed else sent["report"]
                    payload = consultation.settle(0, sent["report"], own)
                header = Header(
                    run="0", experiment=identity, round=0, attempt=0, kind=kind, client=self.file.number, state=state
                )
                reply = party.answer(write(header, pack_tensors(payload)))
                answer = reply.read_header()
                if answer.problem:
                    raise FedVLError(answer.problem)
                state, last = answer.state or state, answer
                if reply.payload:
                    sent[kind] = unpack_tensors(reply.payload, engine.federation.max_message_bytes)
        update = Update(self.file.number, sent.get("train", {}), last.weight)
        first = OwnMessage(self.file.number, 0, handed, update, last.loss, sent.get("report", {}), last.examples)
        return {
            "experiment": ready.name,
            "method": ready.prepared.experiment.method.label,
            "leaves": sent,
            "numbers": last.model_dump(include={"weight", "examples", "loss"}),
            "private": experiment.privacy.unit != "none",
            "least_clients": experiment.federation.least_clients if summed else None,
            "stays": engine.private.get(self.file.number, {}),
            "images": len(engine.rows[self.file.number]),
            "audit": audit_own(ready.prepared, self.file.number, None if last.idle else first, secrets.randbits(62)),
            "refusal": self._why_not(identity),
        }


class Supervised:
    """The SuperNode of this machine, restarted when it ends, as the server may have been."""

    def __init__(self, folder: Path, server: str, port: int, secret_file: Path, most_bytes: int) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self.options = [
            *("--superlink", server, "--port", str(port), "--isolation", "process"),
            *("--root-certificates", str(folder / "ca.crt")),
            *("--auth-supernode-private-key", str(state_of(folder) / KEY)),
            *("--superexec-auth-secret-file", str(secret_file)),
        ]
        self.short_lives, self.not_before = 0, 0.0
        self._start()

    def _start(self) -> None:
        limits = flower().node_settings(self.most_bytes)
        self.process = Process("supernode", self.options, state_of(self.folder) / "flower", **limits)
        self.began = time.monotonic()

    def connected(self) -> None:
        """Forget earlier ends: a server between two runs is no reason to give up."""
        self.short_lives = 0

    def check(self) -> bool:
        """Start an ended SuperNode again, after ever longer pauses."""
        if self.process.ended and time.monotonic() >= self.not_before:
            self.short_lives = self.short_lives + 1 if time.monotonic() - self.began < SHORT_SECONDS else 0
            reason = refusal_in_log(self.process.log.read_text(encoding="utf-8", errors="replace"))
            if self.short_lives >= (MOST_REFUSALS if reason else MOST_SHORT):
                raise FedVLError(f"{reason or 'It cannot stay connected.'} {self.process.log} has the details.")
            self._start()
            self.not_before = self.began + min(PAUSE_SECONDS * 2**self.short_lives, LONGEST_PAUSE_SECONDS)
        return True


def refusal_in_log(log: str) -> str | None:
    """Why the server would not let a SuperNode in, by the last words of its log."""
    last = log[-3000:]
    if "CERTIFICATE_VERIFY_FAILED" in last:
        return "The server's certificate is not one of this federation; check the address, and ca.crt."
    if clock := re.findall(r"This party's clock is \d+ seconds (?:behind|ahead of) the server's\.", last):
        return f"{clock[-1]} Set this machine's clock."
    if "[code: 401]" in last:
        return (
            "The server does not know this party's key; ask its operator to admit the request of fedvl federation join."
        )
    return None


def free_port() -> int:
    """Return a port that is free, and stays so until it is bound: systems give out higher ones."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
