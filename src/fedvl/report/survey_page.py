"""Show a survey of sites: lines for a terminal, and a page with recommendations."""

from pathlib import Path

from fedvl.data.survey import Survey
from fedvl.report.data_page import PROPERTIES, shares
from fedvl.report.page import write_page
from fedvl.report.tables import moment


def recommendations(found: Survey) -> list[tuple[str, str]]:
    """Return what was found, each with what to do."""
    lines = [(f"{each.title} {at(each.sites)}{of(each.images)}.", each.fix) for each in found.faults]
    lines += [
        (f"A class name {at(each.renamed)} probably means {each.name}.", f"Call it {each.name} everywhere.")
        for each in found.classes
        if each.renamed
    ]
    lines += [
        (
            f"{each.one} and {each.other} probably mean the same ({', '.join(each.sites)}).",
            "Agree on one name for the class list, and use it at all sites.",
        )
        for each in found.alike
    ]
    if found.strangers:
        unlike = f"Classes {at(found.strangers)} are not among those of the federation."
        lines.append((unlike, "Agree on the class list, and begin a federation with it, or leave the images out."))
    if found.rare:
        few = f"Few training images at all sites together: {', '.join(found.rare)}."
        lines.append((few, "Add images, find a further site, or join the class with another one."))
    return [(text[0].upper() + text[1:], fix) for text, fix in lines]


def at(sites: int) -> str:
    return f"at {sites} {'site' if sites == 1 else 'sites'}"


def of(images: int) -> str:
    return f" ({images:,} images)" if images else ""


def survey_lines(found: Survey) -> list[str]:
    """Return a survey as a terminal shows it."""
    secure = " (one secure sum)" if found.secure_sum else " (counts are rounded down)"
    lines = [f"{found.images:,} images, {found.readable:,} readable, of {', '.join(found.sites)}{secure}."]
    if found.missing:
        lines.append(f"Missing: {', '.join(found.missing)}.")
    lines += found.refused
    width = max((len(each.name) for each in found.classes), default=0)
    lines += [f"  {each.name:{width}}  train {each.train:,}  test {each.test:,}" for each in found.classes]
    for text, fix in recommendations(found):
        lines += ["", text, f"  {fix}"]
    return [*lines, "", "No fault was found." if found.clean else "Each site is shown its own files, and nobody else."]


def write_survey_page(found: Survey, path: Path) -> Path:
    """Write the page: one HTML file that loads nothing from elsewhere."""
    values = {
        "found": found,
        "when": moment(found.surveyed),
        "advice": recommendations(found),
        "classes": [(each.name, f"{each.train:,}", f"{each.test:,}") for each in found.classes],
        "properties": [(title, shares(getattr(found, key))) for key, title in PROPERTIES],
    }
    return write_page(path, "survey.html.j2", values)
