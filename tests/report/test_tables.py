import io
import re
from typing import Any

import pytest
from helpers.contents import record_of, result_of
from rich.console import Console

from fedvl.report.tables import (
    MINUS,
    accuracy_rows,
    cost_rows,
    dataset_rows,
    human_bytes,
    human_count,
    human_seconds,
    moment,
    points,
    result_table,
    set_rows,
    tail_rows,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (1000, "1.00 kB"),
        (20_480, "20.5 kB"),
        (204_800, "205 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (4_096_000, "4.10 MB"),
        (3.2e12, "3.20 TB"),
        (5e18, "5000 PB"),
    ],
)
def test_bytes(value, text):
    assert human_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (5120, "5.12 k"), (14_700_000, "14.7 M"), (9.996, "10.0"), (-1500, f"{MINUS}1.50 k")],
)
def test_counts(value, text):
    assert human_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ms"),
        (0.0314, "31 ms"),
        (0.9996, "1.0 s"),
        (3.21, "3.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (75.2, "1 min 15 s"),
        (3599.6, "1 h 0 min"),
        (7384, "2 h 3 min"),
    ],
)
def test_seconds(value, text):
    assert human_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(11.7, "+11.70"), (-3.456, f"{MINUS}3.46"), (-0.001, "0.00"), (0, "0.00"), (None, "—")]
)
def test_points_carry_their_sign(value, text):
    assert points(value) == text


def lines_of(table):
    """Each line of the table as the terminal shows it, without its frame."""
    shown = io.StringIO()
    Console(file=shown, width=100, color_system=None).print(table)
    text = shown.getvalue()
    return [[cell.strip() for cell in line.strip("│ \n").split("│")] for line in text.splitlines()]


def test_result_table_shows_accuracy_against_zero_shot_and_costs(sample):
    result, _ = sample
    result |= {
        "accuracy": 78.2,
        "zero_shot_accuracy": 66.5,
        "macro_precision": 78.57,
        "macro_recall": 78.2,
        "macro_f1": 77.99,
    }
    lines = lines_of(result_table(result_of(result)))
    for expected in (
        ["Zero-shot accuracy", "66.50 % (63.5 to 69.4)"],
        ["Federated accuracy", "78.20 % (75.5 to 80.6)"],
        ["Difference", "+11.70 points"],
        ["Trainable parameters", "5.12 k"],
        ["Up, per client and round", "20.5 kB"],
        ["Local training, largest client, per round", "3.15 GFLOPs"],
        ["Training", "1 min 15 s"],
    ):
        assert expected in lines
    for label, value in (("Macro precision", "78.57 %"), ("Macro recall", "78.20 %"), ("Macro F1", "77.99 %")):
        shown = next(line[1] for line in lines if line[0] == label)
        assert re.fullmatch(rf"{value} \(7\d\.\d to 8\d\.\d\)", shown)


def test_result_table_of_zero_shot_has_one_accuracy(sample):
    result, _ = sample
    result |= {"method": "zero-shot", "accuracy": 66.5}
    labels = [line[0] for line in lines_of(result_table(result_of(result)))]
    assert labels.count("Zero-shot accuracy") == 1
    assert "Difference" not in labels
    assert "Federated accuracy" not in labels


def test_result_table_calls_centralised_training_by_its_name(sample):
    result, _ = sample
    labels = [line[0] for line in lines_of(result_table(result_of(result | {"method": "centralised"})))]
    assert "Centralised accuracy" in labels
    assert "Federated accuracy" not in labels


def test_result_table_says_where_the_accuracy_is_a_mean_over_clients(sample):
    result, _ = sample
    for protocol in ("personal", "base-to-new"):
        lines = lines_of(result_table(result_of(result | {"protocol": protocol})))
        assert [line[0] for line in lines[2:4]] == [
            "Zero-shot accuracy, mean over clients",
            "Federated accuracy, mean over clients",
        ]
    (row, *_) = accuracy_rows(result_of(result | {"method": "zero-shot", "protocol": "personal"}))
    assert row.label == "Zero-shot accuracy, mean over clients"


def test_result_table_shows_square_brackets_of_a_path_as_they_are():
    lines = lines_of(result_table(result_of({"method": "linear", "dataset": "photos[red]"})))
    assert any("linear on photos[red]" in line[0] for line in lines)


def test_result_table_bears_missing_figures():
    lines = lines_of(result_table(result_of({"method": "linear", "accuracy": None, "seconds": None})))
    assert ["Federated accuracy", "—"] in lines
    assert ["Difference", "—"] in lines


def test_costs_add_up_over_rounds_with_exact_figures():
    rounds = [record_of({"bytes_up": 1_500, "bytes_down": 3_000}), record_of({"bytes_up": 500, "bytes_down": 1_000})]
    rows = {row.label: row for row in cost_rows(result_of({"method": "linear", "local_flops": 2**60 + 1}), rounds)}
    assert rows["Up, whole run"].text == "2.00 kB"
    assert rows["Up and down, whole run"].text == "6.00 kB"
    assert rows["Up and down, whole run"].exact == "6,000 bytes"
    assert rows["Local training, largest client, per round"].exact == "1,152,921,504,606,846,977 FLOPs"


def test_totals_are_left_out_where_a_round_does_not_say():
    labels = [
        row.label
        for row in cost_rows(
            result_of({"method": "linear"}), [record_of({"bytes_up": 1, "bytes_down": 1}), record_of({"bytes_up": 1})]
        )
    ]
    assert not [label for label in labels if "whole run" in label]


def test_what_clients_keep_and_what_an_answer_costs_are_told_where_known():
    labels = {
        row.label: row.text for row in cost_rows(result_of({"private_parameters": 4096, "seconds_per_image": 0.0125}))
    }
    assert labels["Private parameters per client"] == human_count(4096)
    assert labels["Prediction for one image"] == human_seconds(0.0125)
    assert "Private parameters per client" not in {row.label for row in cost_rows(result_of({"private_parameters": 0}))}


def test_a_time_is_written_for_people():
    assert moment("2026-01-02T03:04:05+00:00") == "2026-01-02 03:04:05 UTC"
    assert moment("yesterday") == "yesterday"


def test_candidate_sets_are_named_with_what_they_were_asked_among():
    rows = [
        {
            "name": "own",
            "accuracy": 90.0,
            "interval": [85.0, 94.0],
            "zero_shot_accuracy": 80.0,
            "zero_shot_interval": [74.0, 85.5],
        },
        {"name": "hm2", "accuracy": 48.0, "interval": [40.25, 55.0]},
    ]
    own, mean = set_rows(result_of({"method": "promptfl", "base_to_new": rows}))
    assert own.label == "A client's own classes, among these"
    assert own.text == "90.00 % (85.0 to 94.0); zero-shot 80.00 % (74.0 to 85.5)"
    assert (mean.label, mean.text) == ("Harmonic mean of base and new (HM2)", "48.00 % (40.2 to 55.0)")
    assert set_rows(result_of({"method": "linear"})) == []


def test_what_a_target_took_is_told_or_that_it_was_not_reached():
    result: dict[str, Any] = {"method": "linear", "config": {"evaluation": {"target_accuracy": 70.0}}}
    assert [row.text for row in cost_rows(result_of(result)) if row.label.startswith("To reach")] == ["not reached"]
    result |= {
        "round_to_target": 3,
        "bytes_to_target": 20_480,
        "flops_to_target": 2_000_000_000,
        "seconds_to_target": 1.5,
    }
    told = {row.label: row.text for row in cost_rows(result_of(result)) if row.label.startswith("To reach")}
    assert told == {
        "To reach 70 %: rounds": "3",
        "To reach 70 %: up and down": "20.5 kB",
        "To reach 70 %: training of the largest client": "2.00 GFLOPs",
        "To reach 70 %: training time": "1.5 s",
    }
    assert not any(row.label.startswith("To reach") for row in cost_rows(result_of({"method": "linear"})))
    result |= {
        "memory_bytes_to_target": 310_000_000,
        "gpu_memory_bytes_to_target": None,
        "peak_memory_bytes": 320_000_000,
    }
    told = {row.label: row.text for row in cost_rows(result_of(result))}
    assert (told["To reach 70 %: peak memory"], told["Peak memory"]) == ("310 MB", "320 MB")
    assert "Peak memory of the GPU" not in told


def test_datasets_and_groups_of_a_long_tail_come_with_intervals():
    one = {"dataset": "a", "class_names": ["x", "y"], "test_images": 100, "accuracy": 90.0, "zero_shot_accuracy": 50.0}
    result = {"method": "promptfl", "datasets": [one, {**one, "dataset": "b", "accuracy": 70.0}]}
    first, _, mean = dataset_rows(result_of(result))
    assert first.label == "a, 100 images, 2 classes"
    assert first.text == "90.00 % (82.6 to 94.5); zero-shot 50.00 % (40.4 to 59.6)"
    # Wilson's bounds are 7.4 and 4.5 away from 90, 9.6 and 8.1 from 70: half the roots of the sums of their squares
    assert mean.text == "80.00 % (73.9 to 84.6); zero-shot 50.00 % (43.2 to 56.8)"
    group = {"name": "few", "classes": [3], "training_images": 9, "test_images": 100, "accuracy": 90.0}
    (few,) = tail_rows(result_of({"method": "linear", "long_tail": {"by": "thirds", "groups": [group]}}))
    assert (few.label, few.text) == ("Few: 1 class, 9 images", "90.00 % (82.6 to 94.5)")


def test_clients_differences_and_calibration_come_with_intervals():
    result = {
        "method": "fedpp",
        "accuracy": 70.0,
        "per_client_accuracy": [50.0, 60.0, 80.0, 90.0],
        "worst_client_accuracy": 50.0,
        "worst_tenth_accuracy": 50.0,
        "client_deviation": 15.8,
        "ece": 4.0,
        "ece_interval": [3.0, 6.5],
        "newcomers_accuracy": 40.0,
        "newcomers_per_client_accuracy": [None, 40.0, 40.0],
    }
    told = {row.label: row.text for row in accuracy_rows(result_of(result))}
    assert told["Worst client"].startswith("50.00 % (50.0 to ")
    assert told["Standard deviation over clients"] == "15.80 % (4.3 to 20.0)"
    assert told["Calibration error (ECE)"] == "4.00 % (3.0 to 6.5)"
    assert told["Newcomers, as they come"] == "40.00 % (40.0 to 40.0)"
