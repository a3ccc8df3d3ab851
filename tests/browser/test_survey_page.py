"""The page of a survey in a real browser: whole on a desk and on a phone, in both colour schemes."""

import os
from pathlib import Path

import pytest
from helpers.browser import Browser
from helpers.surveys import made_up_survey

from fedvl.report.survey_page import write_survey_page


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_fits_and_fetches_nothing(browser, tmp_path, width, dark):
    browser.screen(width, 900, dark=dark, phone=width == 390)
    page = write_survey_page(made_up_survey(), tmp_path / "survey.html")
    before = len(browser.requests)
    browser.open(page.as_uri())
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.requests[before:] == [page.as_uri()]
    assert browser.evaluate("document.querySelectorAll('.fault').length") == 6
    assert browser.errors == []
    if shots := os.environ.get("FEDVL_SCREENSHOTS"):
        browser.screenshot(Path(shots) / f"survey-{width}-{'dark' if dark else 'light'}.png", whole=True)
