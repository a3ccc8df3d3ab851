"""Values as a notebook shows them: tables, charts and data frames."""

import base64
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any


class Chart:
    """A drawing that notebooks show, and that ``save`` writes as an SVG file."""

    def __init__(self, drawn: str, caption: str) -> None:
        style = files("fedvl.report").joinpath("templates", "report.css").read_text(encoding="utf-8")
        style += "svg { background: var(--paper); }"
        opening, rest = drawn.removeprefix("<svg").split(">", 1)
        self.caption = caption
        self.svg = f'<svg xmlns="http://www.w3.org/2000/svg"{opening}><style>{style}</style>{rest}'

    def save(self, path: str | Path) -> Path:
        """Write the drawing as an SVG file."""
        Path(path).write_text(self.svg, encoding="utf-8")
        return Path(path)

    def __repr__(self) -> str:
        return f"<chart of {self.caption}>"

    def _repr_html_(self) -> str:
        # an image of its own, so that its style sheet does not reach the notebook, nor the notebook's reach it
        data = base64.b64encode(self.svg.encode()).decode()
        caption = escape(self.caption)
        picture = f'<img style="color-scheme:light" alt="{caption}" src="data:image/svg+xml;base64,{data}"/>'
        return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def frame(rows: list[dict[str, Any]]) -> Any:
    """Return rows as a pandas DataFrame if pandas is installed, else as they are."""
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows)


def html_table(head: Sequence[str], body: Sequence[Sequence[str]], title: str = "", note: str = "") -> str:
    """Return a table in the notebook's own style; cells of the body are HTML, the rest is text."""
    heads = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    rows = ""
    for first, *others in body:
        rows += f'<tr><th style="text-align:left">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>'
    above, below = (f"<p>{escape(text)}</p>" if text else "" for text in (title, note))
    return f"{above}<table>{heads}<tbody>{rows}</tbody></table>{below}"
