"""Read a command as the command line does, without running it."""

import shlex
from typing import Any

import typer
from click import Context

from fedvl.cli import app


def parse(command: str) -> None:
    """Refuse what ``fedvl`` would: an unknown command, option or value, or too few arguments."""
    found: Any = typer.main.get_command(app)
    words = shlex.split(command, comments=True)[1:]
    while isinstance(found, typer.core.TyperGroup):
        if not words and found.invoke_without_command:
            return
        if words[0].startswith("-"):  # of fedvl itself, which does at once what it says
            assert words[0] in ("--version", "--help", "--install-completion"), command
            return
        _, found, words = found.resolve_command(Context(found), words)
    found.make_context(found.name, words)
