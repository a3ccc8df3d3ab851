"""What is said at the end of a run: computed from its figures, and nothing that they do not show."""

from helpers.contents import result_of
from helpers.made_up import make_result

from fedvl.report.ending import (
    calibration,
    course,
    ending,
    no_better,
    skipped,
    took_part,
    true_pseudo_labels,
    withdrawal_sentences,
)
from fedvl.runs.contents import Withdrawal


def run_of(per_round, images=1000, **more):
    """A result with this course of accuracy, on so many test images."""
    hits = round(per_round[-1] / 100 * images)
    confusion = [[hits, images - hits], [0, 0]]
    return result_of({"rounds": len(per_round), "per_round": per_round, "confusion": confusion, **more})


def test_who_took_part():
    result = make_result(clients=20, rounds=10)[0]
    said = "20 clients, dirichlet:0.3, 10 rounds, seed 0, 1,000 test images; in brackets, intervals of 95 %."
    assert took_part(result_of(result)) == said
    assert took_part(result_of({"method": "zero-shot", "clients": 1, "rounds": 0})) == "1 client, 0 rounds."


def test_the_course_of_accuracy():
    """Of 1,000 images at 70 % one standard error is 1.45 points."""
    rising = course(run_of([50.0, 60.0, 65.0, 67.0, 68.0, 70.0]))
    assert rising == ["Round 6, the last, is the best: 70.00 %. Still rising: try more rounds (--rounds 12)."]
    assert course(run_of([60.0, 69.5, 69.0, 69.0, 69.5, 70.0])) == ["Round 6, the last, is the best: 70.00 %."]
    assert course(run_of([60.0, 71.4, 70.0])) == ["Best round 2: 71.40 %; last round 3: 70.00 %."]
    fell = course(run_of([60.0, 71.5, 70.0]))
    assert fell[0].endswith("It fell since round 2: try fewer rounds or a lower learning rate.")
    assert course(run_of([60.0, 90.0, 70.0], images=20)) == ["Only 20 test images: the accuracies say little."]
    assert course(run_of([70.0])) == []


def test_rounds_are_those_that_were_evaluated():
    config = {"evaluation": {"every": 5}}
    line = course(run_of([60.0, 75.0, 70.0], config=config, rounds=12))[0]
    assert line.startswith("Best round 10: 75.00 %; last round 12: 70.00 %.")


def test_the_share_of_true_pseudo_labels_is_told():
    def told(*values, **more):
        return true_pseudo_labels(
            result_of({"rounds": len(values), "per_round_pseudo_label_accuracy": [*values], **more})
        )

    assert told(75.7, 75.7, 62.1, 64.4) == [
        "True pseudo-labels: 75.70 % in round 1, 64.40 % in round 4, the lowest 62.10 % in round 3."
    ]
    assert told(70.0, 80.0) == ["True pseudo-labels: 70.00 % in round 1, 80.00 % in round 2."]
    every = {"config": {"evaluation": {"every": 5}}, "rounds": 12}
    assert told(70.0, 65.0, 60.0, **every) == ["True pseudo-labels: 70.00 % in round 5, 60.00 % in round 12."]
    assert told(70.0, None, 70.0) == ["True pseudo-labels: 70.00 %."]
    assert told(None) == told() == []
    assert told(70.0)[0] in ending(
        result_of({"method": "fedpp", "rounds": 1, "per_round_pseudo_label_accuracy": [70.0]})
    )


def test_skipped_images_are_counted_by_reason():
    assert skipped(result_of({})) == []
    one = {"image": "cat/a.jpg", "reason": "the file is empty (0 bytes)."}
    assert skipped(result_of({"skipped_images": [one]})) == [
        "1 image skipped because the file is empty (0 bytes) (such as cat/a.jpg)."
    ]
    many = [
        one,
        *({"image": f"{kind}.png", "reason": f"it is {kind}."} for kind in ("odd", "odd", "torn", "old", "new")),
    ]
    assert skipped(result_of({"skipped_images": many})) == [
        "6 images skipped: 2 because it is odd (such as odd.png); 1 because the file is empty (0 bytes) (such as cat/a.jpg); "
        "1 because it is torn (such as torn.png); 2 for other reasons, which the report has."
    ]


def test_notes_and_the_toy_model():
    own = ending(
        result_of({"method": "linear", "dataset": "photos", "model": "fedvl-tiny", "notes": [str(n) for n in range(7)]})
    )
    assert own[1:] == [*"01234", "2 more notes are in the report.", own[-1]]
    assert own[-1] == "fedvl-tiny is a toy model: for real photos use --model openai/clip-vit-base-patch32."
    assert "toy" not in " ".join(
        ending(result_of({"method": "linear", "dataset": "cifar10-mini", "model": "fedvl-tiny"}))
    )
    assert "toy" not in " ".join(ending(result_of({"method": "linear", "dataset": "photos", "model": "openai/clip"})))


RECORD = Withdrawal.model_validate(
    {
        "client": 1,
        "party": "south",
        "run": {"folder": "run", "state_sha256": None, "accuracy": 75.0},
        "without": {"folder": "other", "state_sha256": None, "accuracy": 62.5, "interval": [30.0, 90.0]},
        "images": 1234,
        "difference": -12.5,
        "difference_interval": [-40.0, 15.0],
        "changed": 25.0,
        "changed_interval": [3.0, 65.0],
        "distance": 1.0,
        "moved": 2.0,
        "same_draws": True,
    }
)


def test_it_says_both_accuracies_the_difference_and_the_distance():
    accuracies, change, distance = withdrawal_sentences(RECORD)
    assert accuracies == "With south: 75.00 %; without: 62.50 % (30.00 to 90.00), on the same 1,234 test images."
    assert change.startswith(
        "Difference: -12.50 points (95 % interval -40.00 to +15.00, paired). 25.00 % of the answers"
    )
    assert distance == "The trained tensors lie 50.0 % as far apart as training moved them."


def test_it_says_what_is_chance_between_machines_and_nothing_of_tensors_that_did_not_move():
    told = withdrawal_sentences(RECORD.model_copy(update={"party": None, "moved": None, "same_draws": False}))
    assert told[0].startswith("With client 1: ")
    assert told[-1].endswith("part of the difference is chance.")
    assert not any("as far apart" in each for each in told)


def test_the_calibration_is_told_with_its_remedy():
    """Small errors need no words; a large one is told with what fits a temperature, or with what it was without one."""
    large = {"rounds": 1, "ece": 8.25}
    assert calibration(result_of({**large, "ece": 5.0})) == []
    (told,) = calibration(result_of(large))
    assert (
        told == "Shares are wrong by 8.2 points: --set evaluation.validation=0.2 fits a temperature to held-out images."
    )
    fitted = {**large, "temperature": 1.5, "temperature_from": "40 images that clients held out"}
    assert calibration(result_of(fitted)) == []  # of a method whose scores do not become shares: no error before
    (told,) = calibration(result_of({**fitted, "uncalibrated_ece": 12.0}))
    assert told.startswith("Shares are those of scores divided by 1.5, fitted to 40 images that clients held out:")
    assert told.endswith("the calibration error is 8.2 instead of 12.0 points.")
    sure = [{"least": least, "unsure": 100 * least, "images": 30, "accuracy": 90.0} for least in (0.5, 0.8)]
    unsure = {"rounds": 1, "sure": sure, "config": {"evaluation": {"unsure": 0.8}}}
    assert calibration(result_of(unsure)) == [
        "Unsure below 80 %: 80.0 % of the answers; right of the others: 90.00 % (74.4 to 96.5)."
    ]
    assert calibration(result_of({**unsure, "config": {}})) == []


def test_a_run_without_rounds_says_that_nothing_was_trained():
    none = {"rounds": 0, "config": {"federation": {"rounds": 0}}}
    assert course(result_of(none)) == ["No round was run, so nothing was trained over rounds: raise --rounds to train."]
    assert course(result_of({**none, "method": "zero-shot"})) == []


def against_zero_shot(gained, lost, same=0, **more):
    """A run that has so many test images right that zero-shot has wrong, and so many the reverse."""
    known = {
        "right": "1" * gained + "0" * lost + "1" * same,
        "zero_shot_right": "0" * gained + "1" * lost + "1" * same,
        "rounds": 10,
        "model": "openai/clip",
        "method": "linear",
        "per_round_loss": [1.0, 0.5],
        "config": {"training": {"learning_rate": 0.01}, "method": {"name": "linear", "preset": "paper"}},
    }
    return no_better(result_of({**known, **more}))


def test_a_run_that_beats_zero_shot_beyond_chance_needs_no_remark():
    """Of 30 images that changed, 21 or more gained are beyond chance in McNemar's test (p = 0.043)."""
    assert against_zero_shot(21, 9, 970) == []
    assert against_zero_shot(20, 10, 970)[0].startswith("Not better than zero-shot beyond chance (20 of 1,000")
    assert no_better(result_of({"rounds": 3})) == []
    assert against_zero_shot(0, 0, 50, rounds=0) == [], "zero-shot itself"


def test_it_says_how_far_below_and_which_setting_to_change():
    assert against_zero_shot(9, 21, 970) == [
        "Below zero-shot beyond chance (9 of 1,000 test images gained and 21 lost, p = 0.043): try a lower rate, "
        "training.learning_rate=0.001, or choose one by fedvl sweep."
    ]
    barely = against_zero_shot(0, 0, 1000)
    assert barely[0].endswith(
        "it hardly changes a prediction; try a higher rate, training.learning_rate=0.1, or more rounds."
    )
    tiny = against_zero_shot(0, 0, 10, model="fedvl-tiny")
    assert tiny[0].endswith(": --preset embedded has settings that were tuned for fedvl-tiny.")
    for method in ({"name": "linear", "preset": "embedded"}, {"name": "mine.py"}, {"name": "Mine@0123"}):
        config = {"training": {"learning_rate": 0.01}, "method": method}
        assert "--preset" not in against_zero_shot(0, 0, 10, model="fedvl-tiny", config=config)[0]


def test_where_no_rate_is_used_it_names_images_and_under_privacy_the_budget():
    assert "data.shots" in against_zero_shot(1, 1, 10, per_round_loss=[])[0]
    spent = {"unit": "client", "epsilon": 1.0, "delta": 1e-5, "sampling": "all"}
    assert "privacy.epsilon" in against_zero_shot(1, 1, 10, privacy=spent)[0]


def test_it_comes_at_the_end_of_a_run():
    known = {"right": "1" * 9 + "0" * 21, "zero_shot_right": "0" * 9 + "1" * 21, "rounds": 1, "method": "linear"}
    assert any(line.startswith("Below zero-shot beyond chance (9 of 30") for line in ending(result_of(known)))
