"""Show an audit: a table with a sentence for each attack, and a page for an officer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedvl.audit.finding import BELOW, SHOWN, VIEWS, Audit, Finding, Leaving, OwnAudit, Unmeasured, written_value
from fedvl.audit.words import headline, risk_of
from fedvl.display import duration
from fedvl.report.page import write_page
from fedvl.report.svg import element, scale
from fedvl.report.tables import human_bytes, moment

TITLES = {
    "label-histogram": "How many images of each class",
    "label-histogram-of-report": "How many images of each class, from the report",
    "label-probe": "Which clients have many images of a class",
    "class-names": "What the classes are called",
    "class-names-by-seed": "Which classes, with the seed known",
    "membership": "Whether an image was trained on, from gradients",
    "membership-at-1-percent": "The same: training images identified at 1 % false alarms",
    "membership-replay": "Whether an image was trained on, from everything that leaves",
    "membership-replay-at-1-percent": "The same: training images identified at 1 % false alarms",
    "membership-leverage": "Whether an image was trained on, from sums of features by the closed form",
    "membership-leverage-at-1-percent": "The same: training images identified at 1 % false alarms",
    "feature-recovery": "Encoded images",
    "feature-linking": "Encoded images, linked to images",
    "one-image-recovery": "Encoded image of a client with one",
    "one-image-linking": "The same, linked to the image",
    "picture": "A picture, of a client with one image",
    "picture-linking": "The same, original found by pixels",
    "missing-modality": "How many samples lack text or image",
    "missing-modality-kind": "What a client lacks altogether",
}
HEADS = ("value", "95 % interval", "chance level")
STYLES = {SHOWN: "bold", BELOW: "green"}
NOT_EXAMINED = "not examined"
MAX_DIGITS = 7
WIDTH = 1000.0  # of the strip that a figure is drawn on, in its own units
DECIBELS = 40.0  # at the end of a strip of decibels


def audit_table(found: Audit) -> list[RenderableType]:
    """Return the terminal's parts: headline, values, sentences, and what examined each item."""
    title = Text(f"\nAudit of {found.method} on {found.dataset}, {found.model}: {setting(found)}\n")
    untried = not_made(found.unmeasured, lambda each: f"{each.view}, {each.name}")
    if not found.findings:
        return [title, *untried, Text("")]
    said = [Text(f"  {each.view}, {each.name}: {each.sentence} {each.conclusion}") for each in found.findings]
    if found.epsilon:
        said.append(Text(f"  {found.epsilon.sentence}", style="bold red" if found.epsilon.violated else ""))
    seed = [Text(f"  The seed: {found.known_seed}")] if found.known_seed else []
    advice = [Text(f"  {each}") for each in found.recommendations]
    parts = [Text("\nBold: shown. In words:\n"), *said, *seed, Text("\nNot made:\n"), *untried]
    return [
        title,
        Text(f"{found.headline}\n", style="bold"),
        values_table(found.findings, by_view=True),
        *parts,
        Text("\nWhat leaves, and what examined it:\n"),
        leaves_table(found.leaves),
        Text("\nRecommended:\n"),
        *advice,
        Text(""),
    ]


def values_table(findings: Iterable[Finding], by_view: bool) -> Table:
    table = Table("seen by" if by_view else "attacked", box=None, pad_edge=False)
    table.add_column("attack", no_wrap=True)
    for head in HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for each in sorted(findings, key=lambda each: VIEWS.index(each.view)):
        chance = written_value(each.chance, each.unit)
        row = (
            each.view if by_view else each.of,
            each.name,
            finding_figure(each),
            interval(each),
            chance,
            each.verdict,
        )
        table.add_row(*(Text(cell) for cell in row), style=STYLES.get(each.verdict, ""))
    return table


def leaves_table(leaves: Iterable[Leaving]) -> Table:
    table = Table("in", "name", "shape", "examined by", box=None, pad_edge=False)
    for row in leaves:
        by = examined_by(row)
        told = Text(by) if by else Text(NOT_EXAMINED, style="bold red")
        table.add_row(Text(row.part), Text(row.name), Text(shape_of(row)), told)
    return table


def not_made(unmeasured: Iterable[Unmeasured], name: Callable[[Unmeasured], str]) -> list[Text]:
    """Return why attacks were not made, each reason once."""
    reasons: dict[str, list[str]] = {}
    for each in unmeasured:
        reasons.setdefault(each.sentence, []).append(name(each))
    return [Text(f"  {'; '.join(dict.fromkeys(names))}: {sentence}") for sentence, names in reasons.items()]


def own_figures(found: OwnAudit) -> list[RenderableType]:
    """Return the terminal's parts of a client's own values."""
    untried = not_made(found.unmeasured, lambda each: each.name + (f" ({each.of})" if each.of else ""))
    settings = [*found.remedies, *([found.budget] if found.budget else [])]
    remedies = [Text(f"  {each}") for each in settings or ["No remedy is on: no secure aggregation, no noise."]]
    if not found.findings:
        return [Text("\nAttacks on this update:"), *untried, *remedies]
    where = "a third of the images, the update being of the rest" if found.held_out else "the test images"
    title = Text(
        f"\nAttacks on this update, with {found.attackers_images} images of the attacker's own ({where}); "
        f"{duration(found.seconds)}.\n"
    )
    sentences = [Text(f"  {each.of}, {each.name}: {each.sentence} {each.conclusion}") for each in found.findings]
    parts = dict.fromkeys(each.of for each in found.findings)
    heads = [
        Text(f"{part[0].upper()}{part[1:]}: {headline([each for each in found.findings if each.of == part])}")
        for part in parts
    ]
    return [
        title,
        *heads,
        Text(""),
        values_table(found.findings, by_view=False),
        Text("\nBold: shown. In words:\n"),
        *sentences,
        *untried,
        *remedies,
    ]


def setting(found: Audit) -> str:
    if not found.audited_clients:
        return "no client sends anything"
    return (
        f"{found.audited_clients} of {found.clients} clients, {found.images_per_client} images each (median), "
        f"partition {found.partition}, first {found.rounds} round{'s' * (found.rounds > 1)}, "
        f"{found.attackers_images} images of the attacker's own"
    )


def finding_figure(each: Finding) -> str:
    return written_value(each.value, each.unit)


def interval(each: Finding) -> str:
    """Return the interval, with more digits where limits would look equal."""
    unit = " dB" if each.unit == " dB" else ""
    low, high = (written_value(value, each.unit).removesuffix(unit) for value in each.interval)
    if each.leaks and low == written_value(each.chance, each.unit):
        low = f"{each.interval[0]:.3f}"
    digits = 3
    while low == high and digits <= MAX_DIGITS:
        low, high = (f"{value:.{digits}f}" for value in each.interval)
        digits += 1
    return f"{low} to {high}{unit}"


def examined_by(row: Leaving) -> str:
    """Name the attacks that examined an item, and the part in which images were sought."""
    part = f" (images in {100 * row.share:.0f} % of its numbers)" if row.share < 1 else ""
    return (", ".join(row.examined) or row.note) + part if row.examined or row.note else ""


def shape_of(row: Leaving) -> str:
    return " x ".join(map(str, row.shape)) or "a number"


def write_audit(found: Audit, path: Path) -> Path:
    """Write the page: one HTML file that loads nothing from elsewhere."""
    return write_page(path, "audit.html.j2", vars(describe(found)))


class Shown(NamedTuple):
    """A finding as the page shows it."""

    finding: Finding
    title: str
    risk: str
    figure: str
    interval: str
    chance: str
    strip: Markup


class View(NamedTuple):
    name: str
    findings: list[Shown]
    unmeasured: list[tuple[str, str]]  # title and reason


class SentPart(NamedTuple):
    """A part of a message as the page shows it."""

    part: str
    name: str
    shape: str
    bytes: str
    example: str
    examined: str


@dataclass(frozen=True)
class AuditPage:
    """What the page of an audit shows."""

    found: Audit
    setting: str
    views: list[View]
    leaking: int
    unexamined: int
    leaves: list[SentPart]
    bytes: str
    facts: list[tuple[str, str]]


def describe(found: Audit) -> AuditPage:
    """Return what the page of an audit shows."""
    views = [
        View(
            view,
            [shown_finding(each) for each in found.findings if each.view == view],
            [(TITLES.get(each.name, each.name), each.sentence) for each in found.unmeasured if each.view == view],
        )
        for view in VIEWS
    ]
    facts = {
        "Date": moment(found.made),
        "Participants": found.participants,
        "SHA-256 of the trained tensors": found.state_sha256,
        "SHA-256 of the settings": found.settings_sha256,
    }
    return AuditPage(
        found=found,
        setting=setting(found),
        views=views,
        leaking=sum(each.leaks for each in found.findings),
        unexamined=sum(row.unexamined for row in found.leaves),
        leaves=[sent(row) for row in found.leaves],
        bytes=human_bytes(sum(row.bytes for row in found.leaves)),
        facts=[(label, text) for label, text in facts.items() if text],
    )


def shown_finding(each: Finding) -> Shown:
    chance = written_value(each.chance, each.unit)
    return Shown(
        each, TITLES[each.name], risk_of(each.name), finding_figure(each), interval(each), chance, Markup(strip(each))
    )


def sent(row: Leaving) -> SentPart:
    example = [f"{value:g}" for value in row.example]
    more = ["…"] if example and row.bytes > 8 * len(example) else []
    return SentPart(
        part=f"{row.part}, masked" if row.masked else row.part,
        name=row.name,
        shape=shape_of(row),
        bytes=human_bytes(row.bytes),
        example=", ".join([*example, *more]),
        examined=examined_by(row),
    )


def strip(each: Finding) -> str:
    """Draw a figure between nothing and everything: a bar, its interval, a mark at the guess."""
    end = DECIBELS if each.unit == " dB" else 1.0

    def place(value: float) -> float:
        return scale(min(max(value, 0.0), end), 0.0, end, 0.0, WIDTH)

    value, chance = place(each.value), place(each.chance)
    low, high = (place(limit) for limit in each.interval)
    tip = f"{finding_figure(each)}, interval {interval(each)}, chance level {written_value(each.chance, each.unit)}"
    css = "loss" if each.leaks else "shared"
    parts = [
        element("rect", x=0.0, y=0.0, width=WIDTH, height=12.0, css="track"),
        element("rect", x=0.0, y=0.0, width=value, height=12.0, css=css),
        element("rect", x=low, y=4.5, width=max(high - low, 2.0), height=3.0, css="interval"),
        element("line", x1=chance, x2=chance, y1=0.0, y2=12.0, css="mark", vector_effect="non-scaling-stroke"),
    ]
    return element(
        "svg",
        "".join(parts),
        tip,
        viewBox=f"0 0 {WIDTH:g} 12",
        preserveAspectRatio="none",
        role="img",
        aria_label=tip,
        css="strip",
    )
