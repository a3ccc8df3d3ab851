"""The process on a client's machine: encode its images once, then answer messages.

``supervisor.py`` keeps its SuperNode running, ``finishing.py`` writes the folder of a finished run,
``rehearsal.py`` is the dry run.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedvl.config import Experiment
from fedvl.data.check import CheckedImages, check, classes_of
from fedvl.data.own_images import open_own
from fedvl.data.sources import Opener
from fedvl.data.survey import other_names, tables_of
from fedvl.deployment.audit_log import NO_HEAD, RehearsalLog
from fedvl.deployment.class_lists import NAMES_OF_CLASSES, names_as_tensors
from fedvl.deployment.extras import check_extras
from fedvl.deployment.files import experiment_id
from fedvl.deployment.finishing import finish_run
from fedvl.deployment.keys import write_private
from fedvl.deployment.link import flower, most_bytes
from fedvl.deployment.membership import check_key, credentials
from fedvl.deployment.messages import REVEAL, Header, Message
from fedvl.deployment.metrics import Answered
from fedvl.deployment.own_counts import FinishedRun, own_counts
from fedvl.deployment.party import COUNTS, Cost, Party
from fedvl.deployment.policy import Policy, check_approved, policy_hash, read_experiments, read_policy
from fedvl.deployment.rehearsal import rehearse
from fedvl.deployment.roster import needed_roster
from fedvl.deployment.secure_sum import SumMember
from fedvl.deployment.state import RUNS, begin_run, begun, log_of, log_secrets, open_state, read_party
from fedvl.deployment.supervisor import Supervised, Watch, free_port
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.methods.mistakes import explained
from fedvl.report.data_page import said, write_check_page
from fedvl.report.loopback import page_server, served
from fedvl.report.prometheus import CONTENT_TYPE
from fedvl.runs.experiment import local_engine
from fedvl.runs.preparation import Prepared, prepare
from fedvl.tensors import Tensors
from fedvl.version import __version__

SURVEY = "survey.html"  # in the state folder
MAX_RUNS = 200  # in a party's folder
SENDING_SECONDS = 2.0  # for the SuperNode to pass on the last answer


class Ready(NamedTuple):
    """An experiment with this client's images in place."""

    name: str
    prepared: Prepared


class Client:
    server_version = ""  # of FedVL at the server, once it has said it

    def __init__(self, folder: Path, data: str | None, say: Callable[[str], None], survey: bool = False) -> None:
        self.folder, self.data, self.say, self.survey = folder, data, say, survey
        self.rehearsal = data is None  # then it draws from the experiment's seed, to the bits of fedvl run
        self.file, self.state = read_party(folder), open_state(folder)
        self.log = RehearsalLog(log_of(folder).path) if self.rehearsal else log_of(folder)
        self.log.entries("approved")  # a log that does not fit is told before anything else
        self.policy_hash = ""  # of the policy that was read last
        self.roster = ""  # fingerprint of the roster that was read last
        self.experiments = read_experiments(folder, dataset=self.rehearsal)
        for experiment in self.experiments.values():
            check_extras(experiment, data or experiment.data.dataset)
        self.surveyed: CheckedImages | None = None  # then it answers nothing but a survey
        self.ready: dict[str, Ready] = {}  # by identity
        self.parties: dict[str, Party] = {}
        self.finished = False
        self.stay = False  # for further runs when one is over
        self.stopping = False  # its person ends its part

    def prepare(self, display: Display) -> None:
        """Read and encode the client's images, once."""
        if self.ready:
            return
        self.surveyed = self._check_images(display) if self.survey else None
        ready = {}
        for name, experiment in self.experiments.items():
            torch.set_num_threads(experiment.federation.threads)  # text features depend on it too
            with explained(experiment.method.name):
                prepared = self._prepare(experiment, self.data, display)
            ready[experiment_id(experiment, prepared.method.task.encoder)] = Ready(name, prepared)
        self.ready = ready

    def _check_images(self, display: Display) -> CheckedImages:
        """Look for faults in the client's images, and write a page for its person alone."""
        if self.data is None:
            raise FedVLError("A survey is of a client's own images: give --data.")
        found, checked = check(self.data, display)
        page = write_check_page(found, self.state / SURVEY)
        self.say(f"{said(found)} Only this site is shown which files: {page}")
        for name, meant in other_names(classes_of(checked.images), self.file.class_names).items():
            guess = f"; it probably means {self.file.class_names[meant[0]]}" if meant else ""
            self.say(f"The class {name} is not in the federation's list{guess}.")
        return checked

    def _survey(self, least: int) -> Tensors:
        assert self.surveyed is not None
        tables = tables_of(self.surveyed, self.file.class_names, least)
        return {name: torch.from_numpy(table) for name, table in tables.items()}

    def _names(self) -> Tensors:
        """Return the names of this client's classes, which its policy lets leave."""
        assert self.surveyed is not None
        return names_as_tensors(classes_of(self.surveyed.images))

    def _prepare(self, experiment: Experiment, data: str | None, display: Display) -> Prepared:
        """Prepare the client's own images, or its share of the dataset for a rehearsal."""
        number = self.file.number
        if data is None:
            prepared = prepare(experiment, display)
            rows = [rows if client == number else rows[:0] for client, rows in enumerate(prepared.training.rows)]
            return replace(prepared, training=replace(prepared.training, rows=rows))
        own = open_own(data, self.file.class_names, self.file.templates, self.surveyed is not None)
        held = experiment.data.model_copy(update={"dataset": data, "classes": None, "partition": f"only:{number}"})
        opener = Opener(dataset=lambda name, root: own)
        return prepare(experiment.model_copy(update={"data": held}), display, opener, splits=list(own.splits))

    # --- answering

    def answer(self, message: Message) -> Message:
        """Answer a message; what the log does not hold does not leave."""
        header = message.header
        try:
            reply = self.log.send(self._answer(header, message))
        except FedVLError as error:  # of the log itself
            reply = self._refusal(header, error)
        if problem := reply.header.problem:
            self.say(f"Refused: {problem}")
        return reply

    def _answer(self, header: Header, message: Message) -> Message:
        try:
            self.log.receive(header, message.payload)
            party = self._permitted(header)
        except FedVLError as error:
            return self._refusal(header, error)
        rounds = self.ready[header.experiment].prepared.experiment.federation.rounds
        evaluation = header.round > rounds
        self.say(header.kind if header.round >= rounds else f"round {header.round + 1}: {header.kind}")
        try:
            with self._explained(self.ready[header.experiment].prepared):
                reply = party.answer(message)
        except FedVLError as error:  # its words may hold what must not leave
            self.say(str(error))
            return self._refusal(header, FedVLError("Its method failed; what it says is told there."))
        if party.finished is not None:
            self._finish(header, party)
            del self.parties[header.run]
        elif evaluation and not reply.header.problem:
            self.finished = header.kind in ((REVEAL[kind] if party.sums else kind) for kind in COUNTS)
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
        return Message(header.model_copy(update={"problem": problem[:500], "log": ""}))

    def permit(self, experiment: str) -> Policy:
        """Refuse an experiment that was not approved, or that the policy does not allow."""
        if experiment not in self.ready:
            raise FedVLError(f"Its folder has no such experiment, or its model has other weights.{self._versions()}")
        prepared = self.ready[experiment].prepared
        self._check_rehearsal(prepared.experiment)
        check_approved(self.log, experiment, self._roster(prepared.experiment), self.folder)
        policy = read_policy(self.state)
        images = len(prepared.training.rows[self.file.number])
        policy.check_experiment(prepared.experiment, prepared.method, images)
        return policy

    def _versions(self) -> str:
        """Name both versions if they differ: settings of another version have another identity."""
        if self.server_version in ("", __version__):
            return ""
        return f" The server runs FedVL {self.server_version}, and it {__version__}: install the same version on both."

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
        experiment = self.ready[header.experiment].prepared.experiment
        self._check_purpose(policy, header, experiment)
        if (found := policy_hash(self.state)) != self.policy_hash:
            self.log.append("policy", sha256=found)
            self.policy_hash = found
        if (roster := self._roster(experiment)) not in ("", self.roster):
            self.parties.clear()  # whatever they checked by another roster is checked again
            self.roster = roster
        party = self.party(header)
        party.least_cell = policy.least_cell
        party.allow_counts = partial(self._allow_counts, policy, experiment)
        if party.sums is not None:
            party.sums.least = max(party.engine.federation.least_clients, policy.least_clients)
        if header.kind in ("train", "report") and (cost := party.cost(header.round, header.kind)):
            policy.check_budget(self.log.entries("budget"), *cost)
        return party

    def _allow_counts(self, policy: Policy, experiment: Experiment, cost: Cost | None) -> None:
        if cost is None:
            policy.check_plain_counts(experiment)
        else:
            policy.check_budget(self.log.entries("budget"), *cost)

    def _check_purpose(self, policy: Policy, header: Header, experiment: Experiment) -> None:
        """Refuse an evaluation or a survey too many; a client is there for a survey or for runs."""
        evaluation = header.round - experiment.federation.rounds
        surveys = header.kind.endswith("survey") or header.kind == NAMES_OF_CLASSES
        if evaluation > 0 and not surveys and header.kind != "keys":
            policy.check_evaluation(experiment, evaluation)
        if self.surveyed is not None and not surveys and header.kind != "keys":
            raise FedVLError(
                "This client is there for a survey; for a run its person starts fedvl client without --survey."
            )
        if surveys:
            answered = {entry["run"] for entry in self.log.entries("surveyed")}
            policy.check_survey(experiment, len(answered - {header.run}))
            if header.kind == NAMES_OF_CLASSES:
                policy.check_names()
            if header.run not in answered and header.kind == "survey":
                self.log.append("surveyed", run=header.run)

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
            counts = partial(own_counts, FinishedRun(prepared, folder), partial(self._other_run, header.experiment))
            survey = self._survey if self.surveyed is not None else None
            names = self._names if self.surveyed is not None else None
            party = Party(self.file.number, engine, folder, self.rehearsal, sums, self.log, counts, survey, names)
            log_secrets(self.log, self.state, header.run)
            self.parties[header.run] = party
        return self.parties[header.run]

    def _other_run(self, compared: str, run: str) -> FinishedRun:
        """Return another run, for a comparison in a run of the experiment ``compared``."""
        experiment = next((entry["experiment"] for entry in self.log.entries("begun") if entry["run"] == run), "")
        if experiment not in self.ready:
            raise FedVLError("This client did not take part in the run that the model is to be compared with.")
        found, asked = (self.ready[each].prepared.experiment for each in (experiment, compared))
        policy = self.permit(experiment)
        policy.check_evaluation(found, 1)
        policy.check_plain_counts(found)
        if found.federation.secure_sum and not asked.federation.secure_sum:
            raise FedVLError("The counts of a run of secure sums would leave by themselves; evaluate that run instead.")
        return FinishedRun(self.ready[experiment].prepared, self.state / RUNS / run)

    def _member(self, run: str, least: int, folder: Path) -> SumMember:
        return SumMember(run, self.file.number, folder, credentials(self.folder, self.file), least)

    def _check_room(self, run: str) -> None:
        """Refuse further runs: each tells the server more about the same images, and takes disk."""
        if not self.stay and self.parties:
            raise FedVLError("It takes part in one run; with --stay it would in others.")
        kept = [path for path in (self.state / RUNS).glob("*") if path.name != run]
        if len(kept) >= MAX_RUNS:
            raise FedVLError(
                f"Its folder holds {len(kept)} runs; remove old ones from state/runs to take part in more."
            )

    def _finish(self, header: Header, party: Party) -> None:
        """Write the folder of a finished run, and say how to use it."""
        prepared = self.ready[header.experiment].prepared
        finish_run(self.folder, self.file.name, prepared, party, header, self.data, self.say)
        self.finished = True

    # --- the process that connects

    def watch(self, ca_bundle: Path | None = None) -> Watch:
        """Return the watch on the server, which is begun before images are encoded.

        Connections are accepted from servers of the authorities of ``ca_bundle`` too.
        """
        check_key(self.folder)
        return Watch(self.folder, self.file.server, self.say, ca_bundle)

    def serve(self, watch: Watch, stay: bool, metrics: int | None = None) -> None:
        """Answer the server until the run is over, or for ever; offer metrics on a port."""
        self.stay = stay
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
            node = Supervised(watch, port, secret_file, most_bytes(self.folder))

            def answer(message: Message) -> Message:
                node.connected()
                self.server_version = watch.version
                began, run = time.perf_counter(), message.header.run
                reply = self.answer(message)
                spent = self.parties[run].spent if run in self.parties else None
                answered.count(message, reply, time.perf_counter() - began, spent)
                return reply

            try:
                flower().answer_messages(f"127.0.0.1:{port}", secret, answer, self._go_on(node))
                time.sleep(SENDING_SECONDS)
            finally:
                node.stop()

    def _go_on(self, node: Supervised) -> Callable[[], bool]:
        return lambda: node.check() and not self.stopping and (self.stay or not self.finished)

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

    def dry_run(self) -> list[dict[str, Any]]:
        """Return what one round would send, what would stay, and what attacks learn of it."""
        found = []
        for experiment, ready in self.ready.items():
            with self._explained(ready.prepared):
                figures = rehearse(ready.prepared, experiment, self.file.number)
            found.append({"experiment": ready.name, **figures, "refusal": self._why_not(experiment)})
        return found
