from typing import Any

import pytest
from helpers.contents import record_of, result_of

from fedvl.errors import FedVLError
from fedvl.report.reading import difference, flatten, number, series
from fedvl.runs.folder import RunFolder


def test_a_round_made_again_after_a_crash_counts_once_and_torn_lines_are_counted(tmp_path):
    (tmp_path / "result.json").write_text('{"method": "linear"}')
    (tmp_path / "metrics.jsonl").write_text(
        '{"round": 2, "loss": 1}\n{"round": 1}\n{"rou\n\n{"round": 2, "loss": 3}\n[1]\n'
    )
    run = RunFolder(tmp_path)
    assert run.rounds == [record_of({"round": 1}), record_of({"round": 2, "loss": 3.0})]
    assert run.unreadable_lines == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "no run in"), ("{", "cannot be read"), ("[]", "names no method"), ("{}", "names no method")],
)
def test_a_folder_without_a_result_is_an_error_that_says_so(tmp_path, text, says):
    if text is not None:
        (tmp_path / "result.json").write_text(text)
    with pytest.raises(FedVLError, match=says):
        _ = RunFolder(tmp_path).result


def run_of(folder, result, rounds):
    run = RunFolder(folder)
    run.result, run.rounds = result_of(result), [record_of(each) for each in rounds]
    return run


def test_numbers_are_finite_and_not_truth_values():
    assert [number(value) for value in (1, 2.5, True, "3", None, float("nan"), float("inf"))] == [1.0, 2.5] + [None] * 5


def test_series_takes_round_numbers_from_the_metrics(tmp_path):
    rounds = [{"round": index, "accuracy": 0.0} for index in (5, 6, 7)]
    run = run_of(tmp_path, {"method": "linear", "per_round": [60.0, None, 62.0]}, rounds)
    assert series(run, "per_round", "accuracy") == [(5, 60.0), (7, 62.0)]


def test_series_numbers_only_the_rounds_that_were_evaluated(tmp_path):
    rounds: list[dict[str, Any]] = [
        {"round": 1},
        {"round": 2, "accuracy": 60.0},
        {"round": 3},
        {"round": 4, "accuracy": 62.0},
        {"round": 5, "accuracy": 63.0},
    ]
    run = run_of(tmp_path, {"method": "linear", "per_round": [60.0, 62.0, 63.0]}, rounds)
    assert series(run, "per_round", "accuracy") == [(2, 60.0), (4, 62.0), (5, 63.0)]


def test_series_without_a_list_in_the_result_reads_the_metrics(tmp_path):
    run = run_of(tmp_path, {"method": "linear"}, [{"round": 3, "accuracy": 59.0}])
    assert series(run, "per_round", "accuracy") == [(3, 59.0)]


def test_without_metrics_the_configuration_tells_which_rounds_were_evaluated(tmp_path):
    result = {"method": "linear", "rounds": 5, "per_round": [60.0, 62.0, 63.0], "config": {"evaluation": {"every": 2}}}
    expected = [(2, 60.0), (4, 62.0), (5, 63.0)]
    assert series(run_of(tmp_path, result, []), "per_round", "accuracy") == expected
    bare = run_of(tmp_path, {"method": "linear", "per_round": [60.0, 61.0]}, [])
    assert series(bare, "per_round", "accuracy") == [(1, 60.0), (2, 61.0)]


def test_difference_is_accuracy_above_zero_shot():
    assert difference(result_of({"method": "linear", "accuracy": 78.0, "zero_shot_accuracy": 66.5})) == 11.5
    assert difference(result_of({"method": "linear", "accuracy": 78.0})) is None
    assert difference(result_of({"method": "zero-shot", "accuracy": 66.5, "zero_shot_accuracy": 66.5})) is None


def test_flatten_keeps_order_and_writes_values_as_json():
    config = {"b": {"y": 1, "x": {"deep": [1, 2]}}, "a": None, "name": "plain", "empty": {}}
    assert list(flatten(config)) == [
        ("b.y", "1"),
        ("b.x.deep", "[1, 2]"),
        ("a", "null"),
        ("name", "plain"),
        ("empty", "{}"),
    ]


def test_numbers_that_no_picture_can_show_are_left_out():
    assert [number(value) for value in (9.9e99, -9.9e99, 1e100, -1e100, 10**101)] == [9.9e99, -9.9e99, None, None, None]
