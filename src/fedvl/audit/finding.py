"""What an attack finds: a value with its interval, its chance level and one of three verdicts."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, computed_field
from pydantic.dataclasses import dataclass

from fedvl.evaluation.statistics import Z
from fedvl.files import Content, Count

SERVER, CLIENT, USER = "the server", "another client", "a user who queries"
VIEWS = (SERVER, CLIENT, USER)
SHOWN, OPEN, BELOW = "shown", "not shown", "shown to be below"
Interval = tuple[float, float]
FINDINGS_SCHEMA = 2
POWER = 0.8416212335729143  # of the normal distribution: what is found in 8 of 10 cases
MARGINS = {"": 0.05, "r": 0.1, " dB": 1.0}  # above the chance level, up to which a leak counts as negligible


@dataclass(frozen=True)
class Finding:
    """One measured value; larger always means that more leaks."""

    name: str  # as in --fail-above
    view: str
    measure: str
    value: float
    interval: Interval
    chance: float  # what is reached without seeing a message
    sentence: str
    unit: str = ""  # "r": a correlation; " dB": decibels
    items: tuple[str, ...] = ()  # what was examined, of what leaves
    counted: str = ""  # clients and images that it was measured on
    of: str = ""  # what was attacked, where there are several

    @computed_field  # type: ignore[prop-decorator]
    @property
    def goal(self) -> float:
        """The level below which a leak counts as negligible."""
        return self.chance + MARGINS[self.unit]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> str:
        """Return whether the value is above chance, below the goal (equivalence), or neither."""
        if self.interval[0] > self.chance:
            return SHOWN
        return BELOW if self.interval[1] < self.goal else OPEN

    @computed_field  # type: ignore[prop-decorator]
    @property
    def leaks(self) -> bool:
        return self.verdict == SHOWN

    @property
    def detectable(self) -> float:
        """The value that would be shown in 8 of 10 cases."""
        return self.chance + (self.interval[1] - self.interval[0]) / (2 * Z) * (Z + POWER)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def conclusion(self) -> str:
        high, goal = written_value(self.interval[1], self.unit), written_value(self.goal, self.unit)
        if self.verdict == SHOWN:
            return "Shown: the interval lies above the chance level."
        if self.verdict == BELOW:
            return f"Shown to be below {goal} for this attack."
        found = written_value(self.detectable, self.unit)
        return (
            f"Not shown, could be up to {high}: with {self.counted or 'these images'}, this attack shows a leak of {found} "
            "in 8 of 10 cases."
        )


@dataclass(frozen=True)
class Unmeasured:
    """An attack that was not made from one view, with the reason."""

    name: str
    view: str
    sentence: str
    of: str = ""


Outcome = Finding | Unmeasured


class Leaving(Content):
    """A part of a client's message, with the attacks that examined it."""

    model_config = ConfigDict(populate_by_name=True)
    part: Annotated[Literal["update", "report"], Field(alias="in")]
    name: str
    shape: list[Count]
    bytes: Count
    masked: bool
    example: list[float]
    examined: list[str]
    share: float  # of its numbers, in which images were sought
    note: str  # why it needs no attack

    @property
    def unexamined(self) -> bool:
        return not self.examined and not self.note


class Risk(Content):
    """What was shown of one of the risks by which authorities judge anonymisation."""

    risk: str
    meaning: str
    said: str
    state: Literal["shown", "open"]


class Epsilon(Content):
    """The claimed epsilon, and the lower bound that canaries showed."""

    unit: Literal["record", "client"]
    claimed: float
    delta: float
    spent: float
    rounds: Count
    bound: float
    most: float  # that so many canaries can show
    confidence: float
    canaries: Count
    guesses: Count
    right: Count
    violated: bool
    sentence: str


class RemedyChange(Content):
    """A remedy, whether it is on, and which of the values it changes."""

    remedy: str
    option: str
    on: bool
    changes: str


class Attacked(Content):
    """What attacks found of messages, and what protects these."""

    attackers_images: Count
    findings: list[Finding]
    unmeasured: list[Unmeasured]
    remedies: list[str]
    budget: str | None
    seconds: float


class Audit(Attacked):
    """What an audit of an experiment found."""

    model_config = ConfigDict(populate_by_name=True)
    version: Annotated[int, Field(alias="schema")]
    fedvl_version: str
    method: str
    dataset: str
    model: str
    partition: str
    clients: Count
    audited_clients: Count
    images_per_client: Count
    rounds: Count
    seed: Count
    headline: str
    risks: list[Risk]
    recommendations: list[str]
    leaves: list[Leaving]
    stays: list[str]
    known_seed: str
    epsilon: Epsilon | None
    not_claimed: list[str]
    made: str = ""  # when (UTC)
    participants: str = ""
    changes: list[RemedyChange] = []
    state_sha256: str | None = None  # of the trained tensors, if a run was audited
    settings_sha256: str | None = None  # of the file of settings
    above: list[str] = []  # the limits that were exceeded


class OwnAudit(Attacked):
    """What attacks found of a client's own first message."""

    images: Count
    held_out: bool  # whether the attacker's images are a part of the client's training images


def written_value(value: float, unit: str) -> str:
    """Return a value as it is shown; a small chance does not become 0."""
    if unit == " dB":
        return f"{value:.1f}{unit}"
    return f"{value:.1g}" if 0 < value < 0.005 else f"{value:z.2f}"


def of_100(share: float) -> str:
    """Return a share as so many of 100, rounded as its value is."""
    return f"{100 * float(f'{share:.2f}'):.0f}"
