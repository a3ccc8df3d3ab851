"""Write the report pages: each is one HTML file that loads nothing from elsewhere."""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedvl.display import visible
from fedvl.errors import FedVLError
from fedvl.files import no_link, read_json, validated, write_whole
from fedvl.report.run_page import describe_run
from fedvl.report.tables import Values
from fedvl.runs.folder import RunFolder

if TYPE_CHECKING:
    from fedvl.comparisons.contents import Comparison

COMPARISON = "comparison.json"


def write_report(folder: Path) -> Path:
    """Write report.html for a run, comparison or recipe; the same result gives the same bytes."""
    if folder.exists() and not folder.is_dir():
        raise FedVLError(f"{folder} is not the folder of a run or comparison; give one, such as runs/NAME.")
    path = no_link(folder / COMPARISON)
    found = read_json(path)
    if found is not None:
        from fedvl.comparisons.contents import Comparison

        return write_page(folder / "report.html", *page_of(validated(Comparison, found, path)))
    run = RunFolder.open(folder)
    return write_page(run.path / "report.html", "run.html.j2", describe_run(run))


def page_of(summary: "Comparison") -> tuple[str, Values]:
    """Return the template of a comparison's page, and its values."""
    from fedvl.report.comparison_page import describe_grid

    return "grid.html.j2", vars(describe_grid(summary))


def curves_of(summary: "Comparison") -> dict[str, bytes]:
    """Return the curves over rounds as a file for a paper; none without curves."""
    from fedvl.report.comparison_page import over_rounds
    from fedvl.report.pdf import pdf_of

    charts = [figure.charts[0] for figure in over_rounds(summary)]
    return {"curves.pdf": pdf_of(charts)} if charts else {}


def write_comparison(summary: "Comparison", out: Path) -> Path:
    """Write the tables, the summary and the page of a comparison or a reproduced recipe."""
    from fedvl.report.comparison_tables import write_tables

    write_tables(summary, out)
    for name, content in curves_of(summary).items():
        write_whole(out / name, content)
    for name in dict.fromkeys(name for cell in summary.cells for name in cell.runs):
        folder = out / "runs" / name
        if (folder / "result.json").is_file() and not (folder / "report.html").exists():
            write_report(folder)
    write_whole(out / COMPARISON, summary.to_json(indent=1).encode())
    return write_report(out)


def write_side_by_side(folders: Sequence[Path], path: Path) -> Path:
    """Write one page that compares several runs."""
    from fedvl.report.comparison_of_runs import describe_runs

    return write_page(path, "grid.html.j2", vars(describe_runs([RunFolder.open(folder) for folder in folders])))


def write_page(path: Path, template: str, values: Values, script: str = "report.js") -> Path:
    try:
        write_whole(path, visible(render(template, values, script)).encode())
    except OSError as error:
        raise FedVLError(
            f"Cannot write {path}: {error.strerror}; make room there, or choose another path with --out."
        ) from error
    return path


@cache
def templates() -> Environment:
    """Return the templates, each of which is compiled once."""
    return Environment(
        loader=PackageLoader("fedvl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, values: Values, script_name: str = "report.js") -> str:
    script = templates().get_template(script_name).render()
    return (
        templates()
        .get_template(template)
        .render(
            script=Markup(script),
            # Allow this script alone: if a name were ever not escaped, the browser would still block it.
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            **values,
        )
    )
