"""What the pages take from the package itself, so that they cannot go stale; and formulas without a script.

- ``{about} NAME``: what the method's own file says of it.
- ``{options} NAME``: its options, with defaults and meaning, and its presets.
- ``{methods}``: all methods, a line each.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from pydantic_core import PydanticUndefined
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from fedvl.config import field_help, toml_value
from fedvl.methods import load_method, method_summaries, presets_of
from fedvl.methods.show import facts


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def option_rows(options: Any) -> list[tuple[str, str, str]]:
    rows = []
    for key, field in options.model_fields.items():
        default = "" if field.default in (None, PydanticUndefined) else f"`{toml_value(field.default)}`"
        rows.append((f"`method.{key}`", default, field_help(field)))
    return rows


class Generated(SphinxDirective):
    """A piece of Markdown that is written when the page is built."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(self.text())

    def text(self) -> str:
        raise NotImplementedError


class AboutMethod(Generated):
    required_arguments = 1

    def text(self) -> str:
        method = load_method(self.arguments[0])
        told = "; ".join(f"**{heading.lower()}** {fact}" for heading, fact in facts(method).items())
        return f"{sys.modules[method.__module__].__doc__ or ''}\n\nThis method {told}.".replace("``", "`")


class MethodOptions(Generated):
    required_arguments = 1

    def text(self) -> str:
        method = load_method(self.arguments[0])
        rows = option_rows(method.options_type)
        parts = [table(("option", "default", "what it is"), rows) if rows else "It has no options of its own."]
        for preset, changes in presets_of(self.arguments[0]).items():
            settings = [
                f"`{section}.{key}={toml_value(value)}`"
                for section, part in changes.items()
                for key, value in part.items()
            ]
            parts.append(f"Preset **{preset}**: {', '.join(settings) or 'the defaults'}.")
        return "\n\n".join(parts)


class Methods(Generated):
    def text(self) -> str:
        return table(
            ("method", "what it does"), ((f"`{name}`", summary) for name, summary in method_summaries().items())
        )


def inline_math(translator: Any, node: nodes.math) -> None:
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block_math(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("about", AboutMethod)
    app.add_directive("options", MethodOptions)
    app.add_directive("methods", Methods)
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
