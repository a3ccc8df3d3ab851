"""The page of settings is what their fields say now."""

from fedvl.config import Experiment, setting_names
from tools.settings_page import PAGE, filled, rows


def test_the_page_is_what_the_fields_say():
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page, "run python tools/settings_page.py and commit what it writes"


def test_every_setting_has_one_row():
    assert [row[0].strip("`") for row in rows()] == setting_names(Experiment)


def test_a_row_has_the_flag_the_default_and_the_description():
    assert ("`data.clients`", "`--clients`", "`10`", "Number of clients.") in rows()
    assert ("`federation.attempts`", "", "`3`") in [row[:3] for row in rows()]
