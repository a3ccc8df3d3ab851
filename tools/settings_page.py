"""Write the tables of docs/settings.md from the fields of the settings: python tools/settings_page.py."""

from pathlib import Path

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fedvl.commands.flags import SPELLED
from fedvl.config import FLAGS, Experiment, field_help, sections, toml_value

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
BEGIN, END = "<!-- settings: written by tools/settings_page.py -->", "<!-- end of settings -->"


def rows() -> list[tuple[str, str, str, str]]:
    """Return the name, flag, default and description of every setting."""
    flags = {setting: f"`{SPELLED.get(flag, '--' + flag.replace('_', '-'))}`" for flag, setting in FLAGS.items()}
    fields: dict[str, FieldInfo] = {}
    for name, field in Experiment.model_fields.items():
        if name in sections():
            fields |= {f"{name}.{key}": part for key, part in sections()[name].model_fields.items()}
        else:
            fields[name] = field
    lines = []
    for name, field in fields.items():
        default = "" if field.default in (None, PydanticUndefined) else f"`{toml_value(field.default)}`"
        flag = flags.get(name) or (flags["privacy"] if name.startswith("privacy.") else "")
        lines.append((f"`{name}`", flag, default, field_help(field)))
    return lines


def table() -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows()]
    return "\n".join(["| setting | flag | default | description |", "|---|---|---|---|", *lines])


def filled(page: str) -> str:
    """Return the page with its table renewed."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE} needs the lines '{BEGIN}' and '{END}'.")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
