"""The page in a real browser: names, images, ranked answers, prototypes, comparison; by keyboard, on a phone, with a token."""

import csv
import io
import math

import pytest
from helpers.browser import Browser, until
from helpers.finished import picture, png, serving

from fedvl.serve.app import Offered, make_app
from fedvl.serve.reported import ReportBox

NAMES = "airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for row in range(20):
        (folder / f"{row:02}.png").write_bytes(png(row * 23 % 500))
    (folder / "notes.png").write_text("this is no picture")
    return sorted(folder.iterdir())


@pytest.fixture
def browser(tmp_path):
    with Browser(tmp_path) as opened:
        yield opened
        assert opened.errors == []


def type_names(browser, names):
    """As a user does: all that is there is overwritten, and the box is left."""
    browser.evaluate("document.getElementById('names').focus(); document.getElementById('names').select()")
    browser.type(names)
    browser.evaluate("document.getElementById('names').blur()")


def cards(browser):
    return browser.evaluate(
        """[...document.querySelectorAll(".answer")].map((card) => ({
            image: card.querySelector("figcaption")?.textContent,
            said: card.querySelector(".said").innerText,
            names: [...card.querySelectorAll(".federated .name")].map((each) => each.textContent),
            zero_shot: [...card.querySelectorAll(".zero-shot .name")].map((each) => each.textContent),
            widths: [...card.querySelectorAll(".federated li")].map((each) => each.style.getPropertyValue("--share")),
            kept: card.querySelector(".remembered")?.textContent ?? null,
            refused: card.classList.contains("refused"),
            differs: card.classList.contains("differs"),
        }))"""
    )


def test_names_twenty_images_answers_prototypes_and_comparison(browser, address, pictures, fed_mp, tmp_path):
    browser.screen(1280, 900)
    browser.open(address)
    browser.wait_for("document.getElementById('about').textContent.includes('fed-mp on fedvl-tiny')")
    assert browser.evaluate("document.getElementById('names').value") == ", ".join(fed_mp.class_names)
    type_names(browser, NAMES)
    assert browser.evaluate("document.getElementById('names-hint').textContent") == "10 names"
    browser.give_files("#files", pictures)
    browser.wait_for("document.querySelectorAll('.answer').length === 21")
    found = cards(browser)
    assert [card["image"] for card in found] == [path.name for path in pictures]

    user = fed_mp.user(NAMES.split(", "))
    rows = fed_mp.encode([fed_mp.read(path) for path in pictures[:20]])
    replies = user.ask(rows[:18], 5) + user.ask(rows[18:], 5)
    for card, reply in zip(found[:20], replies, strict=True):
        assert card["names"] == [name for name, _ in reply.ranked[:4]]
        assert card["zero_shot"] == [name for name, _ in reply.zero_shot[:4]]
        assert card["kept"] == (None if reply.example_of is None else f"prototype of {reply.example_of}")
        widths = [float(width.rstrip("%")) for width in card["widths"]]  # a full bar is a share of 100 %
        assert widths == pytest.approx([100 * share for _, share in reply.ranked[:4]], abs=0.1)
        assert f"as unsure as between {math.exp(reply.entropy):.1f} names" in card["said"] or reply.entropy < 0.05
        assert card["differs"] == (reply.ranked[0][0] != reply.zero_shot[0][0])
    assert found[20]["refused"]
    assert "not an image of a known format" in found[20]["said"]

    shown = browser.evaluate(
        """Object.fromEntries([...document.querySelectorAll("#prototypes li")].map((row) =>
            [row.dataset.name, row.querySelectorAll("img").length]))"""
    )
    kept = [reply.example_of for reply in replies if reply.example_of]
    assert shown == {name: kept.count(name) for name in kept}
    assert sum(shown.values()) > 0
    weights = browser.evaluate("[...document.querySelectorAll('#clients .name')].map((each) => each.textContent)")
    ordered = sorted(user.client_weights, key=lambda client: -user.client_weights[client])
    assert weights == [f"Client {client}" for client in ordered]

    visible = "getComputedStyle(document.querySelector('.answer .zero-shot')).display !== 'none'"
    assert not browser.evaluate(visible)
    browser.evaluate("document.getElementById('compare').click()")
    assert browser.evaluate(visible)
    differing = sum(card["differs"] for card in found)
    said = f"zero-shot differs on {differing}" if differing else "zero-shot agrees"
    assert (
        browser.evaluate("document.getElementById('status').textContent")
        == f"20 images classified · 1 refused · {said}"
    )
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    assert {url.split("/")[2] for url in browser.requests if url.startswith("http")} == {address.split("/")[2]}


def test_other_names_ask_everything_again_and_starting_over_forgets(browser, address, pictures):
    browser.open(address)
    browser.wait_for("document.getElementById('names').value")
    type_names(browser, "cat, ship")
    browser.give_files("#files", pictures[:3])
    browser.wait_for("document.querySelectorAll('.answer').length === 3")
    type_names(browser, "лошадь, 猫, <b>frog</b>")
    browser.wait_for("document.querySelector('.answer .name')?.textContent.match(/лошадь|猫|<b>frog/)")
    browser.wait_for("document.querySelectorAll('.answer').length === 3")
    for card in cards(browser):
        assert set(card["names"]) == {"лошадь", "猫", "<b>frog</b>"}
    browser.evaluate("document.getElementById('clear').click()")
    assert browser.evaluate("document.querySelectorAll('.answer').length") == 0
    browser.give_files("#folder", [pictures[0].parent])
    browser.wait_for("document.querySelectorAll('.answer').length === 21")


def test_names_that_are_scripts_are_shown_and_not_run(browser, address, pictures, tmp_path):
    names = [
        "<img src=x onerror=window.ran=1>",
        "<script>window.ran=1</script>",
        "javascript:window.ran=1",
        '"><svg/onload=ran=1>',
    ]
    file = tmp_path / "<img src=x onerror='window.ran=1'>.png"
    file.write_bytes(pictures[0].read_bytes())
    broken = tmp_path / "<script>window.ran=1<.png"
    broken.write_text("no picture")
    browser.open(address)
    browser.wait_for("document.getElementById('names').value")
    type_names(browser, ", ".join(names))
    browser.give_files("#files", [file, broken])
    browser.wait_for("document.querySelectorAll('.answer').length === 2")
    good, bad = cards(browser)
    assert set(good["names"]) == set(names)
    assert (good["image"], bad["image"], bad["refused"]) == (file.name, broken.name, True)
    assert browser.evaluate("typeof window.ran") == "undefined"
    assert browser.evaluate("document.querySelectorAll('svg, script:not([src=\"page.js\"])').length") == 0


def test_the_keyboard_reaches_everything(browser, address, pictures):
    browser.open(address)
    browser.wait_for("document.getElementById('names').value")
    browser.give_files("#files", pictures[:2])
    browser.wait_for("document.querySelectorAll('.answer').length === 2")
    browser.evaluate("document.body.focus()")
    reached = []
    for _ in range(10):
        browser.press("Tab", 9)
        reached.append(browser.evaluate("document.activeElement.id || document.activeElement.parentElement.id"))
        if reached[-1] == "compare":
            assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            browser.press("Enter", 13, "\r")
    assert reached == [
        "show-card",
        "names",
        "files",
        "folder",
        "compare",
        "doubt",
        "download",
        "clear",
        "leaning",
        "memory",
    ]
    assert browser.evaluate("document.getElementById('compare').getAttribute('aria-pressed')") == "true"


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_all_without_scrolling_sideways(browser, address, pictures, dark):
    browser.screen(390, 844, dark=dark, phone=True)
    browser.open(address)
    browser.wait_for("document.getElementById('names').value")
    browser.give_files("#files", [pictures[0], pictures[-1]])
    browser.wait_for("document.querySelectorAll('.answer').length === 2")
    browser.evaluate("document.getElementById('compare').click()")
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(19, 22, 26)" if dark else "rgb(255, 255, 255)")


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_doubt_measured_figures_previews_csv_card_and_reports(browser, fed_mp, tmp_path, width, dark):
    scan, folder = io.BytesIO(), tmp_path / "reports"
    picture(40).save(scan, "TIFF")
    shown = tmp_path / "=scan.tif"
    shown.write_bytes(scan.getvalue())
    offered = Offered(unsure=0.6, example=("example.png", png(7)), reports=ReportBox(folder))
    browser.screen(width, 900, dark=dark, phone=width < 500)
    with serving(make_app(fed_mp, offered=offered)) as url:
        browser.open(url)
        browser.wait_for("!document.getElementById('measured').hidden")
        told = browser.evaluate("document.querySelector('header').innerText")
        assert f"{fed_mp.result.accuracy:.1f} % right (95 % interval" in told
        assert "Answers below 60% are marked as unsure" in told
        browser.evaluate("document.getElementById('example').click()")
        browser.wait_for("document.querySelectorAll('.answer').length === 1")
        browser.give_files("#files", [shown])
        browser.wait_for("document.querySelectorAll('.answer').length === 2")
        # the browser does not show a TIFF file, and gets a small copy
        browser.wait_for("[...document.querySelectorAll('.answer img')].every((each) => each.naturalWidth === 32)")
        found = {card["image"]: card for card in cards(browser)}
        rows = fed_mp.encode([fed_mp.read(png(7)), fed_mp.read(scan.getvalue())])
        user = fed_mp.user(unsure=0.6)
        replies = dict(zip(("example.png", shown.name), [user.ask([row], 5)[0] for row in rows], strict=True))
        confusion = fed_mp.result.confusion
        for name, reply in replies.items():
            assert ("unsure: below 60%" in found[name]["said"]) == reply.unsure == (reply.ranked[0][1] < 0.6)
            number = fed_mp.class_names.index(reply.ranked[0][0])
            hits, named = confusion[number][number], sum(row[number] for row in confusion)
            measured = (
                f"{hits} of {sum(confusion[number])} test images recognised; right in {hits} of {named} such answers"
            )
            assert f"{reply.ranked[0][0]}: {measured}" in found[name]["said"]

        browser.evaluate("document.getElementById('doubt').click()")
        ordered = sorted(replies, key=lambda name: -replies[name].entropy)
        assert [card["image"] for card in cards(browser)] == ordered
        browser.evaluate("document.getElementById('doubt').click()")
        assert [card["image"] for card in cards(browser)] == ["example.png", shown.name]

        browser.command("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        browser.evaluate("document.getElementById('download').click()")
        saved = tmp_path / "predictions.csv"
        assert until(saved.exists)
        for row, reply in zip(csv.DictReader(saved.read_text("utf-8-sig").splitlines()), replies.values(), strict=True):
            assert (row["name"], row["name_2"]) == (reply.ranked[0][0], reply.ranked[1][0])
            assert row["answer"] == ("unsure" if reply.unsure else row["name"])
            assert float(row["score_2"]) == pytest.approx(reply.ranked[1][1], abs=1e-4)
            assert float(row["entropy"]) == pytest.approx(reply.entropy, abs=1e-3)
        assert row["image"] == "'=scan.tif"  # no formula of a spreadsheet

        browser.evaluate("document.getElementById('show-card').focus()")
        browser.press("Enter", 13, "\r")
        browser.wait_for("document.getElementById('card').open")
        assert browser.evaluate("document.getElementById('card-text').textContent").startswith("# Model card of fed-mp")
        browser.press("Escape", 27)
        browser.wait_for("!document.getElementById('card').open")

        browser.evaluate("document.querySelectorAll('.wrong summary')[1].click()")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        browser.evaluate("document.querySelectorAll('.wrong input[name=truth]')[1].focus()")
        browser.type("=frog")
        browser.press("Enter", 13, "\r")
        browser.wait_for("document.querySelectorAll('.sent')[1].textContent === 'Sent. Thank you.'")
        (told,) = csv.DictReader((folder / "reported.csv").read_text("utf-8").splitlines())
        assert (told["image"], told["truth"], told["picture"]) == ("'=scan.tif", "'=frog", "")
        assert sorted(path.name for path in folder.iterdir()) == ["reported.csv"]


def test_a_token_comes_with_the_address_or_is_asked_for(browser, fed_mp, pictures):
    with serving(make_app(fed_mp, token="a secret of many letters")) as url:
        browser.open(f"{url}/#token=a%20secret%20of%20many%20letters")
        browser.wait_for("document.getElementById('about').textContent.includes('fed-mp')")
        browser.open("about:blank")
        browser.open(url)
        browser.wait_for("!document.getElementById('ask-token').hidden")
        browser.evaluate("document.getElementById('token').focus()")
        browser.type("a secret of many letters")
        browser.press("Enter", 13, "\r")
        browser.wait_for("document.getElementById('about').textContent.includes('fed-mp')")
        browser.give_files("#files", pictures[:1])
        browser.wait_for("document.querySelectorAll('.answer').length === 1")
        refused = [error for error in browser.errors if "401" in error]
        assert browser.errors == refused
        browser.errors.clear()
