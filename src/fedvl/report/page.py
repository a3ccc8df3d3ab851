"""The pages that a person opens after a run: each one file, nothing fetched from anywhere."""

import base64
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedvl.errors import FedVLError
from fedvl.report.comparison_page import describe_grid
from fedvl.report.reading import read_grid_result, read_run
from fedvl.report.run_page import describe_run
from fedvl.report.runs_page import describe_runs


def write_report(folder: Path) -> Path:
    """Write report.html beside the result of a run, a comparison or a reproduced recipe; the same result gives the same bytes."""
    grid = read_grid_result(folder)
    if grid is not None:
        return write_page(folder / "report.html", "grid.html.j2", describe_grid(grid))
    return write_page(folder / "report.html", "run.html.j2", describe_run(read_run(folder)))


def write_side_by_side(folders: Sequence[Path], path: Path) -> Path:
    """One page on several runs."""
    return write_page(path, "runs.html.j2", describe_runs([read_run(folder) for folder in folders]))


def write_page(path: Path, template: str, values: dict[str, Any]) -> Path:
    aside = path.with_name(path.name + ".tmp")
    try:
        # A class name may hold half of a surrogate pair, which UTF-8 has no bytes for.
        aside.write_bytes(render(template, values).encode("utf-8", errors="replace"))
        os.replace(aside, path)
    except OSError as error:
        raise FedVLError(f"Cannot write {path}: {error.strerror}; choose another place with --out.") from error
    return path


def render(template: str, values: dict[str, Any]) -> str:
    environment = Environment(
        loader=PackageLoader("fedvl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    script = environment.get_template("report.js").render()
    return environment.get_template(template).render(
        script=Markup(script),
        # Only this very script may run: should a name ever slip through the escaping, the browser still refuses it.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )
