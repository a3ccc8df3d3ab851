"""A party's own policy: what it answers, whatever the server asks and whoever wrote the experiment.

``policy.toml`` is read before each answer. Approvals are entries of the party's log, by the hash of
an experiment with all its settings and the model's weights, and by the fingerprint of the roster
for one with secure aggregation.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, time
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from fedvl.config import MAX_CLIENTS, MAX_ROUNDS, Experiment, Section, explain, read_toml
from fedvl.data.fetch import HUB
from fedvl.data.imported import encoding_in, open_model
from fedvl.deployment.audit_log import AuditLog
from fedvl.deployment.extras import need
from fedvl.deployment.files import experiment_id, refuse_method_file
from fedvl.errors import FedVLError
from fedvl.federation.accounting import Account, Step, epsilon_of
from fedvl.files import write_whole
from fedvl.methods.base import Method
from fedvl.methods.parts.synthetic import PIPELINE
from fedvl.runs.folder import downloads_of
from fedvl.runs.requirements import hides_statistics
from fedvl.runs.settings import resolve_experiment

POLICY_FILE = "policy.toml"
TEMPLATE = """\
# What this party answers. FedVL reads this file before each answer: what it does not allow is refused,
# and nothing leaves. Every run must be approved besides (fedvl federation approve).

# Methods that may be run; "*" is all that are installed.
methods = ["*"]

# What may leave: "shared" (what all clients train), "sent" (what a client makes of its own data besides),
# "report" (what a method asks for before a round); or tensors by name, as fedvl client --dry-run shows them.
leaves = ["shared", "sent", "report"]

# Fewest clients in a sum. With 1 the server may see this party's own update; with 2 or more it gets
# nothing but secure sums (--secure-sum) over as many clients.
least_clients = 1

# Fewest training images of this party. An update of a few images says much about each of them.
least_images = 10

# Whether the statistics of a training-free method (such as ridge) may leave by themselves. Products of single images
# can be read from those of this party alone. With false they leave in a secure sum (--secure-sum) or with noise of
# this client's own (--privacy record:eps=...). With true the server keeps them with the run, and can value each
# client by them (fedvl contributions).
single_statistics = false

# Most rounds of a run.
most_rounds = 1000

# Hours in which requests are answered, by this machine's clock; "22:00-06:00" is over night.
hours = "00:00-24:00"

# Most evaluations of a run on this party's own test images, of which counts leave; 0: none. Further ones tell how
# images differ that came or went between.
evaluations = 1

# Most surveys of this party's images before training, of which counts leave; 0: none.
surveys = 1

# Whether the names of this party's classes may leave in a survey (fedvl survey --class-names), by themselves also where
# all else is summed, so that the server can compare them with those of other parties.
class_names = false

# Fewest images in a count that leaves by itself (not in a secure sum): bins with fewer are merged, and rare classes
# left out.
least_cell = 5

# Most epsilon, at delta, that all runs together may spend. Covered is noise that this client adds itself:
# --privacy record:eps=... (of each image), and --privacy client:eps=... with --secure-sum (of this client
# with all its images; it counts for each image too). Other runs are refused: with noise of the server alone,
# or with none. Not covered: that this client takes part, and how many images it has.
# epsilon = 8.0
# delta = 1e-5
"""


def parse_hours(text: str) -> tuple[time, time]:
    begin, end = (datetime.strptime(part, "%H:%M").time() for part in text.replace("24:00", "00:00").split("-"))
    return begin, end


def check_hours(text: str) -> str:
    try:
        parse_hours(text)
    except ValueError:
        raise PydanticCustomError("hours", "it should be two times of day, such as 08:00-18:00") from None
    return text


class Policy(Section):
    """What a party answers; every line of policy.toml."""

    methods: tuple[str, ...] = ("*",)
    leaves: tuple[str, ...] = ("shared", "sent", "report")
    least_clients: int = Field(1, ge=1, le=MAX_CLIENTS)
    least_images: int = Field(10, ge=0)
    single_statistics: bool = False
    most_rounds: int = Field(1000, ge=0, le=MAX_ROUNDS)
    hours: Annotated[str, AfterValidator(check_hours)] = "00:00-24:00"
    evaluations: int = Field(1, ge=0)
    surveys: int = Field(1, ge=0)
    class_names: bool = False
    least_cell: int = Field(5, ge=1)
    epsilon: float | None = Field(None, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)

    def check_experiment(self, experiment: Experiment, method: Method, images: int) -> None:
        """Refuse an experiment that a line does not allow."""
        self.check_settings(experiment)
        for name, kind in sent_by(method, experiment.seed):
            if not any(part == kind or fnmatchcase(name, part) for part in self.leaves):
                raise refused_line(
                    "leaves", f"does not have the {kind} tensor {name}; add it, or agree on another method"
                )
        if method.role.statistics and not (self.single_statistics or hides_statistics(experiment)):
            raise refused_line(
                "single_statistics",
                f"is false, and the statistics of {experiment.method.name} would leave by themselves, from which images can be "
                "recovered; agree on a run with --secure-sum or --privacy record:eps=..., or make it true",
            )
        if images < self.least_images:  # how many there are is not for the server to know
            raise refused_line(
                "least_images", f"is {self.least_images}, and this party has fewer; add images, or lower it"
            )

    def check_settings(self, experiment: Experiment) -> None:
        """Refuse settings that a line does not allow, before a method is made of them."""
        federation = experiment.federation
        if experiment.method.name not in self.methods and "*" not in self.methods:
            raise refused_line("methods", f"does not have {experiment.method.name}; add it, or agree on another method")
        if self.least_clients > 1 and not federation.secure_sum:
            raise refused_line(
                "least_clients",
                f"is {self.least_clients}, and the server would see this party's update by itself; agree on a run with "
                "--secure-sum, or make it 1",
            )
        if federation.rounds > self.most_rounds:
            raise refused_line(
                "most_rounds",
                f"is {self.most_rounds}, and the run has {federation.rounds}; raise it, or agree on fewer rounds",
            )
        if self.epsilon is not None:
            need("privacy", f"The line epsilon of this client's {POLICY_FILE}")
        own_noise = experiment.privacy.unit == "record" or (
            experiment.privacy.unit == "client" and federation.secure_sum
        )
        if self.epsilon is not None and not own_noise:
            raise refused_line(
                "epsilon",
                "allows only runs in which this client adds noise itself; agree on one with --privacy record:eps=..., or "
                "client:eps=... and --secure-sum, or remove the line",
            )

    def check_evaluation(self, experiment: Experiment, number: int) -> None:
        """Refuse an evaluation too many."""
        if number > self.evaluations:
            raise refused_line(
                "evaluations",
                f"is {self.evaluations}, and evaluation {number} of this run was requested; raise it, or use the figures that "
                "there are",
            )

    def check_plain_counts(self, experiment: Experiment) -> None:
        """Refuse counts without the noise that all else of this party has."""
        if self.epsilon is not None or experiment.privacy.unit != "none":
            raise FedVLError(
                "The counts of this evaluation have no noise, and this party sends nothing without; request them with noise "
                "(fedvl evaluate --epsilon)."
            )

    def check_survey(self, experiment: Experiment, earlier: int) -> None:
        """Refuse a survey too many, or one without the noise that runs have."""
        if earlier >= self.surveys:
            raise refused_line(
                "surveys", f"is {self.surveys}, and {earlier} were answered; raise it, or use what they found"
            )
        if self.epsilon is not None or experiment.privacy.unit != "none":
            raise FedVLError("The counts of a survey have no noise, and this party sends nothing without.")

    def check_names(self) -> None:
        """Refuse to send names of classes, unless they may leave."""
        if not self.class_names:
            raise refused_line(
                "class_names", "is false, and names of classes were requested; make it true if they may leave"
            )

    def check_time(self, now: datetime) -> None:
        begin, end = parse_hours(self.hours)
        moment = now.time()
        if not (begin <= moment < end if begin < end else moment >= begin or moment < end):
            raise refused_line("hours", f"is {self.hours}, and it is {moment:%H:%M} here; ask again then, or change it")

    def check_budget(
        self, spent: Iterable[Mapping[str, Any]], unit: str, step: Step, count: int, account: Account = "pld"
    ) -> None:
        """Refuse steps that take the sum over all runs above the ceiling, for image or client."""
        if self.epsilon is None:
            return
        steps = {"record": Counter[Step](), "client": Counter[Step]()}
        for entry in spent:
            steps[entry["unit"]][Step(entry["rate"], entry["sigma"])] += entry["steps"]
            account = "rdp" if entry.get("account") == "rdp" else account  # which bounds both kinds of noise
        steps[unit][step] += count
        if steps["record"]:  # one image can turn a clipped update around, by twice the clip
            steps["record"] += Counter({Step(rate, sigma / 2): n for (rate, sigma), n in steps["client"].items()})
        for whose, taken in steps.items():
            total = epsilon_of(taken, self.delta, account)
            if total > self.epsilon:
                raise refused_line(
                    "epsilon",
                    f"is {self.epsilon:g}, and this round would take the sum over all runs to {total:.3g} for each {whose}; the "
                    "budget of these images is spent",
                )


def refused_line(line: str, why: str) -> FedVLError:
    return FedVLError(f"The line {line} of this party's {POLICY_FILE} {why}.")


def read_policy(state: Path) -> Policy:
    path = state / POLICY_FILE
    if not path.is_file():
        raise FedVLError(f"There is no {path}; fedvl federation approve {state.parent} writes one to begin with.")
    try:
        return Policy.model_validate(read_toml(path))
    except ValidationError as error:
        raise FedVLError(f"{path}: {explain(error, Policy)}") from error


def write_policy(state: Path) -> bool:
    """Write a policy to begin with, unless there is one; return whether it was written."""
    if (state / POLICY_FILE).exists():
        return False
    write_whole(state / POLICY_FILE, TEMPLATE.encode())
    return True


def replace_policy(state: Path, content: str) -> None:
    """Write another policy, if every line of it is valid."""
    fresh = state / f"{POLICY_FILE}.new"
    write_whole(fresh, content.encode())
    try:
        Policy.model_validate(read_toml(fresh))
        os.replace(fresh, state / POLICY_FILE)
    except ValidationError as error:
        raise FedVLError(f"{POLICY_FILE}: {explain(error, Policy)}") from error
    finally:
        fresh.unlink(missing_ok=True)


def policy_hash(state: Path) -> str:
    return hashlib.sha256((state / POLICY_FILE).read_bytes()).hexdigest()


@cache
def sent_by(method: Method, seed: int) -> list[tuple[str, str]]:
    """Return name and kind of each tensor that a client sends by the method's declaration."""
    consultation = method.consultation()
    return [
        *((name, "shared") for name in method.first_shared(seed) if not method.role.statistics),
        *((name, "sent") for name in (*method.role.sent, *method.role.statistics)),
        *((name, "report") for name in (consultation.report_shapes if consultation else ())),
    ]


# --- approvals


def read_experiments(folder: Path, dataset: bool = False) -> dict[str, Experiment]:
    """Return the experiments that lie in a client's folder, by name; refuse those that download.

    dataset: whether the experiments' own dataset will be opened, as in a rehearsal.
    """
    found = {}
    for path in sorted(folder.glob("experiments/*.toml")):
        settings = read_toml(path)
        refuse_method_file(settings)
        found[path.stem] = resolve_experiment(settings)
        refuse_downloads(path.stem, found[path.stem], dataset)
    if not found:
        raise FedVLError(f"There is no experiment in {folder / 'experiments'}; ask the server's operator for one.")
    return found


def refuse_downloads(name: str, experiment: Experiment, dataset: bool) -> None:
    """Refuse what would contact the hub: a folder from others decides no download."""
    generator = str(experiment.method.options.get("synthetic") or "")
    if generator.startswith(PIPELINE) and not Path(generator.removeprefix(PIPELINE)).is_dir():
        raise FedVLError(
            f"The experiment {name} generates images with {generator}, which is not a folder on this machine, and a client "
            "downloads nothing for an operator; agree on a folder of images as method.synthetic."
        )
    if absent := downloads_of(experiment, dataset):
        kind, _, hub_name = absent[0].partition(" ")
        option = " --repo-type dataset" if kind == "dataset" else ""
        raise FedVLError(
            f"The experiment {name} names the {absent[0]} of the hub, which is not on this machine, and a client downloads "
            f"nothing for an operator; if you want it, run hf download {hub_name.removeprefix(HUB)}{option}."
        )


def identify(experiment: Experiment) -> str:
    """Return the hash of an experiment with the weights of its model, as messages carry it."""
    encoder = encoding_in(open_model(experiment.model.name), experiment.model.encoding)
    return experiment_id(experiment, encoder)


def approve(log: AuditLog, experiment: str, roster: str = "") -> None:
    """Approve an experiment; one with secure aggregation, with the clients of this roster."""
    if (experiment, roster) not in approved(log):
        log.append("approved", experiment=experiment, roster=roster)


class Decision(NamedTuple):
    """The latest decision about an experiment: its rosters if approved, or a reason."""

    rosters: frozenset[str]
    reason: str


def decisions(log: AuditLog) -> dict[str, Decision]:
    """Return what was decided about each experiment; a refusal ends earlier approvals."""
    found: dict[str, Decision] = {}
    for entry in log.entries("approved", "declined"):
        before = found.get(entry["experiment"], Decision(frozenset(), ""))
        if entry["kind"] == "declined":
            found[entry["experiment"]] = Decision(frozenset(), entry["reason"])
        else:
            found[entry["experiment"]] = Decision(before.rosters | {entry.get("roster", "")}, "")
    return found


def decline(log: AuditLog, experiment: str, reason: str) -> None:
    """Refuse an experiment from now on; the server is sent the reason when it asks."""
    log.append("declined", experiment=experiment, reason=reason)


def approved(log: AuditLog) -> set[tuple[str, str]]:
    """Return the experiments that are approved, each with the fingerprint of its roster."""
    return {(experiment, roster) for experiment, made in decisions(log).items() for roster in made.rosters}


def check_approved(log: AuditLog, experiment: str, roster: str, folder: Path) -> None:
    if (experiment, roster) in approved(log):
        return
    made = decisions(log).get(experiment)
    if made is not None and made.reason:
        raise FedVLError(f"This party refuses the experiment {experiment[:12]}: {made.reason}")
    if made is not None:
        raise FedVLError(
            f"This party approved the experiment {experiment[:12]} with another roster than the one that is pinned now; its "
            f"operator compares the fingerprint with the other clients, and then runs fedvl federation approve {folder.name}."
        )
    raise FedVLError(
        f"This party has not approved the experiment {experiment[:12]}; its operator looks at fedvl client --dry-run, and "
        f"then runs fedvl federation approve {folder.name}."
    )
