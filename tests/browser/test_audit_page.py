"""The page of an audit in a real browser: whole on a desk and on a phone, and nothing is fetched."""

import pytest
from helpers.audits import made_up_audit
from helpers.browser import Browser

from fedvl.audit.show import write_audit


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_and_fetches_nothing(browser, tmp_path, width):
    browser.screen(width, 800, phone=width == 390)
    page = write_audit(made_up_audit(), tmp_path / "audit.html")
    before = len(browser.requests)
    browser.open(page.as_uri())
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.requests[before:] == [page.as_uri()]
    assert browser.evaluate("document.querySelectorAll('.finding').length") == 4
    widths = browser.evaluate(
        "[...document.querySelectorAll('.strip')].map(part => part.getBoundingClientRect().width)"
    )
    assert min(widths) > 0.8 * min(width - 32, 848)
    assert browser.errors == []
