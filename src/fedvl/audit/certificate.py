"""The egress certificate: what leaves a run, what attacks learned of it, and whether it may leave.

It is issued if the run is what its folder says, everything that leaves was examined, every attack
was made or does not apply, and no attack shows a leak beyond a limit that a person accepted.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from fedvl.audit import perform
from fedvl.audit.canaries import EPSILON_FINDING
from fedvl.audit.finding import SERVER, SHOWN, Attacked, Audit, Finding, written_value
from fedvl.audit.imitation import METHOD_FAILS
from fedvl.audit.perform import unexamined
from fedvl.audit.show import finding_figure, interval, setting, shape_of
from fedvl.data.sources import OPEN_ANEW, Opener
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.files import write_whole
from fedvl.report.card import plain
from fedvl.report.page import write_page
from fedvl.report.tables import human_bytes
from fedvl.runs.contents import Result
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder

SCHEMA = 1
SAME = ("state_sha256", "files_sha256", "accuracy", "per_round", "rounds")  # of a run that is repeated
TO_FILL = "*To be completed by the controller.*"
Limits = Mapping[str, float]


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Check(Model):
    """One condition of the certificate: whether it holds, and why."""

    name: str
    holds: bool
    sentence: str


class Leaving(Model):
    """An item of a client's message."""

    name: str
    shape: str
    bytes: int
    masked: bool
    examined: list[str]


class Attack(Model):
    """An attack that was made, from one view; ``accepted``: the limit that a person gave for it."""

    name: str
    view: str
    value: str
    interval: str
    chance: str
    verdict: str
    conclusion: str
    accepted: float | None


class NotMade(Model):
    """An attack that was not made from one view, with the reason."""

    name: str
    view: str
    reason: str


class Certificate(Model):
    certificate_schema: int = SCHEMA
    fedvl_version: str
    issued: bool
    run: str
    method: str
    dataset: str
    model: str
    setting: str
    checks: list[Check]
    leaving: list[Leaving]
    attacks: list[Attack]
    not_made: list[NotMade]
    remedies: list[str]
    budget: str
    epsilon: str
    not_claimed: list[str]
    sha256: dict[str, str]  # of the settings, of what was trained, and of each file of the model
    command: str  # that repeats it

    @property
    def reasons(self) -> list[str]:
        return [check.sentence for check in self.checks if not check.holds]


def certify(
    folder: RunFolder,
    found: Audit,
    limits: Limits,
    display: Display,
    command: str,
    opener: Opener = OPEN_ANEW,
) -> Certificate:
    """Return the certificate of a finished run and its audit."""
    if not folder.finished:
        raise FedVLError(
            f"The run in {folder.path} is not finished; a certificate is for a finished run: fedvl resume it."
        )
    checks = [
        check_run(folder, display, opener),
        check_examined(found),
        check_attacks(found),
        check_leaks(found, limits),
        check_epsilon(found),
    ]
    result = folder.result
    hashes = {"config.toml": folder.settings_sha256, "state": result.state_sha256 or ""}
    return Certificate(
        fedvl_version=found.fedvl_version,
        issued=all(check.holds for check in checks),
        run=folder.path.name,
        method=found.method,
        dataset=found.dataset,
        model=found.model,
        setting=setting(found),
        checks=checks,
        leaving=[
            Leaving(
                name=row.name,
                shape=shape_of(row),
                bytes=row.bytes,
                masked=row.masked,
                examined=row.examined or ([row.note] if row.note else []),
            )
            for row in found.leaves
        ],
        attacks=[attack_of(each, each.view, limits) for each in found.findings],
        not_made=[NotMade(name=each.name, view=each.view, reason=each.sentence) for each in found.unmeasured],
        remedies=found.remedies,
        budget=found.budget or "",
        epsilon=found.epsilon.sentence if found.epsilon else "",
        not_claimed=found.not_claimed,
        sha256={**hashes, **result.files_sha256},
        command=command,
    )


def attack_of(found: Finding, view: str, limits: Limits) -> Attack:
    """Return an attack as a certificate states it."""
    return Attack(
        name=found.name,
        view=view,
        value=finding_figure(found),
        interval=interval(found),
        chance=written_value(found.chance, found.unit),
        verdict=found.verdict,
        conclusion=found.conclusion,
        accepted=limits.get(found.name),
    )


# --- the conditions


def check_run(folder: RunFolder, display: Display, opener: Opener) -> Check:
    """Run the settings of a folder anew, and compare the model and the figures."""
    name = "The run is what its folder says"
    try:
        folder.tensors()
    except FedVLError as error:
        return Check(name=name, holds=False, sentence=str(error))
    with tempfile.TemporaryDirectory() as place:
        again = RunFolder(Path(place), trust_method=True)
        again.describe(folder.experiment)
        repeated = complete(again, display, opener)
    different = [key for key in SAME if getattr(repeated, key) != getattr(folder.result, key)]
    if different:
        sentence = (
            f"The run was repeated from its settings, and differs in {', '.join(different)}: settings, model or result were "
            "changed, or it was made on another kind of machine."
        )
        return Check(name=name, holds=False, sentence=sentence)
    state = str(repeated.state_sha256)
    sentence = f"It was repeated from its settings, to the same model (SHA-256 {state[:16]}) and the same accuracy of each round."
    return Check(name=name, holds=True, sentence=sentence)


def check_examined(found: Audit) -> Check:
    name, missing = "Everything that leaves was examined", unexamined(found.leaves)
    if missing:
        return Check(name=name, holds=False, sentence=f"No attack examined {', '.join(missing)}, which leaves.")
    count = len(found.leaves)
    return Check(
        name=name, holds=True, sentence=f"Each of {count} items of a message was examined, or is the same for all."
    )


def check_attacks(found: Audit) -> Check:
    """Hold if each attack has a value or a reason, and membership a value."""
    name = "Every attack was made, or does not apply"
    told = {each.name for each in found.findings} | {each.name for each in found.unmeasured}
    absent = [module.NAMES[0] for module in perform.ATTACKS if not told.intersection(module.NAMES)]
    failed = sorted({each.name for each in found.unmeasured if each.sentence.startswith(METHOD_FAILS)})
    measured = {each.name for each in found.findings if each.view == SERVER}
    problems = [f"There is no result of {', '.join(absent)}."] if absent else []
    problems += [f"The method's code failed in {', '.join(failed)}."] if failed else []
    if found.leaves and not any(each.startswith("membership") for each in measured):
        problems.append("Whether images can be identified was not measured from the server's view.")
    sentence = (
        " ".join(problems) or f"{len(measured)} attacks were made from the server's view; reasons are given for others."
    )
    return Check(name=name, holds=not problems, sentence=sentence)


def check_leaks(found: Attacked, limits: Limits) -> Check:
    """Hold if no attack shows a leak, unless its whole interval is below a limit that was given."""
    name = "No attack shows a leak that was not accepted"
    beyond = [
        f"{each.name} by {each.view} ({finding_figure(each)}, {interval(each)})"
        for each in found.findings
        if each.interval[1] > limits.get(each.name, float("inf" if each.verdict != SHOWN else "-inf"))
    ]
    if beyond:
        return Check(name=name, holds=False, sentence=f"Leaks are shown, or above their limit: {'; '.join(beyond)}.")
    accepted = [f"{attack} up to {limit:g}" for attack, limit in limits.items()]
    sentence = (
        f"Accepted by the person who ran the audit: {', '.join(accepted)}."
        if accepted
        else "No leak is shown by any attack."
    )
    return Check(name=name, holds=True, sentence=sentence)


def check_epsilon(found: Audit) -> Check:
    name, epsilon = "The privacy budget, if there is one, holds", found.epsilon
    if epsilon is None:
        failed = [each.sentence for each in found.unmeasured if each.name == EPSILON_FINDING]
        if failed:
            return Check(name=name, holds=False, sentence=f"The budget was not tested. {failed[0]}")
        return Check(name=name, holds=True, sentence="No noise is added, so that no budget is claimed.")
    return Check(name=name, holds=not epsilon.violated, sentence=epsilon.sentence)


# --- files


def write_certificate(certificate: Certificate, result: Result, folder: Path) -> Path:
    """Write the page, the JSON, and the draft of an impact assessment; return the page's path."""
    write_whole(folder / "certificate.json", certificate.model_dump_json(indent=1).encode())
    write_whole(folder / "assessment.md", assessment(certificate, result).encode())
    values = {"certificate": certificate, "total": human_bytes(sum(row.bytes for row in certificate.leaving))}
    return write_page(folder / "certificate.html", "certificate.html.j2", values)


def assessment(certificate: Certificate, result: Result) -> str:
    """Return the draft of a data protection impact assessment (GDPR, Article 35(7)) in Markdown."""
    leaves = [
        f"`{plain(row.name)}`: {row.shape}, {human_bytes(row.bytes)} a round{', masked' if row.masked else ''}"
        for row in certificate.leaving
    ]
    attacks = [
        f"{each.name}, seen by {each.view}: {each.value} ({each.interval}; chance level {each.chance}): {each.verdict}"
        for each in certificate.attacks
    ]
    checks = [
        f"{'holds' if check.holds else '**does not hold**'}: {check.name}. {plain(check.sentence)}"
        for check in certificate.checks
    ]
    counts = result.partition_counts
    images = sum(map(sum, counts))
    return f"""# Data protection impact assessment (draft)

This draft was filled in from the run {plain(certificate.run)} by FedVL {certificate.fedvl_version}. It is not legal advice.
What a program cannot know is left to the controller, who is responsible for the whole.

## 1. Description of the processing (Article 35(7)(a))

- Purpose and legal basis: {TO_FILL}
- Controllers, processors and recipients: {TO_FILL}
- Data subjects and retention: {TO_FILL}
- Technique: {plain(certificate.method)} adapts {plain(certificate.model)} to {plain(certificate.dataset)}.
- Audited: {plain(certificate.setting)}.
- Images used: {f"{images:,} of {len(counts)} participants" if images else TO_FILL}

What leaves a participant in each round:

{bullets(leaves or ["Nothing leaves."])}

Images, labels and private tensors stay.

## 2. Necessity and proportionality (Article 35(7)(b))

- Why images are not pooled, and why fewer or coarser data would not do: {TO_FILL}
- Accuracy reached: {result.accuracy or 0:.2f} %; without training: {result.zero_shot_accuracy or 0:.2f} %.
- Information for data subjects, and their rights: {TO_FILL} `fedvl withdraw` removes the images of a participant from the model.

## 3. Risks (Article 35(7)(c))

Measured by attacks on this run's messages and model:

{bullets(attacks or ["No attack was made."])}

Limits of these measurements:

{bullets([plain(each) for each in certificate.not_claimed])}

- Likelihood and severity for data subjects: {TO_FILL}

## 4. Measures (Article 35(7)(d))

{bullets([plain(each) for each in certificate.remedies] or ["No secure aggregation and no noise: the server receives each update."])}
- Budget: {plain(certificate.budget or "no noise is added, so that no guarantee of differential privacy is given")}

Conditions of the egress certificate, which is {"issued" if certificate.issued else "**not issued**"}:

{bullets(checks)}

- Further organisational measures, and residual risk: {TO_FILL}
- Advice of the data protection officer, decision, date and signature: {TO_FILL}

Repeat with `{plain(certificate.command)}`.
"""


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
