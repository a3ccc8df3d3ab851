"""Contents of files from a few of their keys: what tests of reports, records and folders share."""

from collections.abc import Mapping

from fedvl.federation.records import Record
from fedvl.runs.contents import Result


def result_of(keys: Mapping[str, object]) -> Result:
    """A result with these keys, as result.json would have them."""
    return Result.model_validate({"method": "linear", **keys})


def record_of(keys: Mapping[str, object]) -> Record:
    """The record of a round with these keys."""
    return Record.model_validate({"round": 1, **keys})
