"""The page of result files and the published JSON Schema are what the models say now."""

import json
from pathlib import Path

import pytest
from helpers.contents import record_of
from helpers.made_up import make_result
from jsonschema import Draft202012Validator, ValidationError

from fedvl.runs.contents import Result
from fedvl.runs.result import RESULT_SCHEMA
from tools.schema_page import PAGE, SCHEMA, filled, schema, table

OLD = Path(__file__).parents[1] / "reliability" / "version_0.1" / "result.json"


def test_page_and_schema_are_what_the_models_say():
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page, "run python -m tools.schema_page and commit what it writes"
    assert SCHEMA.read_text(encoding="utf-8") == schema(), "run python -m tools.schema_page and commit what it writes"
    assert f"`schema` is the version of the form, {RESULT_SCHEMA} at present" in page


def test_every_key_has_one_row_in_the_order_of_the_file():
    rows = [line.split("|")[1].strip().strip("`") for line in table(Result).splitlines()[2:]]
    keys = [field.alias or name for name, field in Result.model_fields.items()]
    assert [row for row in rows if "." not in row] == keys


def test_the_schema_takes_results_of_now_and_of_version_0_1_and_refuses_another_type():
    validator = Draft202012Validator(json.loads(schema()))
    result, _ = make_result()
    validator.validate(result)
    validator.validate(json.loads(OLD.read_bytes()))
    for changes in ({"accuracy": "sixty"}, {"confusion": [["1"]]}, {"seconds": {"train": "long"}}, {"clients": -1}):
        with pytest.raises(ValidationError):
            validator.validate(result | changes)
    with pytest.raises(ValidationError):
        validator.validate({"accuracy": 60.0})


def test_keys_are_written_in_their_order_and_unknown_ones_are_kept():
    keys = {"loss": 1.5, "round": 3, "of_a_later_version": {"a": 1}, "cohort": [2]}
    written = json.loads(record_of(keys).to_json())
    assert list(written) == ["round", "cohort", "loss", "of_a_later_version"]
    assert written == keys
    old = json.loads(OLD.read_bytes())
    assert json.loads(Result.model_validate(old).to_json()) == old
