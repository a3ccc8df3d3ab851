"""Two executions of a run are compared figure by figure; how far apart two contents are."""

import math
from typing import Any

import pytest
from helpers.made_up import make_result, save_run

from fedvl.data.sources import Opener
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.runs.contents import Federation
from fedvl.runs.folder import RunFolder
from fedvl.runs.repeat import compared_answers, content_differences, equal_contents, relative_gap, repeat


@pytest.mark.parametrize(
    "claimed, repeated, share",
    [
        (50.0, 50.0, 0.0),
        (50.0, 49.0, 0.02),
        (0, 0, 0.0),
        ([1, 2, 3], [1, 2, 4], 1 / 7),  # of the larger ones: 1 + 2 + 4
        ([[5, 5], [0, 10]], [[4, 6], [0, 10]], 2 / 21),
        ("1100", "1110", 1 / 3),  # letters of right answers
        ("110-", "1100", math.inf),
        ({"a": 1.0, "b": "x"}, {"b": "x", "a": 2.0}, 0.5),
        ({"a": 1.0, "b": "x"}, {"b": "y", "a": 1.0}, math.inf),
        ([1.0], [1.0, 2.0], math.inf),
        ("linear", "ridge", math.inf),
        (None, 1.0, math.inf),
        (True, False, math.inf),
        (math.nan, 1.0, math.inf),
    ],
)
def test_how_far_apart_two_contents_are(claimed: Any, repeated: Any, share: float):
    assert relative_gap(claimed, repeated) == pytest.approx(share)
    assert relative_gap(repeated, claimed) == pytest.approx(share)


def test_a_number_that_is_not_one_is_the_same_as_another():
    assert equal_contents([math.nan, 1], [math.nan, 1])
    assert not equal_contents(1, 1.5)
    assert not equal_contents(None, 0)


def test_the_largest_differences_come_first_and_times_are_not_compared():
    claimed = [{"round": 1, "loss": 1.0, "seconds": 1.0}, {"round": 2, "loss": 0.5, "seconds": 1.0}]
    repeated = [{"round": 1, "loss": 1.01, "seconds": 9.0}, {"round": 2, "loss": 5.0, "seconds": 9.0}]
    found = content_differences("metrics.jsonl", claimed, repeated)
    assert [(one.figure, one.claimed, one.repeated) for one in found] == [
        ("2.loss", "0.5", "5.0"),
        ("1.loss", "1.0", "1.01"),
    ]
    assert [one.figure for one in content_differences("x", {"a": [1.0, 2.0]}, {"a": [1.0, 2.1]}, most=0.1)] == []
    assert str(found[0]) == "metrics.jsonl has 2.loss 0.5; executed again: 5.0"
    (missing,) = content_differences("x", {"a": 1, "b": 2}, {"a": 1})
    assert (missing.figure, missing.repeated, missing.share) == ("b", "None", math.inf)


def test_answers_are_as_far_apart_as_images_have_another_one():
    claimed = {str(number): ["cat", "cat", "0.9", "0.1"] for number in range(10)}
    assert list(compared_answers(claimed, dict(claimed))) == []
    (rounded,) = compared_answers(claimed, {**claimed, "3": ["cat", "cat", "0.8999", "0.1"]})
    assert (rounded.figure, rounded.share) == ("3", 0.0)
    (other,) = compared_answers(claimed, {**claimed, "3": ["cat", "dog", "0.9", "0.1"]})
    assert other.share == 0.1
    (fewer,) = compared_answers(claimed, {name: row for name, row in claimed.items() if name != "3"})
    assert fewer.share == 0.1


def test_a_run_between_machines_is_refused(tmp_path):
    folder = RunFolder(save_run(tmp_path / "run", *make_result()))
    folder.write_federation(Federation(federation="elsewhere", run="0"))
    with pytest.raises(FedVLError, match="whose data are elsewhere"):
        repeat(folder, tmp_path / "again", Silent(), Opener.once())


def test_a_run_that_cannot_be_executed_again_is_different(tmp_path):
    folder = RunFolder(save_run(tmp_path / "run", *make_result()))
    folder.file("config.toml").write_text('[data]\ndataset = "nowhere/"\n')
    found = repeat(folder, tmp_path / "again", Silent(), Opener.once())
    assert found.verdict == "different"
    assert "There is no dataset, folder or file 'nowhere/'" in found.differences[0].repeated
