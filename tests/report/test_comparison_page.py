"""Pages of comparisons and of reproduced recipes: the table, and the figure that the kind asks for."""

import json
from xml.etree import ElementTree

import pytest
from helpers.grids import make_grid, make_points

from fedvl.comparisons.contents import Comparison
from fedvl.report.comparison_page import FIGURES, describe_grid
from fedvl.report.page import write_report
from fedvl.report.tables import MINUS

POINTED = ("scatter", "map", "bubbles", "panels")


def described(grid):
    return describe_grid(Comparison.model_validate(grid))


def grid_of(kind):
    return make_grid(kind, points=make_points(kind)) if kind in POINTED else make_grid(kind)


@pytest.mark.parametrize("kind", list(FIGURES))
def test_every_kind_has_a_page_with_ours_the_papers_and_the_difference(kind, tmp_path):
    (tmp_path / "comparison.json").write_text(json.dumps(grid_of(kind)))
    path = write_report(tmp_path)
    text = path.read_text(encoding="utf-8")
    for words in (
        "A table",
        "not the paper&#39;s",
        "The paper: What to look for",
        "This table: What was found",
        "paper 62.0",
        f"{MINUS}2.0",
        "± 0.5",
        "A note.",
    ):
        assert words in text, words
    assert "fedvl</span> <span>reproduce</span>" in text
    assert "http://" not in text
    assert path.read_bytes() == write_report(tmp_path).read_bytes()


def test_a_bench_of_many_papers_says_what_is_published_and_takes_no_difference(tmp_path):
    (tmp_path / "comparison.json").write_text(json.dumps({**grid_of("table"), "recipe": "bench/base-to-new"}))
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "published 62.0" in text
    assert "What to look for" in text
    assert "The paper: " not in text
    assert f"{MINUS}2.0" not in text


@pytest.mark.parametrize("kind", [kind for kind in FIGURES if kind not in ("table", "panels")])
def test_charts_are_sound_svg(kind):
    figures = described(grid_of(kind)).figures
    assert figures
    for figure in figures:
        for chart in figure.charts:
            assert ElementTree.fromstring(str(chart)).get("role") == "img"


def test_curves_begin_before_the_first_round():
    (figure,) = described(make_grid("curves")).figures
    assert "Round 0: mine 50, theirs 50" in str(figure.charts[0])
    assert "Round 2: mine 60, theirs 61" in str(figure.charts[0])
    rounds = make_grid("curves")
    for cell in rounds["cells"]:
        cell["measure"] = "rounds.drift"
    (figure,) = described(rounds).figures
    assert "Round 1: mine 50" in str(figure.charts[0])
    assert "Round 0" not in str(figure.charts[0])


def test_lines_run_over_the_columns_and_bars_tick_the_paper():
    (figure,) = described(make_grid("lines")).figures
    assert "food: mine 61, theirs 71" in str(figure.charts[0])
    (figure,) = described(make_grid("bars")).figures
    assert "mine, cars: 62.0, paper 64.0" in str(figure.charts[0])
    assert (
        figure.caption
        == "Points are seeds. Whiskers are a standard deviation over seeds. The tick marks the paper's value."
    )


def test_bars_of_different_measures_have_scales_of_their_own():
    grid = make_grid("bars")
    for cell in grid["cells"]:
        cell["measure"] = cell["column"]
    assert len(described(grid).figures) == 3


def test_a_radar_of_two_datasets_becomes_bars():
    grid = make_grid("radar")
    assert "Radar of 3 axes" in str(described(grid).figures[0].charts[0])
    grid |= {"columns": grid["columns"][:2], "cells": [cell for cell in grid["cells"] if cell["column"] != "cars"]}
    assert "bars, the longest" in str(described(grid).figures[0].charts[0])


def test_maps_tell_what_prototypes_correct():
    before, after = described(grid_of("map")).figures
    assert (before.title, after.title) == (
        "mine, pets: class texts only",
        "mine, pets: class texts and prototypes",
    )
    assert "66.7 % are correct" in before.caption
    assert "100.0 % are correct" in after.caption
    assert str(before.charts[0]).count("points cross") == 1
    assert "points cross" not in str(after.charts[0])


def test_a_map_of_samples_tells_what_they_lack():
    points = make_points("map")[0]
    sample = {key: points[key] for key in ("row", "column", "x", "y", "label")} | {"present": ["both", "text", "image"]}
    (figure,) = described(make_grid("map", points=[sample])).figures
    svg = str(figure.charts[0])
    assert [f"points {shape}" in svg for shape in ("circle", "triangle", "square")] == [True, True, True]
    assert "class 1 (1)" in svg


def test_panels_show_only_embedded_images_and_say_what_leaks_without_a_search():
    (figure,) = described(grid_of("panels")).figures
    assert [picture.caption for picture in figure.pictures] == ["original", "step 0"]
    assert "cosine 1.0000, and its class too" in figure.caption


def test_a_comparison_gets_bars_and_failures_are_told(tmp_path):
    failures = [{"row": "mine", "column": "cars", "seed": 2, "error": "<b>disk full</b>"}]
    grid = make_grid("table", failures=failures, recipe=None)
    grid["cells"] = [cell for cell in grid["cells"] if (cell["row"], cell["column"]) != ("mine", "cars")]
    (tmp_path / "comparison.json").write_text(json.dumps(grid))
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "5 bars, the longest" in text
    assert "&lt;b&gt;disk full&lt;/b&gt;" in text
    assert "—" in text


def test_a_papers_table_has_no_figure_beside_it():
    assert described(make_grid("table")).figures == []


def compared(**more):
    """A comparison of two methods over seeds, as fedvl compare writes it."""
    cells = [
        {"row": row, "column": "accuracy", "measure": "accuracy", "mean": mean, "deviation": 1.0, "n": 2}
        | {"values": [mean - 1, mean + 1], "runs": [f"{row}-0", "../../etc"], "images": 1000, "protocol": "closed"}
        | {
            "best": row == "a",
            "significant": row == "a",
            "ahead": 5.0,
            "compared": [0, 1],
            "seeds": [0, 1],
            "against": "b" if row == "a" else None,
            "lead": [1.0, 9.0],
        }
        for row, mean in (("a", 70.0), ("b", 65.0))
    ]
    facts = {"dataset": ["pets"], "model": ["tiny"], "partition": ["iid"], "clients": [1], "rounds": [5, 0]}
    different = [{"setting": "training.learning_rate", "values": ["0.1", "0.2"]}]
    different += [{"setting": "method.mu", "values": ["", "0.5"]}]
    curves = [{"row": "a", "column": "accuracy", "values": [60.0, 70.0]}]
    known = {
        "rows": ["a", "b"],
        "columns": ["accuracy"],
        "cells": cells,
        "facts": facts | {"zero_shot_accuracy": [50.0]},
    }
    return make_grid("table", recipe=None, curves=curves, different=different, **known) | more


def test_a_comparison_opens_with_its_conclusion_and_names_what_was_run(tmp_path):
    (tmp_path / "comparison.json").write_text(json.dumps(compared()))
    text = write_report(tmp_path).read_text(encoding="utf-8")
    said = "a is best: 70.0 %, +5.0 points over b (95 % over seeds and test images 1.0 to 9.0, paired). Zero-shot has 50.0 %."
    assert said in text
    assert "pets · model tiny · iid · 1 client · 5 rounds · 2 seeds · 1,000 test images" in text
    values = described(compared())
    assert values.different == [("training.learning_rate", ["0.1", "0.2"])]
    assert values.alone == [("b", "method.mu", "0.5")]
    assert [run.link for run in values.runs] == ["runs/a-0/report.html", "runs/b-0/report.html"]  # none leads out
    bars, curves = values.figures
    assert str(bars.charts[0]).count('class="seed"') == 4
    assert str(bars.charts[0]).count('class="whisker"') == 6
    assert "Round 2: a 70.0" in str(curves.charts[0])
    assert "zero-shot 50.0" in str(curves.charts[0])


def test_curves_have_bands_over_seeds_and_the_zero_shot_line_of_their_column():
    grid = compared()
    assert "band" not in str(described(grid).figures[1].charts[0])
    grid["curves"][0] |= {"deviations": [2.0, 1.0]}
    (bars, curves) = described(grid).figures
    assert str(curves.charts[0]).count('class="band c0 row-0"') == 1
    assert curves.caption == "Mean over seeds. Bands are a standard deviation over seeds."
    assert ">accuracy, %<" in str(bars.charts[0])
    grid["facts"].pop("zero_shot_accuracy")
    assert "zero-shot" not in str(described(grid).figures[1].charts[0])
    grid["rows"] = ["a", "zero-shot"]
    grid["cells"][1] |= {"row": "zero-shot", "mean": 41.5}
    grid["cells"][0] |= {"against": "zero-shot"}
    assert "zero-shot 41.5" in str(described(grid).figures[1].charts[0])


def test_what_may_be_chance_and_what_does_not_compare_is_said():
    grid = compared()
    grid["cells"][0] |= {"lead": [-1.0, 9.0], "significant": False}
    assert "may be chance" in described(grid).opening
    grid["cells"][0]["lead"] = None
    assert "there is no paired test" in described(grid).opening
    grid["cells"][0]["best"] = False
    assert described(grid).opening.startswith("a and b are equal: 70.0 %.")
    grid["cells"][1]["protocol"] = "open"
    values = described(grid)
    assert values.opening == ""
    assert "follow different protocols (closed for a, open for b) and do not compare." in values.note


def test_several_columns_are_counted():
    grid = compared(columns=["accuracy", "other"])
    grid["cells"] += [cell | {"column": "other", "lead": [-1.0, 2.0], "significant": False} for cell in grid["cells"]]
    assert described(grid).opening.startswith("Best of 2 rows in 2 columns: a in 2, beyond chance in 1 (beyond")
