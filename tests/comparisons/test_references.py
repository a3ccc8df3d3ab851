"""Reference rows: which are added, what they share with the others, and why one is missing."""

from typing import Any

from fedvl.comparisons.contents import Failure
from fedvl.comparisons.grid import Grid
from fedvl.comparisons.references import with_references, without_refused
from fedvl.comparisons.run import GridOutcome, flags_grid
from fedvl.comparisons.tuning import trials_of
from fedvl.runs.settings import resolve_experiment


def rows_of(*methods: str, **base: Any) -> list[str]:
    return list(with_references(flags_grid(methods, [], [], 1, base)).rows)


def test_both_stand_beside_methods_that_use_labels() -> None:
    assert rows_of("linear") == ["linear", "zero-shot", "ridge"]
    assert rows_of("ridge", "fedprox") == ["ridge", "fedprox", "zero-shot"]
    assert rows_of("zero-shot", "linear", "ridge") == ["zero-shot", "linear", "ridge"]


def test_ridge_does_not_stand_beside_methods_without_labels() -> None:
    found = with_references(flags_grid(["fst-cbdg", "fed-em"], [], [], 1, {}))
    assert list(found.rows) == ["fst-cbdg", "fed-em", "zero-shot"]
    assert "ridge is left out as a reference row: it uses labels" in found.note
    assert rows_of("fst-cbdg", "linear") == ["fst-cbdg", "linear", "zero-shot", "ridge"]


def test_they_can_be_left_out_and_other_measures_have_none() -> None:
    plain = flags_grid(["linear"], [], [], 1, {})
    assert list(with_references(plain, given=False).rows) == ["linear"]
    assert list(with_references(plain.model_copy(update={"references": False})).rows) == ["linear"]
    assert list(with_references(plain.model_copy(update={"measure": "bytes_up_per_client_round"})).rows) == ["linear"]


def test_they_share_the_data_of_the_others_and_keep_their_own_options() -> None:
    settings = {
        "seeds": 1,
        "base": {"method": {"name": "cachefl", "alpha": 2.0}, "federation": {"rounds": 2}},
        "rows": {"one": {}, "other": {"data": {"clients": 3}}},
        "columns": {"iid": {"data": {"partition": "iid"}}},
    }
    found = with_references(Grid.model_validate(settings))
    (case,) = [case for case in found.cases() if case.row == "ridge"]
    assert case.settings["method"] == {"name": "ridge"}
    assert resolve_experiment(case.settings).data.shots == 16, "from the preset that both rows have"
    assert resolve_experiment(case.settings).data.partition == "iid"
    assert resolve_experiment(case.settings).data.clients == 10, "on which the rows differ"


def test_they_are_not_tuned() -> None:
    grid = flags_grid(["linear"], [], [], 1, {}).tuned_by({"training.learning_rate": [0.1, 1.0]}, None)
    assert list(trials_of(with_references(grid)).rows) == ["linear: learning_rate 0.1", "linear: learning_rate 1.0"]


def test_a_refused_reference_row_is_a_sentence_and_no_failure() -> None:
    grid = with_references(flags_grid(["linear"], [], ["iid", "disjoint"], 2, {}))
    outcome = GridOutcome(grid)
    outcome.figures = {("linear", "iid"): [70.0, 71.0], ("ridge", "iid"): [75.0, 75.0]}
    said = [
        ("ridge", "disjoint", "No classes."),
        ("zero-shot", "iid", "No texts."),
        ("zero-shot", "disjoint", "No texts."),
    ]
    outcome.failures = [
        Failure(row=row, column=column, seed=seed, error=error) for row, column, error in said for seed in (0, 1)
    ]
    outcome.failures.append(Failure(row="linear", column="disjoint", seed=0, error="as intended"))
    found = without_refused(outcome)
    assert list(found.grid.rows) == ["linear", "ridge"]
    assert [failure.row for failure in found.failures] == ["linear"]
    assert found.grid.note.endswith(
        "The reference row ridge is missing in disjoint: No classes. The reference row zero-shot is missing: No texts."
    )


def test_they_do_not_start_from_a_run() -> None:
    base = {"training": {"start_from": "runs/ridge"}}
    found = with_references(flags_grid(["linear"], [], [], 1, base))
    starts = {case.row: resolve_experiment(case.settings).training.start_from for case in found.cases()}
    assert starts == {"linear": "runs/ridge", "zero-shot": None, "ridge": None}
