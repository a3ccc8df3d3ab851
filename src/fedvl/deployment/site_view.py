"""What the page of a client shows of its folder: requests, roster, policy, budget, runs and log."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fedvl.audit.finding import SHOWN, written_value
from fedvl.config import Experiment
from fedvl.deployment.audit_log import own_rounds, read_log
from fedvl.deployment.files import Frozen
from fedvl.deployment.keys import authority_fingerprint, fingerprint, public_key_of
from fedvl.deployment.membership import KEY
from fedvl.deployment.policy import POLICY_FILE, decisions, identify, read_experiments
from fedvl.deployment.roster import needed_roster, pending_roster, pinned_roster
from fedvl.deployment.state import log_of, open_state, read_party, request_path, state_folder
from fedvl.display import visible
from fedvl.errors import FedVLError
from fedvl.evaluation.figures import Estimate
from fedvl.runs.evaluation import read_evaluation
from fedvl.runs.folder import RunFolder

ENTRIES = 200  # of the log, that the page shows
HIDDEN = ("time", "kind", "salt", "before", "head", "draws")


class Leaves(Frozen):
    """A tensor that leaves in a round."""

    name: str
    kind: str
    shape: list[int]
    bytes: int


class ShownAttack(Frozen):
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
    attacks: list[ShownAttack]
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


class ShownRound(Frozen):
    round: int
    bytes_up: int
    bytes_down: int
    seconds: float
    refused: list[str]


class ShownRun(Frozen):
    """A run that this client takes or took part in."""

    run: str
    method: str
    finished: bool
    rounds: int
    told: list[ShownRound]
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


class LogLine(Frozen):
    time: str
    kind: str
    text: str


class PageFault(Frozen):
    title: str
    sentence: str
    fix: str
    files: list[str]


class Work(Frozen):
    """What is being done with a client's folder in this process."""

    data: str | None
    work: str
    busy: bool
    ready: bool
    connected: bool
    failed: str
    said: list[str]
    faults: list[PageFault] | None


class State(Work):
    """All that the page shows."""

    name: str
    server: str
    names: list[str]
    authority: str
    joined: bool
    problem: str  # of the state folder
    key: str
    request: str  # what is sent to the operator
    participants: Participants | None
    experiments: list[Request]
    policy: str
    budget: list[Spent]
    runs: list[ShownRun]
    log: list[LogLine]


class SiteView:
    """What a client's folder holds, as its page shows it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, read_party(folder)
        self.identities: dict[str, str] = {}  # of experiments, by their settings

    def state(self, work: Work, dry_runs: Mapping[str, DryRun]) -> State:
        """Return all that the page shows; ``dry_runs``: by experiment."""
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
            **work.model_dump(),
            participants=self._participants() if known else None,
            experiments=[
                self._request(name, each, dry_runs.get(name)) for name, each in read_experiments(self.folder).items()
            ],
            policy=(state / POLICY_FILE).read_text("utf-8") if known and (state / POLICY_FILE).is_file() else "",
            budget=[Spent(**{key: entry[key] for key in Spent.model_fields}) for entry in log.entries("budget")]
            if known
            else [],
            runs=self._runs() if known else [],
            log=self._lines() if known else [],
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

    def identity(self, experiment: Experiment) -> str:
        settings = experiment.model_dump_json()
        if settings not in self.identities:
            self.identities[settings] = identify(experiment)
        return self.identities[settings]

    def _request(self, name: str, experiment: Experiment, dry_run: DryRun | None) -> Request:
        identity, federation, privacy = self.identity(experiment), experiment.federation, experiment.privacy
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
            dry_run=dry_run,
        )

    def _runs(self) -> list[ShownRun]:
        """Return the runs that this client knows, the latest first."""
        found = []
        known = read_log(self.folder).chain.entries
        surveys = {entry["run"] for entry in known if entry.get("kind") == "surveyed"}
        entries = [entry for entry in known if entry.get("kind") == "begun" and entry["run"] not in surveys]
        for entry in reversed(entries):
            folder = RunFolder(state_folder(self.folder) / "runs" / entry["run"])
            finished = folder.finished
            experiment = next(
                (each for each in read_experiments(self.folder).values() if self.identity(each) == entry["experiment"]),
                None,
            )
            rounds = experiment.federation.rounds if experiment else 0
            evaluation = read_evaluation(folder) if finished else None
            pooled = evaluation and evaluation.pooled
            keys = (("accuracy", "Accuracy, %"), ("balanced_accuracy", "Balanced accuracy, %"), ("auroc", "AUROC"))
            figures = [(title, getattr(pooled, key)) for key, title in keys if pooled and getattr(pooled, key)]
            told = own_rounds(self.folder, entry["run"], self.file.number, rounds)
            found.append(
                ShownRun(
                    run=entry["run"],
                    method=experiment.method.label if experiment else "",
                    finished=finished,
                    rounds=rounds,
                    told=[
                        ShownRound(
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

    def _lines(self) -> list[LogLine]:
        entries = read_log(self.folder).chain.entries[-ENTRIES:][::-1]
        return [
            LogLine(
                time=str(entry.get("time", ""))[:19].replace("T", " "),
                kind=str(entry.get("kind", "")),
                text=visible(
                    ", ".join(f"{key} {shortened_hash(value)}" for key, value in entry.items() if key not in HIDDEN)
                ),
            )
            for entry in entries
        ]


def shortened_hash(value: object) -> str:
    text = str(value)
    return f"{text[:12]}..." if len(text) == 64 else text


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
            ShownAttack(
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
