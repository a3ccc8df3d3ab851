"""A survey as lines and as a page: what was found, at how many sites, and what to do."""

from helpers.surveys import made_up_survey

from fedvl.data.survey import AlikeNames
from fedvl.report.survey_page import recommendations, survey_lines, write_survey_page


def test_recommendations_name_sites_by_number_only():
    told = [text for text, _ in recommendations(made_up_survey())]
    assert told == [
        "Files that cannot be read at 2 sites (7 images).",
        "The same image for training and test at 1 site.",
        "Classes that seem to be exchanged at 1 site.",
        "A class name at 1 site probably means Melanoma.",
        "Classes at 1 site are not among those of the federation.",
        "Few training images at all sites together: scar.",
    ]
    assert recommendations(made_up_survey(clean=True)) == []


def test_lines_for_a_terminal():
    lines = survey_lines(made_up_survey())
    assert lines[0] == "1,200 images, 1,193 readable, of east, north (counts are rounded down)."
    assert "Missing: south." in lines
    assert "  naevus    train 600  test 100" in lines
    assert survey_lines(made_up_survey(clean=True))[-1] == "No fault was found."


def test_the_page(tmp_path):
    page = write_survey_page(made_up_survey(), tmp_path / "survey.html").read_text()
    for text in (
        "Survey of 2 sites",
        "What to do before training",
        "probably means Melanoma",
        "rounded down",
        "Missing: south",
    ):
        assert text in page
    clean = write_survey_page(made_up_survey(clean=True), tmp_path / "clean.html").read_text()
    assert "No fault was found." in clean
    assert "one sum over these sites" in clean
    assert "What to do before training" not in clean


def test_names_that_are_alike_are_shown_with_their_sites(tmp_path):
    alike = [AlikeNames(one="<b>Keratosis</b>", other="keratosys", sites=["east", "north"])]
    found = made_up_survey(clean=True).model_copy(update={"alike": alike, "compared": ["east", "north"]})
    assert recommendations(found)[0][0] == "<b>Keratosis</b> and keratosys probably mean the same (east, north)."
    page = write_survey_page(found, tmp_path / "survey.html").read_text()
    assert "Class names were sent by east, north, whose policies allow it" in page
    assert "&lt;b&gt;Keratosis&lt;/b&gt; and keratosys" in page
