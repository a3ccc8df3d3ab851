"""The egress certificate of a site: what left it, and what attacks learn from that.

A run between machines cannot be repeated here, because the images of others are elsewhere. Its
model is compared with the last message of the server, whose hash the client's log has. Attacks are
made on the first message of this client, as in a dry run, with its own images.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedvl.audit.certificate import Certificate, Check, Leaving, Limits, NotMade, attack_of, check_leaks
from fedvl.audit.finding import Attacked, OwnAudit
from fedvl.audit.imitation import METHOD_FAILS
from fedvl.audit.messages import EXAMPLES, LOSS, REPORTED, WEIGHT
from fedvl.audit.own_update import ALONE, NOT_TRIED, OWN_ATTACKS
from fedvl.audit.words import NOT_CLAIMED
from fedvl.deployment.audit_log import LogEntry, message_entry, read_log
from fedvl.deployment.client import Client
from fedvl.deployment.messages import Header, pack_tensors
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.runs.experiment import local_engine, make_judge
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import Prepared
from fedvl.tensors import Tensors
from fedvl.version import __version__

BYTES_OF_NUMBER = 8
NUMBER_OF_IMAGES = "the number of images alone"


@dataclass(frozen=True)
class SiteRun:
    """A finished run at a client, with its images as the run prepares them."""

    place: Path  # the client's folder
    folder: RunFolder
    prepared: Prepared
    client: int
    experiment: str  # its identity
    entries: list[LogEntry]  # of the client's log, of this run

    @property
    def shared(self) -> Tensors:
        tensors = self.folder.tensors()[0]
        return {name: tensors[name] for name in self.prepared.method.first_shared(self.prepared.experiment.seed)}


def certify_site(place: Path, data: str, limits: Limits, display: Display, command: str) -> Certificate:
    """Return the certificate of the last finished run of a client's folder, by its own images."""
    client = Client(place, data, lambda line: None)
    client.prepare(display)
    run = site_run(client)
    name = client.ready[run.experiment].name
    (found,) = [each for each in client.dry_run() if each["experiment"] == name]
    return certificate_of(run, found["audit"], leaving_rows(found), limits, command)


def site_run(client: Client) -> SiteRun:
    """Return the last finished run of a client whose images are prepared."""
    folder = RunFolder.open(client.folder)
    entries = [entry for entry in read_log(client.folder).chain.entries if entry.get("run") == folder.path.name]
    begun = next((entry["experiment"] for entry in entries if entry["kind"] == "begun"), "")
    if begun not in client.ready:
        raise FedVLError(f"{client.folder} does not hold the experiment of the run in {folder.path}; restore its file.")
    return SiteRun(client.folder, folder, client.ready[begun].prepared, client.file.number, begun, entries)


def certificate_of(run: SiteRun, found: OwnAudit, rows: list[Leaving], limits: Limits, command: str) -> Certificate:
    """Return the certificate of a run, given what leaves and what attacks found of it."""
    visible = what_leaves(found)
    checks = [
        check_site_model(run),
        check_figures(run),
        check_leaving(rows),
        check_own_attacks(visible),
        check_leaks(visible, limits),
        check_spent(run),
    ]
    result, experiment = run.folder.result, run.prepared.experiment
    return Certificate(
        fedvl_version=__version__,
        issued=all(check.holds for check in checks),
        run=run.folder.path.name,
        method=result.method,
        dataset="the images of " + (result.party or "this client"),
        model=experiment.model.name,
        setting=f"the first message of this client in a run of {experiment.data.clients} clients on their own machines",
        checks=checks,
        leaving=rows,
        attacks=[attack_of(each, f"{each.view}, {each.of}", limits) for each in found.findings],
        not_made=[
            NotMade(name=each.name, view=f"{each.view}, {each.of}" if each.of else each.view, reason=each.sentence)
            for each in found.unmeasured
        ],
        remedies=found.remedies,
        budget=found.budget or "",
        epsilon="",
        not_claimed=list(NOT_CLAIMED),
        sha256={
            "config.toml": run.folder.settings_sha256,
            "state": result.state_sha256 or "",
            "last line of the log": read_log(run.place).chain.head,
            **result.files_sha256,
        },
        command=command,
    )


def what_leaves(found: OwnAudit) -> Attacked:
    """Return the attacks on what the server receives: without the worst case that a mask hides."""
    return found.model_copy(
        update={
            "findings": [each for each in found.findings if each.of != ALONE],
            "unmeasured": [each for each in found.unmeasured if each.of != ALONE],
        }
    )


def leaving_rows(found: dict[str, Any]) -> list[Leaving]:
    """Return what a dry run says that leaves in a round, with the attacks that examined it."""
    audit, sent, numbers = found["audit"], found["leaves"], found["numbers"]
    masked = found["least_clients"] is not None
    findings = what_leaves(audit).findings

    def row(name: str, item: str, shape: str, size: int, note: str = "") -> Leaving:
        examined = list(dict.fromkeys(each.name for each in findings if item in each.items))
        return Leaving(name=name, shape=shape, bytes=size, masked=masked, examined=examined or ([note] if note else []))

    rows = [
        row(
            name,
            f"{REPORTED}{name}" if kind == "report" else name,
            " x ".join(map(str, tensor.shape)) or "a number",
            tensor.numel() * tensor.element_size(),
        )
        for kind, tensors in sent.items()
        for name, tensor in sorted(tensors.items())
    ]
    told = {WEIGHT: numbers["weight"], EXAMPLES: numbers["examples"], LOSS: numbers["loss"]}
    for item, value in told.items():
        note = NUMBER_OF_IMAGES if value == found["images"] else "not sent" if value == 0 else ""
        rows.append(row(item, item, "a number", BYTES_OF_NUMBER, note))
    return rows


# --- the conditions


def check_site_model(run: SiteRun) -> Check:
    """Compare the model with the server's last message, by the client's log."""
    name = "The model is the one that the server sent at the end"
    try:
        shared = run.shared
    except FedVLError as error:
        return Check(name=name, holds=False, sentence=str(error))
    last = next((each for each in run.entries if each["kind"] == "received" and each["message"] == "finish"), None)
    if last is None:
        return Check(name=name, holds=False, sentence="The client's log has no last message of this run.")
    payload = pack_tensors(shared)
    if last["sha256"] not in {message_entry(header, payload)["sha256"] for header in last_requests(run, last)}:
        sentence = "Its tensors are not those of the message in the client's log: the model was changed."
        return Check(name=name, holds=False, sentence=sentence)
    sentence = "Its tensors have the SHA-256 of the server's last message in the client's log, whose lines all fit."
    return Check(name=name, holds=True, sentence=sentence)


def last_requests(run: SiteRun, entry: LogEntry) -> list[Header]:
    """Return what the header of the server's last message may have been."""
    kept = [path.stem.partition("-")[2] for path in run.folder.path.glob("*-*.safetensors")]
    return [
        Header(
            run=entry["run"],
            experiment=run.experiment,
            round=entry["round"] - 1,
            attempt=entry["attempt"],
            kind="finish",
            client=run.client,
            state=state,
        )
        for state in ("", *kept)  # names of private tensors: the log has a hash of the message only
    ]


def check_figures(run: SiteRun) -> Check:
    """Test the model on the client's own images again."""
    name, result = "The figures are those of the model on this client's images", run.folder.result
    engine = local_engine(run.prepared)
    judge = make_judge(run.prepared, engine)
    accuracy = judge.judge(run.folder.tensors()[0], {}).figures["accuracy"] if len(judge.test) else None
    if accuracy != result.accuracy:
        sentence = f"The result says {result.accuracy} % of its test images, and the model reaches {accuracy} %."
        return Check(name=name, holds=False, sentence=sentence)
    sentence = "There are no test images." if accuracy is None else f"Tested again: {accuracy:.2f} %."
    return Check(name=name, holds=True, sentence=sentence)


def check_leaving(rows: list[Leaving]) -> Check:
    name, missing = "Everything that leaves was examined", [row.name for row in rows if not row.examined]
    if missing:
        return Check(name=name, holds=False, sentence=f"No attack examined {', '.join(missing)}, which leaves.")
    return Check(name=name, holds=True, sentence=f"Each of {len(rows)} items of a message was examined.")


def check_own_attacks(found: Attacked) -> Check:
    """Hold if each attack has a value or does not apply, and membership has a value."""
    name = "Every attack was made, or does not apply"
    told = {each.name for each in found.findings} | {each.name for each in found.unmeasured}
    absent = [attack for attack in OWN_ATTACKS if not any(each.startswith(attack) for each in told)]
    left_out = sorted({each.name for each in found.unmeasured if each.sentence.startswith((METHOD_FAILS, NOT_TRIED))})
    problems = [f"There is no result of {', '.join(absent)}."] if absent else []
    problems += [f"{', '.join(left_out)} failed or had no time."] if left_out else []
    if not any(each.name.startswith("membership") for each in found.findings):
        problems.append("Whether images can be identified was not measured.")
    made = len({each.name for each in found.findings})
    sentence = " ".join(problems) or f"{made} attacks were made; reasons are given for others."
    return Check(name=name, holds=not problems, sentence=sentence)


def check_spent(run: SiteRun) -> Check:
    """Compare what the log says was spent with the epsilon that was agreed on."""
    name, privacy = "The privacy budget, if there is one, holds", run.prepared.experiment.privacy
    spent = max((float(entry["epsilon"]) for entry in run.entries if entry["kind"] == "budget"), default=0.0)
    if privacy.unit == "none":
        return Check(name=name, holds=True, sentence="No noise is added, so that no budget is claimed.")
    sentence = (
        f"The log has epsilon {spent:.2f} of {privacy.epsilon:g} that were agreed on, at delta {privacy.delta:g}."
    )
    return Check(name=name, holds=0 < spent <= privacy.epsilon, sentence=sentence)
