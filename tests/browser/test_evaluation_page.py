"""The page of an evaluation in a real browser: whole on a desk and on a phone, in both colour schemes."""

import pytest
from helpers.browser import Browser
from report.test_evaluation_page import made_up_evaluation

from fedvl.report.evaluation_page import write_evaluation_page


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_fits_and_fetches_nothing(browser, tmp_path, width, dark):
    browser.screen(width, 900, dark=dark, phone=width == 390)
    page = write_evaluation_page(made_up_evaluation(secure=not dark), tmp_path / "evaluation.html")
    before = len(browser.requests)
    browser.open(page.as_uri())
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.requests[before:] == [page.as_uri()]
    shown = "[...document.querySelectorAll('svg')].filter(part => part.getBoundingClientRect().width > 100).length"
    assert browser.evaluate(shown) == (3 if not dark else 2)
    assert browser.errors == []
    browser.screenshot(tmp_path / "page.png", whole=True)
