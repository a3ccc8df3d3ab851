"""The page of a client: what the person responsible for the data sees of a federation, and decides.

It is a page of this machine alone (``report/loopback.py``). Work that takes a while runs one job
after the other in the main thread: images are read, a dry run is made, messages are answered.
"""

import queue
import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from fedvl.audit.finding import SHOWN, written_value
from fedvl.config import Experiment
from fedvl.data.check import check
from fedvl.deployment.audit_log import own_rounds, read_log
from fedvl.deployment.client import Client
from fedvl.deployment.files import Frozen
from fedvl.deployment.keys import authority_fingerprint, fingerprint, public_key_of
from fedvl.deployment.membership import KEY, approve_experiment, make_join_request
from fedvl.deployment.policy import POLICY_FILE as POLICY
from fedvl.deployment.policy import (
    decisions,
    decline,
    identify,
    read_experiments,
    replace_policy,
    write_policy,
)
from fedvl.deployment.roster import (
    MAX_ROSTER_BYTES,
    PENDING,
    Roster,
    check_roster,
    needed_roster,
    pending_roster,
    pin_roster,
    pinned_roster,
    write_roster,
)
from fedvl.deployment.state import adopt_state, log_of, open_state, read_party, request_path, state_folder
from fedvl.display import Display, visible
from fedvl.errors import FedVLError
from fedvl.evaluation.figures import Estimate
from fedvl.report.loopback import local_page, served
from fedvl.runs.evaluation import read_evaluation
from fedvl.runs.folder import RunFolder

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
ENTRIES = 200  # of the log, that the page shows
SAID = 100  # lines of the work
PAUSE_SECONDS = 0.2
MAX_POLICY, MAX_REASON = 100_000, 300  # characters


class Leaves(Frozen):
    """A tensor that leaves in a round."""

    name: str
    kind: str
    shape: list[int]
    bytes: int


class Attack(Frozen):
    """What an attack on this client's own update learns."""

    of: str
    name: str
    value: str
    shown: bool
    sentence: str


class DryRun(Frozen):
    """What one round would send and give away; nothing was sent."""

    leaves: list[Leaves]
    images: int
    refusal: str
    attacks: list[Attack]
    untried: list[str]
    remedies: list[str]


class Request(Frozen):
    """An experiment that the operator asks this client to take part in."""

    name: str
    identity: str
    method: str
    model: str
    rounds: int
    clients: int
    secure_sum: bool
    privacy: str
    epsilon: float | None
    delta: float | None
    decision: Literal["open", "approved", "refused"]
    reason: str  # of a refusal
    problem: str  # why it cannot be approved now
    roster: str
    dry_run: DryRun | None


class Member(Frozen):
    name: str
    key: str


class Participants(Frozen):
    """The roster of a federation, as the operator sent it or as it is pinned."""

    members: list[Member]
    fingerprint: str
    authority: str
    pinned: bool


class Round(Frozen):
    round: int
    bytes_up: int
    bytes_down: int
    seconds: float
    refused: list[str]


class Run(Frozen):
    """A run that this client takes or took part in."""

    run: str
    method: str
    finished: bool
    rounds: int
    told: list[Round]
    images: int | None
    figures: list[tuple[str, Estimate]]
    zero_shot: float | None
    report: str


class Spent(Frozen):
    run: str
    round: int
    unit: str
    epsilon: float
    delta: float


class Line(Frozen):
    time: str
    kind: str
    text: str


class Fault(Frozen):
    title: str
    sentence: str
    fix: str
    files: list[str]


class State(Frozen):
    """All that the page shows."""

    name: str
    server: str
    names: list[str]
    authority: str
    joined: bool
    problem: str  # of the state folder
    key: str
    request: str  # what is sent to the operator
    data: str | None
    work: str
    busy: bool
    ready: bool
    connected: bool
    failed: str
    said: list[str]
    participants: Participants | None
    experiments: list[Request]
    policy: str
    budget: list[Spent]
    runs: list[Run]
    log: list[Line]
    faults: list[Fault] | None


class Site:
    """What a client's folder holds and what is being done with it."""

    def __init__(
        self, folder: Path, data: str | None, display: Display, stay: bool, ca_bundle: Path | None = None
    ) -> None:
        self.folder, self.data, self.display, self.stay = folder, data, display, stay
        self.ca_bundle = ca_bundle
        self.file = read_party(folder)
        self.jobs: queue.Queue[tuple[str, Callable[[], None]]] = queue.Queue()
        self.work, self.failed, self.connected = "", "", False
        self.said: list[str] = []
        self.client: Client | None = None
        self.dry_runs: dict[str, DryRun] = {}
        self.faults: list[Fault] | None = None
        self.identities: dict[str, str] = {}  # of experiments, by their settings

    # --- jobs

    def work_on(self) -> None:
        """Do jobs in this thread, one after the other, until the process is ended."""
        while True:
            with suppress(queue.Empty):
                self.do(*self.jobs.get(timeout=PAUSE_SECONDS))

    def do(self, work: str, job: Callable[[], None]) -> None:
        """Do one job; what goes wrong is shown on the page."""
        self.work, self.failed = work, ""
        try:
            job()
        except FedVLError as error:
            self.failed = str(error)
        finally:
            self.work, self.connected = "", False

    def begin(self, work: str, job: Callable[[], None]) -> None:
        if self.work or not self.jobs.empty():
            raise FedVLError(f"Wait until this is done: {self.work or 'the work that was begun'}.")
        self.jobs.put((work, job))

    def say(self, line: str) -> None:
        self.said = [*self.said, f"{datetime.now():%H:%M:%S} {visible(line)}"][-SAID:]

    def rehearse(self) -> None:
        client = self._client()
        client.prepare(self.display)
        for found in client.dry_run():
            self.dry_runs[found["experiment"]] = dry_run_of(found)

    def participate(self) -> None:
        client = self._client()
        with client.watch(self.ca_bundle) as watch:
            client.prepare(self.display)
            client.stopping, self.connected = False, True
            client.serve(watch, self.stay)

    def _client(self) -> Client:
        """Return the client of this folder, whose images are read once."""
        if self.client is None:
            self.client = Client(self.folder, self.data, self.say)
        return self.client

    def look_for_faults(self) -> None:
        if self.data is None:
            raise FedVLError("There are no images to check: begin with fedvl client FOLDER --data IMAGES --page.")
        found, _ = check(self.data, self.display)
        self.faults = [
            Fault(title=each.title, sentence=each.sentence, fix=each.fix, files=each.files[:5]) for each in found.faults
        ]

    # --- what the page asks for

    def act(self, path: str, given: dict[str, Any]) -> None:
        """Do what a person decided; refuse what is not one of the actions."""
        actions: dict[str, Callable[[dict[str, Any]], None]] = {
            "/join": self._join,
            "/roster": self._import_roster,
            "/pin": self._pin,
            "/approve": self._approve,
            "/refuse": self._refuse,
            "/policy": self._write_policy,
            "/rehearse": lambda given: self.begin("dry run", self.rehearse),
            "/check": lambda given: self.begin("checking the images", self.look_for_faults),
            "/start": lambda given: self.begin("taking part", self.participate),
            "/stop": self._stop,
        }
        if path not in actions:
            raise FedVLError(f"There is no action {path[:40]}.")
        actions[path](given)

    def _join(self, given: dict[str, Any]) -> None:
        if given.get("moved"):
            adopt_state(self.folder)
        else:
            make_join_request(self.folder, bool(given.get("renew")))

    def _import_roster(self, given: dict[str, Any]) -> None:
        open_state(self.folder)
        try:
            roster = Roster.model_validate_json(text_of(given, "content", MAX_ROSTER_BYTES))
        except ValidationError as error:
            raise FedVLError(
                "This is not a roster; ask the operator for the file of fedvl federation roster."
            ) from error
        check_roster(self.folder, self.file, roster)
        write_roster(state_folder(self.folder) / PENDING, roster)

    def _pin(self, given: dict[str, Any]) -> None:
        pending = pending_roster(self.folder)
        if pending is None or given.get("fingerprint") != pending.fingerprint:
            raise FedVLError("The roster has changed since it was shown; compare its fingerprint again.")
        pin_roster(self.folder, pending)

    def _chosen(self, given: dict[str, Any]) -> Experiment:
        """Return the experiment that was shown; refuse if its file says something else by now."""
        open_state(self.folder)
        for experiment in read_experiments(self.folder).values():
            if self._identity(experiment) == given.get("identity"):
                return experiment
        raise FedVLError("This experiment has changed since it was shown; read it again.")

    def _approve(self, given: dict[str, Any]) -> None:
        write_policy(state_folder(self.folder))
        experiment = self._chosen(given)
        if needed_roster(self.folder, experiment) != given.get("roster", ""):
            raise FedVLError("The roster has changed since it was shown; compare its fingerprint again.")
        approve_experiment(self.folder, experiment)

    def _refuse(self, given: dict[str, Any]) -> None:
        self._chosen(given)
        decline(log_of(self.folder), str(given["identity"]), text_of(given, "reason", MAX_REASON))

    def _write_policy(self, given: dict[str, Any]) -> None:
        replace_policy(open_state(self.folder), text_of(given, "content", MAX_POLICY) + "\n")

    def _stop(self, given: dict[str, Any]) -> None:
        if self.client is not None:
            self.client.stopping = True

    # --- what the page shows

    def state(self) -> State:
        state = state_folder(self.folder)
        joined, problem = state.exists(), ""
        if joined:
            try:
                open_state(self.folder)
            except FedVLError as error:
                problem = str(error)
        known = joined and not problem
        log = log_of(self.folder)
        return State(
            name=self.file.name,
            server=self.file.server,
            names=list(self.file.names),
            authority=authority_fingerprint(self.folder),
            joined=joined,
            problem=problem,
            key=fingerprint(public_key_of(state / KEY)) if joined and (state / KEY).exists() else "",
            request=str(request_path(self.folder, self.file.name)),
            data=self.data,
            work=self.work,
            busy=bool(self.work) or not self.jobs.empty(),
            ready=self.client is not None,
            connected=self.connected,
            failed=self.failed,
            said=self.said,
            participants=self._participants() if known else None,
            experiments=[self._request(name, each) for name, each in read_experiments(self.folder).items()],
            policy=(state / POLICY).read_text("utf-8") if known and (state / POLICY).is_file() else "",
            budget=[Spent(**{key: entry[key] for key in Spent.model_fields}) for entry in log.entries("budget")]
            if known
            else [],
            runs=self._runs() if known else [],
            log=self._lines() if known else [],
            faults=self.faults,
        )

    def _participants(self) -> Participants | None:
        pending = pending_roster(self.folder)
        try:
            roster = pending or pinned_roster(self.folder)
        except FedVLError:  # none is pinned
            return None
        return Participants(
            members=[Member(name=each.name, key=fingerprint(each.public_key)) for each in roster.members],
            fingerprint=roster.fingerprint,
            authority=roster.authority,
            pinned=pending is None,
        )

    def _identity(self, experiment: Experiment) -> str:
        settings = experiment.model_dump_json()
        if settings not in self.identities:
            self.identities[settings] = identify(experiment)
        return self.identities[settings]

    def _request(self, name: str, experiment: Experiment) -> Request:
        identity, federation, privacy = self._identity(experiment), experiment.federation, experiment.privacy
        roster, problem, reason = "", "", ""
        decision: Literal["open", "approved", "refused"] = "open"
        try:
            roster = needed_roster(self.folder, experiment) if state_folder(self.folder).exists() else ""
        except FedVLError as error:
            problem = str(error)
        if state_folder(self.folder).exists():
            made = decisions(log_of(self.folder)).get(identity)
            if made is not None and made.reason:
                decision, reason = "refused", made.reason
            elif made is not None and roster in made.rosters and not problem:
                decision = "approved"
        return Request(
            name=name,
            identity=identity,
            method=experiment.method.label,
            model=experiment.model.name,
            rounds=federation.rounds,
            clients=experiment.data.clients,
            secure_sum=federation.secure_sum,
            privacy=privacy.unit,
            epsilon=privacy.epsilon if privacy.unit != "none" else None,
            delta=privacy.delta if privacy.unit != "none" else None,
            decision=decision,
            reason=reason,
            problem=problem,
            roster=roster,
            dry_run=self.dry_runs.get(name),
        )

    def _runs(self) -> list[Run]:
        """Return the runs that this client knows, the latest first."""
        found = []
        entries = [entry for entry in read_log(self.folder).chain.entries if entry.get("kind") == "begun"]
        for entry in reversed(entries):
            folder = RunFolder(state_folder(self.folder) / "runs" / entry["run"])
            finished = folder.finished
            experiment = next(
                (
                    each
                    for each in read_experiments(self.folder).values()
                    if self._identity(each) == entry["experiment"]
                ),
                None,
            )
            rounds = experiment.federation.rounds if experiment else 0
            evaluation = read_evaluation(folder) if finished else None
            pooled = evaluation and evaluation.pooled
            keys = (("accuracy", "Accuracy, %"), ("balanced_accuracy", "Balanced accuracy, %"), ("auroc", "AUROC"))
            figures = [(title, getattr(pooled, key)) for key, title in keys if pooled and getattr(pooled, key)]
            told = own_rounds(self.folder, entry["run"], self.file.number, rounds)
            found.append(
                Run(
                    run=entry["run"],
                    method=experiment.method.label if experiment else "",
                    finished=finished,
                    rounds=rounds,
                    told=[
                        Round(
                            round=record.round,
                            bytes_up=record.bytes_up,
                            bytes_down=record.bytes_down,
                            seconds=record.seconds,
                            refused=[each.reason for each in record.refused],
                        )
                        for record in told
                    ],
                    images=pooled.images if pooled else None,
                    figures=figures,
                    zero_shot=folder.result.zero_shot_accuracy if finished else None,
                    report=str(folder.path / "report.html") if finished else "",
                )
            )
        return found

    def _lines(self) -> list[Line]:
        entries = read_log(self.folder).chain.entries[-ENTRIES:][::-1]
        return [
            Line(
                time=str(entry.get("time", ""))[:19].replace("T", " "),
                kind=str(entry.get("kind", "")),
                text=visible(", ".join(f"{key} {short(value)}" for key, value in entry.items() if key not in HIDDEN)),
            )
            for entry in entries
        ]


HIDDEN = ("time", "kind", "salt", "before", "head", "draws")


def short(value: object) -> str:
    text = str(value)
    return f"{text[:12]}..." if len(text) == 64 else text


def text_of(given: dict[str, Any], key: str, most: int) -> str:
    text = given.get(key)
    if not isinstance(text, str) or not text.strip() or len(text) > most:
        raise FedVLError(f"Give '{key}', a text of {most:,} characters at most.")
    return text.strip()


def dry_run_of(found: dict[str, Any]) -> DryRun:
    """Return the parts of a dry run that the page shows."""
    audit = found["audit"]
    return DryRun(
        leaves=[
            Leaves(
                name=name,
                kind=kind,
                shape=list(tensor.shape),
                bytes=tensor.numel() * tensor.element_size(),
            )
            for kind, tensors in found["leaves"].items()
            for name, tensor in sorted(tensors.items())
        ],
        images=found["images"],
        refusal=found["refusal"],
        attacks=[
            Attack(
                of=each.of,
                name=each.name,
                value=f"{written_value(each.value, each.unit)}; {each.conclusion}",
                shown=each.verdict == SHOWN,
                sentence=each.sentence,
            )
            for each in audit.findings
        ],
        untried=[f"{each.name} ({each.of}): {each.sentence}" for each in audit.unmeasured],
        remedies=[*audit.remedies, *([audit.budget] if audit.budget else [])],
    )


def site_server(site: Site, port: int, token: str) -> ThreadingHTTPServer:
    """Make the server of the page."""

    def answer(method: str, path: str, given: dict[str, Any]) -> Any:
        if method == "POST":
            site.act(path, given)
        return site.state().model_dump()

    files = {path: ((PAGE / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}
    return local_page(port, files, answer, token, "--port")


def serve_site(
    folder: Path, data: str | None, display: Display, stay: bool, port: int, ca_bundle: Path | None = None
) -> None:
    """Serve the page until the process is ended."""
    site, token = Site(folder, data, display, stay, ca_bundle), secrets.token_urlsafe(16)
    with served(site_server(site, port, token)) as server:
        print(
            f"http://127.0.0.1:{server.server_port}/#token={token} is the page of {site.file.name}; Ctrl-C ends it.",
            flush=True,
        )
        with suppress(KeyboardInterrupt):
            site.work_on()
