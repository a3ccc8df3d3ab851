"""Show an audit: a table with a sentence for each attack, and a page for an officer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedvl.audit.finding import VIEWS
from fedvl.display import duration
from fedvl.report.page import write_page
from fedvl.report.svg import element, scale
from fedvl.report.tables import human_bytes

TITLES = {
    "label-histogram": "How many images of each class",
    "label-histogram-of-report": "How many images of each class, from the report",
    "class-names": "What the classes are called",
    "class-names-by-seed": "Which classes, with the seed known",
    "membership": "Whether an image was trained on",
    "membership-at-1-percent": "Training images named at 1 % false alarms",
    "feature-recovery": "Encoded images",
    "feature-linking": "Encoded images, linked to images",
    "one-image-recovery": "Encoded image of a client with one",
    "one-image-linking": "The same, linked to the image",
    "picture": "A picture, of a client with one image",
    "picture-linking": "The same, original found by pixels",
    "missing-modality": "How many samples lack text or image",
    "missing-modality-kind": "What a client lacks altogether",
}
WIDTH = 1000.0  # of the strip that a figure is drawn on, in its own units
DECIBELS = 40.0  # at the end of a strip of decibels


def audit_table(found: Mapping[str, Any]) -> list[RenderableType]:
    """Return the terminal's parts: the figures, then a sentence for each."""
    table = Table("seen by", "what could be learned", box=None, pad_edge=False)
    for head in ("figure", "95 % interval", "guessing"):
        table.add_column(head, justify="right", no_wrap=True)
    for view in VIEWS:
        for each in (each for each in found["findings"] if each["view"] == view):
            row = (view, each["name"], figure(each), interval(each), number(each["guess"], each["unit"]))
            table.add_row(*(Text(cell) for cell in row), style="bold" if each["leaks"] else "")
    title = Text(f"\nAudit of {found['method']} on {found['dataset']}, {found['model']}: {setting(found)}\n")
    sentences = [Text(f"  {each['view']}: {each['sentence']}") for each in (*found["findings"], *found["unmeasured"])]
    bold = Text("\nBold: above what guessing explains. In words:\n")
    seed = [Text(f"  The seed: {found['known_seed']}")] if found["known_seed"] else []
    return [title, table, bold, *sentences, *seed, Text("")] if found["findings"] else [title, *sentences, Text("")]


def own_figures(found: Mapping[str, Any]) -> list[RenderableType]:
    """Return the terminal's parts of a party's own figures."""
    table = Table("what a server could learn", box=None, pad_edge=False)
    for head in ("figure", "95 % interval", "guessing"):
        table.add_column(head, justify="right", no_wrap=True)
    for each in found["findings"]:
        row = (each["name"], figure(each), interval(each), number(each["guess"], each["unit"]))
        table.add_row(*(Text(cell) for cell in row), style="bold" if each["leaks"] else "")
    where = "a third of the images, the update being of the rest" if found["held_out"] else "the test images"
    title = Text(
        f"\nAttacks on this update, with {found['attackers_images']} images of the attacker's own ({where}); "
        f"{duration(found['seconds'])}.\n"
    )
    sentences = [Text(f"  {each['sentence']}") for each in found["findings"]]
    untried = [Text(f"  {TITLES[each['name']]}: {each['sentence']}") for each in found["unmeasured"]]
    settings = [*found["remedies"], *([found["budget"]] if found["budget"] else [])]
    remedies = [Text(f"  {each}") for each in settings or ["No remedy is on: no secure sums, no noise."]]
    if not found["findings"]:
        return [Text("\nAttacks on this update:"), *untried, *remedies]
    return [title, table, Text("\nBold: above what guessing explains. In words:\n"), *sentences, *untried, *remedies]


def setting(found: Mapping[str, Any]) -> str:
    if not found["audited_clients"]:
        return "no client sends anything"
    return (
        f"{found['audited_clients']} of {found['clients']} clients, {found['images_per_client']} images each (median), "
        f"partition {found['partition']}, first {found['rounds']} round{'s' * (found['rounds'] > 1)}, "
        f"{found['attackers_images']} images of the attacker's own"
    )


def number(value: float, unit: str) -> str:
    if unit:
        return f"{value:.1f}{unit}"
    return f"{value:.1g}" if 0 < value < 0.005 else f"{value:z.2f}"  # a small chance is not none


def figure(each: Mapping[str, Any]) -> str:
    return number(each["value"], each["unit"])


def interval(each: Mapping[str, Any]) -> str:
    low, high = (number(value, each["unit"]).removesuffix(each["unit"]) for value in each["interval"])
    if each["leaks"] and low == number(each["guess"], each["unit"]):  # above guessing by less than is shown otherwise
        low = f"{each['interval'][0]:.3f}"
    return f"{low} to {high}{each['unit']}"


def write_audit(found: Mapping[str, Any], path: Path) -> Path:
    """Write the page: one HTML file that loads nothing from elsewhere."""
    return write_page(path, "audit.html.j2", describe(found))


def describe(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template values of the page."""
    views = [
        {
            "name": view,
            "findings": [
                {
                    "title": TITLES[each["name"]],
                    "name": each["name"],
                    "figure": figure(each),
                    "interval": interval(each),
                    "guess": number(each["guess"], each["unit"]),
                    "measure": each["measure"],
                    "sentence": each["sentence"],
                    "leaks": each["leaks"],
                    "strip": Markup(strip(each)),
                }
                for each in found["findings"]
                if each["view"] == view
            ],
            "unmeasured": [
                (TITLES[each["name"]], each["sentence"]) for each in found["unmeasured"] if each["view"] == view
            ],
        }
        for view in VIEWS
    ]
    return {
        "found": found,
        "setting": setting(found),
        "views": views,
        "leaking": sum(each["leaks"] for each in found["findings"]),
        "tried": len(found["findings"]),
        "leaves": [
            {
                "in": each["in"],
                "name": each["name"],
                "shape": " x ".join(map(str, each["shape"])) or "a number",
                "bytes": human_bytes(each["bytes"]),
                "example": ", ".join(f"{value:g}" for value in each["example"]),
                "more": each["example"] and each["bytes"] > 8 * len(each["example"]),
            }
            for each in found["leaves"]
        ],
        "bytes": human_bytes(sum(each["bytes"] for each in found["leaves"])),
    }


def strip(each: Mapping[str, Any]) -> str:
    """Draw a figure between nothing and everything: a bar, its interval, a mark at the guess."""
    end = DECIBELS if each["unit"] else 1.0

    def place(value: float) -> float:
        return scale(min(max(value, 0.0), end), 0.0, end, 0.0, WIDTH)

    value, guess = place(each["value"]), place(each["guess"])
    low, high = (place(limit) for limit in each["interval"])
    tip = f"{figure(each)}, interval {interval(each)}, guessing {number(each['guess'], each['unit'])}"
    css = "loss" if each["leaks"] else "shared"
    parts = [
        element("rect", x=0.0, y=0.0, width=WIDTH, height=12.0, css="track"),
        element("rect", x=0.0, y=0.0, width=value, height=12.0, css=css),
        element("rect", x=low, y=4.5, width=max(high - low, 2.0), height=3.0, css="interval"),
        element("line", x1=guess, x2=guess, y1=0.0, y2=12.0, css="mark", vector_effect="non-scaling-stroke"),
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
