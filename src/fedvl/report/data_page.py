"""Show a check of images: lines for a terminal, and a page for the person who has the images."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedvl.data.check import DataCheck, PropertyCount
from fedvl.data.faults import FAULT_KINDS
from fedvl.report.page import write_page

NAMED = 5  # files that the terminal names
PROPERTIES = (
    ("sizes", "Shorter side"),
    ("modes", "Kind of pixels"),
    ("brightness", "Mean brightness (0 is black, 255 white)"),
    ("orientation", "Orientation"),
)


class Share(NamedTuple):
    """A bar of the page: its width is a percentage of the longest."""

    name: str
    images: str
    width: float


def check_lines(found: DataCheck) -> list[str]:
    """Return a check as a terminal shows it."""
    lines = [f"{found.data}: {found.images:,} images, {found.readable:,} readable, {len(found.classes)} classes."]
    width = max((len(each.name) for each in found.classes), default=0)
    for each in found.classes:
        marked = "  ".join(f"{part} {getattr(each, part):,}" for part in parts_of(found))
        lines.append(f"  {each.name:{width}}  {marked}")
    if found.agreement is not None:
        lines.append(
            f"The pretrained model {found.model} agrees with {found.agreement:.0f} % of the labels that were tried."
        )
    for fault in found.faults:
        lines += ["", fault.sentence, f"  {fault.fix}"]
        if fault.files:
            more = f" and {fault.images - NAMED:,} more" if fault.images > NAMED else ""
            lines.append(f"  {', '.join(fault.files[:NAMED])}{more}")
    lines += ["", *found.notes] if found.notes else [""]
    return [*lines, said(found)]


def said(found: DataCheck) -> str:
    """Return the result in one sentence."""
    if found.clean:
        return "No fault was found."
    return f"{len(found.faults)} {'fault was' if len(found.faults) == 1 else 'faults were'} found."


def parts_of(found: DataCheck) -> list[str]:
    """Return the splits that some images are of; images of no split are ``unmarked``."""
    return [part for part in ("train", "val", "test", "unmarked") if any(getattr(each, part) for each in found.classes)]


def write_check_page(found: DataCheck, path: Path) -> Path:
    """Write the page: one HTML file that loads nothing from elsewhere, and has no pictures."""
    values = {
        "found": found,
        "said": said(found),
        "parts": [(part, "images" if part == "unmarked" else part) for part in parts_of(found)],
        "properties": [(title, shares(getattr(found, key))) for key, title in PROPERTIES],
        "passed": passed(found),
    }
    return write_page(path, "data.html.j2", values)


def passed(found: DataCheck) -> list[str]:
    """Return what was sought and not found."""
    kinds = {fault.kind for fault in found.faults}.union(found.not_sought)
    return [kind.title for name, kind in FAULT_KINDS.items() if name not in kinds]


def shares(bars: Sequence[PropertyCount]) -> list[Share]:
    """Return the bars from the first to the last with images."""
    filled = [place for place, bar in enumerate(bars) if bar.images]
    shown = bars[filled[0] : filled[-1] + 1] if filled else []
    most = max((bar.images for bar in shown), default=1)
    return [Share(bar.name, f"{bar.images:,}", 100 * bar.images / most) for bar in shown]
