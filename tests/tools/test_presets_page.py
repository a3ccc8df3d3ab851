"""The preset `embedded` is what its trials say, and none of its tests is below zero-shot beyond chance."""

from fedvl.methods import method_names
from tools.presets import CHANGES, Case, cases_to_run, chosen_rate, read_lines, tuned_methods
from tools.presets_page import BEGIN, END, LINES, PAGE, PRESETS, better, presets_text, row_of, table, worse


def trial(rate, validation=None):
    known = {"error": "diverged"} if validation is None else {"validation": validation}
    return {"method": "linear", "rate": rate, "seed": None, "seconds": 1.0, **known}


FOUR = [trial(0.001, 60.0), trial(0.01, 70.0), trial(0.1, 70.0), trial(1.0)]


def test_presets_and_page_follow_from_the_trials():
    lines = read_lines(LINES)
    assert PRESETS.read_text(encoding="utf-8") == presets_text(lines)
    assert table(lines) in PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert set(CHANGES) <= set(tuned_methods()) <= set(method_names())


def test_no_tested_preset_is_below_zero_shot_beyond_chance():
    tests = [line for line in read_lines(LINES) if "accuracy" in line]
    assert len({line["method"] for line in tests}) >= 15
    assert not [line for line in tests if worse(line)]


def test_the_best_rate_is_chosen_the_smaller_of_equals_and_none_before_enough_trials():
    assert chosen_rate(FOUR, "linear") == 0.01
    assert chosen_rate(FOUR[:3], "linear") is None
    assert chosen_rate([trial(rate) for rate in (0.001, 0.01, 0.1, 1.0, 10.0)], "linear") is None
    test = {"method": "linear", "rate": 0.001, "seed": 0, "validation": 99.0, "seconds": 1.0}
    assert chosen_rate([*FOUR, test], "linear") == 0.01


def test_what_is_in_the_file_is_not_run_again():
    assert cases_to_run(FOUR[:2], ["linear"], 9.0) == [Case("linear", rate, None) for rate in (0.1, 1.0, 10.0)]
    five = [*FOUR, trial(10.0, 5.0)]
    done = {"method": "linear", "rate": 0.01, "seed": 1, "accuracy": 60.0, "seconds": 1.0}
    assert cases_to_run([*five, done], ["linear"], 9.0) == [Case("linear", 0.01, 0), Case("linear", 0.01, 2)]
    assert cases_to_run(five, ["linear"], 0.5) == [], "its trials take longer than what is tested"


def test_a_row_counts_seeds_above_and_below_zero_shot_beyond_chance():
    tests = [
        {"method": "linear", "rate": 0.01, "seed": seed, "accuracy": 50.0 + seed, "zero_shot": 51.0, **paired}
        for seed, paired in enumerate(
            [
                {"gained": 9, "lost": 1, "p": 0.02},
                {"gained": 1, "lost": 9, "p": 0.02},
                {"gained": 5, "lost": 4, "p": 0.9},
            ]
        )
    ]
    assert [better(one) for one in tests] == [True, False, False]
    assert [worse(one) for one in tests] == [False, True, False]
    row = row_of([*FOUR, *tests], "linear")
    assert row == ("`linear`", "0.01", "60.0", "**70.0**", "70.0", "diverged", "", "51.0", "51.0", "3", "1", "1")
