"""The page of a client: what its person decides there, and the work that it starts.

It is a page of this machine alone (``report/loopback.py``). Work that takes a while runs one job
after the other in the main thread: images are read, a dry run is made, messages are answered.
``site_view.py`` has what the page shows.
"""

import queue
import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, StringConstraints, ValidationError

from fedvl.config import Experiment
from fedvl.data.check import check
from fedvl.deployment.client import Client
from fedvl.deployment.files import Frozen
from fedvl.deployment.membership import approve_experiment, make_join_request
from fedvl.deployment.policy import decline, read_experiments, replace_policy, write_policy
from fedvl.deployment.roster import (
    MAX_ROSTER_BYTES,
    PENDING,
    Roster,
    check_roster,
    needed_roster,
    pending_roster,
    pin_roster,
    write_roster,
)
from fedvl.deployment.site_view import DryRun, PageFault, SiteView, State, Work, dry_run_of
from fedvl.deployment.state import adopt_state, log_of, open_state, state_folder
from fedvl.display import Display, visible
from fedvl.errors import FedVLError
from fedvl.report.loopback import local_page, served

SITE_PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
SAID_LINES = 100  # lines of the work
JOB_POLL_SECONDS = 0.2
MAX_POLICY, MAX_REASON = 100_000, 300  # characters


# --- what the page sends


class PressedButton(Frozen):
    """An action without anything to say about it."""


class Joining(Frozen):
    """A new key (``renew``: in place of the one that there is), or a folder that was ``moved``."""

    moved: bool = False
    renew: bool = False


class RosterText(Frozen):
    content: Annotated[str, Field(min_length=1, max_length=MAX_ROSTER_BYTES)]


class PolicyText(Frozen):
    content: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_POLICY)]


class ComparedRoster(Frozen):
    fingerprint: str


class Approval(Frozen):
    """The experiment and the roster that were shown."""

    identity: str
    roster: str


class RefusedRequest(Frozen):
    identity: str
    reason: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_REASON)]


class Action(NamedTuple):
    """What the page may ask for: the form of it, and what is done."""

    form: type[Frozen]
    do: Callable[[Any], None]


class Site:
    """What is being done with a client's folder."""

    def __init__(
        self, folder: Path, data: str | None, display: Display, stay: bool, ca_bundle: Path | None = None
    ) -> None:
        self.folder, self.data, self.display, self.stay = folder, data, display, stay
        self.ca_bundle = ca_bundle
        self.view = SiteView(folder)
        self.jobs: queue.Queue[tuple[str, Callable[[], None]]] = queue.Queue()
        self.work, self.failed = "", ""
        self.said: list[str] = []
        self.client: Client | None = None  # whose images are read
        self.connected: Client | None = None  # that answers the server
        self.dry_runs: dict[str, DryRun] = {}
        self.faults: list[PageFault] | None = None
        self.actions = {
            "/join": Action(Joining, self._join),
            "/roster": Action(RosterText, self._import_roster),
            "/pin": Action(ComparedRoster, self._pin),
            "/approve": Action(Approval, self._approve),
            "/refuse": Action(RefusedRequest, self._refuse),
            "/policy": Action(PolicyText, self._write_policy),
            "/rehearse": Action(PressedButton, lambda given: self.begin("dry run", self.rehearse)),
            "/check": Action(PressedButton, lambda given: self.begin("checking the images", self.look_for_faults)),
            "/survey": Action(PressedButton, lambda given: self.begin("answering a survey", self.answer_survey)),
            "/start": Action(PressedButton, lambda given: self.begin("taking part", self.participate)),
            "/stop": Action(PressedButton, self._stop),
        }

    # --- jobs

    def work_on(self) -> None:
        """Do jobs in this thread, one after the other, until the process is ended."""
        while True:
            with suppress(queue.Empty):
                self.do(*self.jobs.get(timeout=JOB_POLL_SECONDS))

    def do(self, work: str, job: Callable[[], None]) -> None:
        """Do one job; what goes wrong is shown on the page."""
        self.work, self.failed = work, ""
        try:
            job()
        except FedVLError as error:
            self.failed = str(error)
        finally:
            self.work, self.connected = "", None

    def begin(self, work: str, job: Callable[[], None]) -> None:
        if self.work or not self.jobs.empty():
            raise FedVLError(f"Wait until this is done: {self.work or 'the work that was begun'}.")
        self.jobs.put((work, job))

    def say(self, line: str) -> None:
        self.said = [*self.said, f"{datetime.now():%H:%M:%S} {visible(line)}"][-SAID_LINES:]

    def rehearse(self) -> None:
        client = self._client()
        client.prepare(self.display)
        for found in client.dry_run():
            self.dry_runs[found["experiment"]] = dry_run_of(found)

    def participate(self) -> None:
        self._serve(self._client(), self.stay)

    def answer_survey(self) -> None:
        """Check the images and answer a survey, as fedvl client --survey does."""
        self._serve(Client(self.folder, self.data, self.say, survey=True), stay=False)

    def _serve(self, client: Client, stay: bool) -> None:
        with client.watch(self.ca_bundle) as watch:
            client.prepare(self.display)
            client.stopping, self.connected = False, client
            client.serve(watch, stay)

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
            PageFault(title=each.title, sentence=each.sentence, fix=each.fix, files=each.files[:5])
            for each in found.faults
        ]

    # --- what the page asks for

    def act(self, path: str, given: dict[str, Any]) -> None:
        """Do what a person decided; refuse what is not one of the actions."""
        action = self.actions.get(path)
        if action is None:
            raise FedVLError(f"There is no action {path[:40]}.")
        try:
            form = action.form.model_validate(given)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, problem["loc"]))
            raise FedVLError(f"Give '{field}' as the page does: {problem['msg']}.") from error
        action.do(form)

    def _join(self, given: Joining) -> None:
        if given.moved:
            adopt_state(self.folder)
        else:
            make_join_request(self.folder, given.renew)

    def _import_roster(self, given: RosterText) -> None:
        open_state(self.folder)
        try:
            roster = Roster.model_validate_json(given.content)
        except ValidationError as error:
            raise FedVLError(
                "This is not a roster; ask the operator for the file of fedvl federation roster."
            ) from error
        check_roster(self.folder, self.view.file, roster)
        write_roster(state_folder(self.folder) / PENDING, roster)

    def _pin(self, given: ComparedRoster) -> None:
        pending = pending_roster(self.folder)
        if pending is None or given.fingerprint != pending.fingerprint:
            raise FedVLError("The roster has changed since it was shown; compare its fingerprint again.")
        pin_roster(self.folder, pending)

    def _chosen(self, identity: str) -> Experiment:
        """Return the experiment that was shown; refuse if its file says something else by now."""
        open_state(self.folder)
        for experiment in read_experiments(self.folder).values():
            if self.view.identity(experiment) == identity:
                return experiment
        raise FedVLError("This experiment has changed since it was shown; read it again.")

    def _approve(self, given: Approval) -> None:
        write_policy(state_folder(self.folder))
        experiment = self._chosen(given.identity)
        if needed_roster(self.folder, experiment) != given.roster:
            raise FedVLError("The roster has changed since it was shown; compare its fingerprint again.")
        approve_experiment(self.folder, experiment)

    def _refuse(self, given: RefusedRequest) -> None:
        self._chosen(given.identity)
        decline(log_of(self.folder), given.identity, given.reason)

    def _write_policy(self, given: PolicyText) -> None:
        replace_policy(open_state(self.folder), given.content + "\n")

    def _stop(self, given: PressedButton) -> None:
        if self.connected is not None:
            self.connected.stopping = True

    def state(self) -> State:
        """Return all that the page shows."""
        work = Work(
            data=self.data,
            work=self.work,
            busy=bool(self.work) or not self.jobs.empty(),
            ready=self.client is not None,
            connected=self.connected is not None,
            failed=self.failed,
            said=self.said,
            faults=self.faults,
        )
        return self.view.state(work, self.dry_runs)


def site_server(site: Site, port: int, token: str) -> ThreadingHTTPServer:
    """Make the server of the page."""

    def answer(method: str, path: str, given: dict[str, Any]) -> Any:
        if method == "POST":
            site.act(path, given)
        return site.state().model_dump()

    files = {path: ((SITE_PAGE / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}
    return local_page(port, files, answer, token, "--port")


def serve_site(
    folder: Path, data: str | None, display: Display, stay: bool, port: int, ca_bundle: Path | None = None
) -> None:
    """Serve the page until the process is ended."""
    site, token = Site(folder, data, display, stay, ca_bundle), secrets.token_urlsafe(16)
    with served(site_server(site, port, token)) as server:
        print(
            f"http://127.0.0.1:{server.server_port}/#token={token} is the page of {site.view.file.name}; Ctrl-C ends it.",
            flush=True,
        )
        with suppress(KeyboardInterrupt):
            site.work_on()
