"""Write the tables of docs/schema.md and the JSON Schema of result.json from their models: python -m tools.schema_page."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedvl.federation.records import Record
from fedvl.files import Content
from fedvl.runs.contents import Result
from fedvl.runs.result import RESULT_SCHEMA

DOCS = Path(__file__).parents[1] / "docs"
PAGE, SCHEMA = DOCS / "schema.md", DOCS / "result.schema.json"
TABLES: dict[str, type[Content]] = {"result": Result, "record": Record}


def schema() -> str:
    """Return the JSON Schema of result.json."""
    found = Result.model_json_schema(by_alias=True)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"result.json, schema {RESULT_SCHEMA}"}
    return json.dumps({**head, **{key: value for key, value in found.items() if key not in head}}, indent=1) + "\n"


def kind(part: dict[str, Any]) -> str:
    """Return the JSON type of a key in words."""
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(kind(each) for each in part["anyOf"] if each.get("type") != "null"))
    if part.get("type") == "array":
        return f"array of {kind(part['items'])}"
    return "object" if "$ref" in part else str(part.get("type", "string"))


def table(model: type[Content]) -> str:
    """Return a row for each key: its name, JSON type, unit and meaning; keys of an object follow it."""
    found = model.model_json_schema(by_alias=True)
    return "\n".join(["| key | type | meaning |", "|---|---|---|", *rows(found["properties"], found["$defs"], "")])


def rows(properties: dict[str, Any], definitions: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, part in properties.items():
        yield f"| `{prefix}{name}` | {kind(part)} | {part['description']} |"
        if inner := re.search(r"#/\$defs/(\w+)", json.dumps(part)):
            yield from rows(definitions[inner[1]]["properties"], definitions, f"{prefix}{name}.")


def filled(page: str) -> str:
    """Return the page with its tables renewed."""
    for name, model in TABLES.items():
        begin, end = f"<!-- {name}: written by tools/schema_page.py -->", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"{PAGE} needs the lines '{begin}' and '{end}'.")
        page = f"{before}{begin}\n\n{table(model)}\n\n{end}{after}"
    return page


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    SCHEMA.write_text(schema(), encoding="utf-8")


if __name__ == "__main__":
    main()
