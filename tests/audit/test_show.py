"""The table and the page of an audit."""

import re
from dataclasses import replace

import pytest
from helpers.audits import made_up_audit, made_up_epsilon
from rich.console import Console

from fedvl.audit.finding import OwnAudit, written_value
from fedvl.audit.perform import NAMES
from fedvl.audit.show import TITLES, audit_table, describe, interval, own_figures, write_audit
from fedvl.audit.words import NOT_CLAIMED


def printed(found):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in audit_table(found):
        console.print(part)
    return console.export_text()


def test_every_attack_has_a_title():
    assert TITLES.keys() == set(NAMES)


def test_the_terminal_has_values_intervals_verdicts_and_sentences():
    text = printed(made_up_audit())
    assert re.search(r"the server +membership +0\.77 +0\.70 to 0\.84 +0\.50 +shown", text)
    assert re.search(r"picture +14\.4 dB +13\.0 to 15\.0 dB +12\.7 dB +shown", text)
    assert re.search(r"a user who queries +membership +0\.50 +0\.45 to 0\.55 +0\.50 +not shown", text)
    assert "another client, feature-recovery: It was not tried." in text
    assert "Not shown, could be up to 0.55" in text
    assert re.search(r"update +gist +4 +not examined", text)
    assert "Use secure aggregation." in text
    told = (
        "With these messages the server could identify 38 of 100 training images at 1 % false alarms (chance: 1 of 100;"
    )
    assert told in text


def test_the_page_says_what_leaves_what_is_on_and_what_is_not_claimed(tmp_path):
    page = write_audit(made_up_audit(), tmp_path / "audit.html").read_text(encoding="utf-8")
    for words in (
        "By the server",
        "By another client",
        "&lt;b&gt;evil&lt;/b&gt;",
        "None: the server receives",
        "None is kept",
    ):
        assert words in page
    assert NOT_CLAIMED[0] in page
    first = page.index("With these messages the server could identify 38 of 100 training images")
    assert first < page.index('<p class="quiet">Audit of linear')
    order = [page.index(text) for text in ("2026-03-04 05:06:07 UTC", "12 simulated clients", "a" * 64, "b" * 64)]
    assert first < order[0] < order[1] < order[2] < order[3]
    assert page.index("What each remedy changes") < page.index("Date and signature")
    for term in ("Singling out", "Linkability", "Inference", "Recommended", "Date and signature"):
        assert term in page
    assert page.count('<td class="missing">not examined</td>') == 1
    assert "<td>label-histogram, membership (images in 25 % of its numbers)</td>" in page
    assert "<b>evil" not in page
    assert not re.search(r"(src|href)=[\"']?https?:", page)


@pytest.mark.parametrize("violated", [False, True])
def test_the_measured_epsilon_stands_beside_the_claimed_one(tmp_path, violated):
    epsilon = made_up_epsilon(sentence="Claimed: 3. Measured: at least 4.", violated=violated)
    found = made_up_audit().model_copy(update={"epsilon": epsilon})
    page = write_audit(found, tmp_path / "audit.html").read_text(encoding="utf-8")
    assert f'<p id="epsilon" class="{"loss" if violated else ""}">Claimed: 3. Measured: at least 4.</p>' in page
    assert "Claimed: 3. Measured: at least 4." in printed(found)


def test_a_budget_and_remedies_are_shown_once_there_are_any(tmp_path):
    on = {"remedies": ["Secure sums of 3 clients."], "budget": "epsilon 3 of 8"}
    found = made_up_audit().model_copy(update=on)
    page = write_audit(found, tmp_path / "audit.html").read_text(encoding="utf-8")
    assert "Secure sums of 3 clients." in page
    assert "epsilon 3 of 8" in page


@pytest.mark.parametrize("value, place", [(0.5, "500"), (-0.2, "0"), (2.0, "1000")])
def test_a_strip_ends_where_the_figure_is(value, place):
    found = made_up_audit()
    found = found.model_copy(update={"findings": [replace(found.findings[0], value=value)]})
    strip = describe(found).views[0].findings[0].strip
    assert f'width="{place}" height="12" class="loss"' in strip


def test_an_interval_above_the_chance_level_is_not_shown_as_touching_it():
    found = replace(made_up_audit().findings[0], interval=(0.5031, 0.61))
    assert interval(found) == "0.503 to 0.61"
    assert interval(replace(found, interval=(0.4969, 0.61))) == "0.50 to 0.61"
    assert interval(replace(found, interval=(0.99986, 1.0))) == "0.9999 to 1.0000"  # not as wide as nothing


def test_a_small_chance_is_not_none_and_nothing_has_no_sign():
    assert [written_value(value, "") for value in (0.003, 0.0, -0.0004, -0.012, 0.975)] == [
        "0.003",
        "0.00",
        "0.00",
        "-0.01",
        "0.97",
    ]
    assert written_value(14.44, " dB") == "14.4 dB"


def test_a_clients_own_values_are_shown_or_why_there_are_none():
    whole = made_up_audit()
    told = [replace(each, of="the update") for each in whole.findings]
    keys = OwnAudit.model_fields.keys() & type(whole).model_fields.keys()
    own = OwnAudit(**{key: getattr(whole, key) for key in keys} | {"findings": told}, images=30, held_out=True)

    def lines(found):
        console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        for part in own_figures(found):
            console.print(part)
        return console.export_text()

    text = lines(own)
    assert "with 600 images of the attacker's own (a third of the images, the update being of the rest)" in text
    assert "Membership can be told." in text
    assert "feature-recovery: It was not tried." in text
    assert "No remedy is on" in text
    assert "(the test images)" in lines(own.model_copy(update={"held_out": False}))
    nothing = lines(own.model_copy(update={"findings": [], "remedies": ["Secure aggregation is on."]}))
    assert nothing.startswith("\nAttacks on this update:\n")
    assert "600 images" not in nothing
    assert "Secure aggregation is on." in nothing
    assert "No remedy" not in nothing
