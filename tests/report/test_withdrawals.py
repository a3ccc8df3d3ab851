"""The words for a withdrawal, of a record as a file has it."""

from typing import Any

from fedvl.report.withdrawals import sentences

RECORD: dict[str, Any] = {
    "client": 1,
    "party": "south",
    "run": {"accuracy": 75.0},
    "without": {"accuracy": 62.5, "interval": [30.0, 90.0]},
    "images": 1234,
    "difference": -12.5,
    "difference_interval": [-40.0, 15.0],
    "changed": 25.0,
    "changed_interval": [3.0, 65.0],
    "distance": 1.0,
    "moved": 2.0,
    "same_draws": True,
}


def test_it_says_both_accuracies_the_difference_and_the_distance():
    accuracies, change, distance = sentences(RECORD)
    assert accuracies == "With south: 75.00 %; without: 62.50 % (30.00 to 90.00), on the same 1,234 test images."
    assert change.startswith(
        "Difference: -12.50 points (95 % interval -40.00 to +15.00, paired). 25.00 % of the answers"
    )
    assert distance == "The trained tensors lie 50.0 % as far apart as training moved them."


def test_it_says_what_is_chance_between_machines_and_nothing_of_tensors_that_did_not_move():
    told = sentences({**RECORD, "party": None, "moved": None, "same_draws": False})
    assert told[0].startswith("With client 1: ")
    assert told[-1].endswith("part of the difference is chance.")
    assert not any("as far apart" in each for each in told)
