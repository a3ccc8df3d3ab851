"""Claims: what the papers' own figures say of them, and sentences computed from tables of known figures."""

import re

import pytest

from fedvl.comparisons.claims import Higher, Improvement, Level, TableFigures, as_shown, findings, shown_figure
from fedvl.comparisons.grid import Grid, read_recipe, recipe_names

# Pictures whose sentence compares no rows and no columns.
NO_ORDER = {
    "bench/tuned",  # compared by intervals
    "fed-mp/figure3",
    "fed-prime/figure1",
    "fedpp/figure5",
    "fedpp/table6",
    "fst-cbdg/figure2",
    "privacy/epsilon",
}
TABLE = TableFigures(
    ["a", "b", "c, d"],
    ["one", "two", "three"],
    {
        **{("a", "one"): 70.04, ("a", "two"): 50.0, ("a", "three"): 10.0},
        **{("b", "one"): 70.01, ("b", "two"): 40.0, ("b", "three"): 11.0},
        ("c, d", "one"): 80.0,
    },
)


def test_places_are_counted_by_the_figures_that_a_reader_sees():
    claim = Higher(higher="a", than=["b", "c, d"])
    assert findings([claim], TABLE) == ['a is higher than b in 1 of 3 (1 equal), than "c, d" in 0 of 1 columns.']


def test_an_improvement_is_relative_to_the_best_other_row():
    claim = Improvement(improved="a", over=["b", "c, d"])
    table = TABLE._replace(cells={**TABLE.cells, ("c, d", "two"): 25.0})
    assert findings([claim], table) == ["a improves on the best other row by -12.4 % (one), +25.0 % (two)."]
    assert findings([claim], table._replace(near_chance=[("a", "one")])) == [
        "a improves on the best other row by +25.0 % (two)."
    ]
    assert findings([claim], TABLE._replace(cells={})) == []


IMPROVED = {  # "Improv. (%)" of Fed-PRIME's slides
    "text": [27.82, 64.48, 48.44, 107.83, 22.65, 42.37, 43.81, 22.35, 66.30, 69.65],
    "image": [16.15, 22.44, 13.17, 1.73, 44.14, 30.30, 39.02, 20.51, 55.35, 17.32],
    "both": [49.93, 34.60, 36.10, 22.11, 20.66, 17.11, 4.41, 20.25],
}


@pytest.mark.parametrize("missing", IMPROVED)
def test_fed_primes_improvements_are_those_of_its_slides(missing: str) -> None:
    recipe = read_recipe("fed-prime/table1")
    (claim,) = [
        one for one in recipe.claims if isinstance(one, Improvement) and one.improved.startswith(f"miss {missing}")
    ]
    places = [(row, column) for row in recipe.rows for column in recipe.columns]
    cells = {place: figure for place in places if (figure := recipe.paper_figure(*place)) is not None}
    told = claim.finding(TableFigures(list(recipe.rows), list(recipe.columns), cells))
    found = [float(number) for number in re.findall(r"([+-][\d.]+) %", told)]
    assert found == pytest.approx(IMPROVED[missing], abs=0.06)


def test_places_near_chance_are_not_counted():
    guessing = TABLE._replace(near_chance=[(row, "two") for row in ("a", "b")])
    assert findings([Higher(higher="a", than=["b"])], guessing) == [
        "a is higher than b in 0 of 2 (1 equal) columns.",
        "Not counted, since zero-shot is near chance level: two.",
    ]


def test_cells_near_chance_are_named_one_by_one_where_they_fill_no_whole_columns():
    guessing = TABLE._replace(near_chance=[("a", "one"), *((row, "two") for row in ("a", "b"))])
    assert findings([Higher(higher="a", than=["b"])], guessing)[-1] == (
        "Not counted, since zero-shot is near chance level: a (one), a (two), b (two)."
    )


def test_columns_are_compared_in_the_rows_that_have_both():
    assert findings([Higher(higher="one", than=["two"])], TABLE) == ["one is higher than two in 2 of 2 rows."]
    assert findings([Higher(higher="one", than=["two"], among=["b"])], TABLE) == [
        "one is higher than two in 1 of 1 of the rows that the recipe names for this."
    ]


def test_a_level_row_is_told_by_its_ends():
    assert findings([Level(level="a")], TABLE) == ["a is between 10.0 and 70.0."]
    named = "in the columns that the recipe names for this"
    assert findings([Level(level="*", among=["two"])], TABLE) == [
        f"a is between 50.0 and 50.0 {named}. b is between 40.0 and 40.0 {named}."
    ]


def test_a_table_without_the_figures_says_nothing():
    assert findings([Higher(higher="c, d", than=["a"], among=["two"]), Level(level="none")], TABLE) == []


@pytest.mark.parametrize(
    ("value", "text"), [(0.0369, "0.0369"), (0, "0.0"), (54.55, "54.5"), (503520256, "503,520,256")]
)
def test_figures_are_compared_as_they_are_shown(value, text):
    assert shown_figure(value) == text
    assert as_shown(value) == float(text.replace(",", ""))


def test_a_claim_about_no_row_or_column_is_refused():
    with pytest.raises(ValueError, match="a claim is about 'nobody'"):
        Grid.model_validate({"rows": {"a": {}}, "claims": [{"higher": "a", "than": ["nobody"]}]})


@pytest.mark.parametrize("name", recipe_names())
def test_the_papers_own_figures_agree_with_what_a_recipe_says_of_them(name):
    recipe = read_recipe(name)
    assert bool(recipe.claims) == (name not in NO_ORDER)
    places = [(row, column) for row in recipe.rows for column in recipe.columns]
    cells = {place: figure for place in places if (figure := recipe.paper_figure(*place)) is not None}
    paper = TableFigures(list(recipe.rows), list(recipe.columns), cells)
    for claim in (claim for claim in recipe.claims if isinstance(claim, Higher)):
        for other in claim.than:
            pairs = claim.pairs(paper, other)
            assert all(one >= two for one, two in pairs)
            assert not pairs or any(one > two for one, two in pairs)
