"""Flags of the command line that are settings of an experiment, from the fields of these."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from fedvl.config import FLAGS, field_help, field_type, setting_field

SPELLED = {"start_from": "--from"}  # a word that Python keeps for itself

Command = TypeVar("Command", bound=Callable[..., None])


def with_flags(*flags: str) -> Callable[[Command], Command]:
    """Replace the ``**flags`` of a command by options for these settings, or for all of ``FLAGS``.

    A flag that is not given is None.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command)
        kept = [part for part in signature.parameters.values() if part.kind is not part.VAR_KEYWORD]
        parameters = [*kept, *map(flag_parameter, flags or FLAGS)]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def flag_parameter(flag: str) -> inspect.Parameter:
    """Return the option of one flag: its type and its help are those of the setting."""
    field = setting_field(FLAGS[flag])
    wanted = field_type(field)
    kind: Any = wanted if wanted in (bool, int, float) else str
    spelled = SPELLED.get(flag, f"--{flag.replace('_', '-')}")
    declared = [spelled] if kind is bool or flag in SPELLED else []  # without a --no- form
    section, dot, _ = FLAGS[flag].partition(".")
    panel = f"Settings: {section}" if dot else None
    option = typer.Option(*declared, help=field_help(field), rich_help_panel=panel)
    return inspect.Parameter(
        flag, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
