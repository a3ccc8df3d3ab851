"""Runs that exist on the page of a comparison."""

import json
import shutil

import pytest

from fedvl.errors import FedVLError
from fedvl.report.comparison_of_runs import describe_runs, on_common_images, paired_sentences, run_names, shade
from fedvl.report.page import write_report, write_side_by_side
from fedvl.report.tables import MINUS, MISSING
from fedvl.runs.answers import ANSWER_COLUMNS, ANSWERS
from fedvl.runs.folder import RunFolder

HOSTILE = """</script><script>alert(1)</script><img src=x onerror=alert(2)>"'&"""


@pytest.fixture
def pair(sample_of, save, tmp_path):
    """Two runs of three classes; the second gains 10 points on "a", loses 15 on "b", and has another rate."""
    folders = []
    for name, recalls, rate in (("one", [50.0, 90.0, 70.0], 0.1), ("two", [60.0, 75.0, 70.0], 0.2)):
        result, metrics = sample_of(rounds=3)
        result |= {
            "class_names": ["a", "b", "c"],
            "per_class_recall": recalls,
            "confusion": None,
            "partition_counts": None,
        }
        result["config"] = {"training": {"rate": rate}, "seed": 0, "method": {name: 1}}
        result["method"] = f"method {name}"
        folders.append(save(tmp_path / name, result, metrics))
    return folders


def described(folders):
    return describe_runs([RunFolder(folder) for folder in folders])


def test_names_are_as_short_as_tells_runs_apart(tmp_path):
    def names(*folders):
        return run_names([RunFolder(tmp_path / folder) for folder in folders])

    assert names("x/a", "x/b") == ["a", "b"]
    assert names("x/a", "y/a") == ["x/a", "y/a"]
    assert [name.rpartition(" ")[2] for name in names("a", "a")] == ["(1)", "(2)"]


def test_classes_are_set_against_the_first_run(pair):
    (table,) = described(pair).details.class_tables
    assert table.members == [0, 1]
    others = [line.others[0] for line in table.lines]
    assert [one.cell.text for one in others] == ["+10.0", f"{MINUS}15.0", "0.0"]
    assert [one.kind for one in others] == ["gain", "loss", "same"]
    # 70 % of the colour at 30 points.
    assert [one.share for one in others] == ["23%", "35%", "0%"]


def test_settings_are_sorted_into_different_shared_and_lonely(pair):
    found = described(pair)
    assert found.different == [("training.rate", ["0.1", "0.2"])]
    assert found.details.same == [("seed", "0")]
    assert found.alone == [("one", "method.one", "1"), ("two", "method.two", "1")]


def test_the_table_has_figures_with_intervals_beside_zero_shot(pair):
    found = described(pair)
    result = RunFolder(pair[0]).result
    assert found.columns == ["accuracy, %", "zero-shot, %", "above zero-shot, points", "macro F1, %"]
    texts = [cell.cell.text for cell in found.rows[0].cells]
    change = result.accuracy - result.zero_shot_accuracy
    assert texts[:3] == [f"{value:.1f}" for value in (result.accuracy, result.zero_shot_accuracy, change)]
    assert found.opening == ""
    assert found.details.titles == [f"method {name} on {result.dataset}" for name in ("one", "two")]


def test_numbers_of_clients_are_a_column_where_they_differ(pair, tmp_path):
    """Three runs: of 5 and of 1,200 clients, and one that does not say it."""
    for folder, clients in zip(pair, (5, 1200), strict=True):
        result = json.loads((folder / "result.json").read_text())
        (folder / "result.json").write_text(json.dumps(result | {"clients": clients}))
    third = shutil.copytree(pair[0], tmp_path / "three")
    result = json.loads((third / "result.json").read_text())
    (third / "result.json").write_text(json.dumps(result | {"clients": None}))
    found = described([*pair, third])
    assert found.columns[-1] == "clients"
    assert [row.cells[-1].cell.text for row in found.rows] == ["5", "1,200", MISSING]
    assert "clients" not in str(found.figures), "bars and curves are of the accuracy"
    assert "clients" not in described([pair[0], pair[0]]).columns


def test_a_run_without_rounds_is_a_level_line(pair, sample_of, save, tmp_path):
    result, _ = sample_of(rounds=0, method="zero-shot")
    result["accuracy"] = 51.5
    runs = [RunFolder(folder) for folder in (*pair, save(tmp_path / "zero", result, []))]
    assert "zero 51.5" in str(describe_runs(runs).figures[1].charts[0])


def test_three_datasets_make_a_radar_of_methods(sample_of, save, tmp_path):
    folders = []
    for number, dataset in enumerate(("pets", "food", "cars", "cars")):
        result, metrics = sample_of(rounds=1)
        result |= {"dataset": dataset, "accuracy": 60.0 + number}
        folders.append(save(tmp_path / str(number), result, metrics))
    runs = [RunFolder(folder) for folder in folders]
    assert "Accuracy by dataset" not in [figure.title for figure in describe_runs(runs[:2]).figures]
    (radar,) = (str(one.charts[0]) for one in describe_runs(runs).figures if one.title == "Accuracy by dataset")
    assert "fst-cbdg, cars: 62.5" in radar  # two runs of one place are averaged
    assert "fst-cbdg, pets: 60.0" in radar


def test_hostile_names_stay_text(pair, tmp_path):
    for folder in pair:
        result = json.loads((folder / "result.json").read_text())
        result |= {"method": HOSTILE, "dataset": HOSTILE, "command": HOSTILE, "class_names": [HOSTILE, "b", "c"]}
        result["config"] = {HOSTILE: {"x": HOSTILE}, "folder": folder.name + HOSTILE}
        (folder / "result.json").write_text(json.dumps(result))
    text = write_side_by_side(pair, tmp_path / "compare.html").read_text(encoding="utf-8")
    assert text.count("<script") == 1
    assert "<img" not in text
    assert "onerror=alert(2)&gt;" in text


def test_a_run_that_is_not_finished_is_an_error_and_leaves_no_page(pair, tmp_path):
    with pytest.raises(FedVLError, match="There is no run in"):
        write_side_by_side([*pair, tmp_path / "nothing"], tmp_path / "compare.html")
    assert not (tmp_path / "compare.html").exists()


def test_a_page_that_cannot_be_written_is_an_error(pair, tmp_path):
    with pytest.raises(FedVLError, match="--out"):
        write_side_by_side(pair, tmp_path / "no" / "compare.html")


def test_one_folder_gets_its_own_report(pair):
    assert write_report(pair[0]) == pair[0] / "report.html"


def test_runs_on_the_same_images_are_compared_image_by_image(tmp_path, sample_of, save):
    """B has four images right that A has not, and A one that B has not; C was tested on other images."""
    result, metrics = sample_of(rounds=3)
    tests = {"a": ("x", "1111100000"), "b": ("x", "0111111110"), "c": ("y", "0111111110")}
    runs = [
        RunFolder(save(tmp_path / name, result | {"test_sha256": sha256, "right": right}, metrics))
        for name, (sha256, right) in tests.items()
    ]
    details = describe_runs(runs).details
    assert details is not None
    b, c = details.paired
    assert b.told == [
        "+30.00",
        f"{MINUS}15.8 to 65.8",
        "p = 0.38",
        "4",
        "1",
        "all 10 test images",
    ]  # 12/32; the interval of test_uncertainty.py
    assert c.told[0] == "other test images, or not recorded: no paired test"
    first, second = paired_sentences(runs)
    assert first == f"b against a: +30.00 points (95 %: {b.told[1]}), McNemar p = 0.38, on all 10 test images."
    assert second.startswith("c against a: other test images")


def answers(folder, rows):
    lines = [
        ",".join(ANSWER_COLUMNS),
        *(f"{file},{truth},{said},0.9,0.1,{sha256}" for file, truth, said, sha256 in rows),
    ]
    (folder / ANSWERS).write_text("\n".join(lines) + "\n")


def test_runs_of_two_months_are_compared_on_the_images_that_both_tests_have(tmp_path, sample_of, save):
    """Four images are in both tests, under other names; one of them got another label in the second month."""
    result, metrics = sample_of(rounds=3)
    before, after = (
        RunFolder(save(tmp_path / name, result | {"test_sha256": name}, metrics)) for name in ("march", "april")
    )
    rows = [("1", "cat", "cat", "a"), ("2", "cat", "dog", "b"), ("3", "dog", "cat", "c"), ("4", "cat", "dog", "d")]
    answers(before.path, [*rows, ("5", "cat", "cat", "e")])
    # b is right now, and c, which was wrong in March by its label of then, was right by that of April; d is wrong now
    answers(
        after.path,
        [("x", "cat", "cat", "a"), ("y", "cat", "cat", "b"), ("z", "cat", "cat", "c"), ("v", "cat", "dog", "d")],
    )
    found = on_common_images(before, after)
    assert found is not None
    assert (found.images, found.gained, found.lost) == (4, 1, 0)
    images = sum(map(sum, result["confusion"]))
    (told,) = paired_sentences([before, after])
    assert told.startswith("april against march: +25.00 points (95 %:")
    assert told.endswith(f"on the 4 test images that both have (of {images:,} and {images:,}).")
    answers(after.path, [("x", "cat", "cat", "")])  # of a dataset of the catalogue
    assert on_common_images(before, after) is None


def test_a_difference_of_recalls_has_a_colour_only_beyond_the_intervals_of_both():
    assert shade(50.0, 100.0, 2)[1:] == ("gain", "0%")  # one image of two: 9 to 91 against 34 to 100
    assert shade(50.0, 100.0, 100)[1:] == ("gain", "70%")
    assert shade(80.0, 65.0, 200)[1:] == ("loss", "35%")
    assert shade(80.0, None, 200)[1:] == ("same", "0%")
