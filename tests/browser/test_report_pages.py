"""The pages in a real browser: sorting by mouse and keyboard, hiding a run, nothing wider than a phone."""

import json
import shutil

import pytest
from helpers.browser import Browser, until
from helpers.grids import make_grid

from fedvl.data.assemble import with_corrected_labels
from fedvl.data.sources import open_dataset, read_corrections
from fedvl.display import Silent
from fedvl.report.images_page import write_images_page
from fedvl.report.page import write_report, write_side_by_side
from fedvl.report.status import read_status, render_status
from fedvl.runs.folder import RunFolder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def column(browser, table, number):
    rows = f"[...document.querySelectorAll('{table} tbody tr')].map(row => row.cells[{number}].textContent)"
    return browser.evaluate(rows)


def order_of(browser, table):
    return browser.evaluate(f"[...document.querySelectorAll('{table} th[aria-sort]')].map(head => head.ariaSort)")


def head(table, number):
    return f"document.querySelector('{table} thead tr').cells[{number}].querySelector('button')"


def test_tables_are_sorted_by_mouse_and_keyboard(browser, sample, save, tmp_path):
    result, metrics = sample
    result["zero_shot_per_class_recall"][4] = None
    browser.screen(1280, 900)
    browser.open(write_report(save(tmp_path, result, metrics)).as_uri())
    table = "#all-recalls"
    assert order_of(browser, table) == []
    browser.evaluate(f"{head(table, 0)}.click()")
    assert column(browser, table, 0) == sorted(result["class_names"])
    assert order_of(browser, table) == ["ascending"]
    browser.evaluate(f"{head(table, 0)}.click()")
    assert column(browser, table, 0) == sorted(result["class_names"], reverse=True)
    # Numbers begin with the largest; what is not known comes last in either order.
    browser.evaluate(f"{head(table, 2)}.focus()")
    for direction, sign in (("descending", -1), ("ascending", 1)):
        browser.press("Enter", 13, "\r")
        known = column(browser, table, 2)
        assert known[-1] == "—"
        assert [float(text) for text in known[:-1]] == sorted(
            (float(text) for text in known[:-1]), key=lambda x: sign * x
        )
        assert order_of(browser, table) == [direction]
    # Bytes are sorted by what they are, not by how they are written.
    browser.evaluate(f"document.querySelector('details').open = true; {head('#all-rounds', 0)}.click()")
    assert column(browser, "#all-rounds", 0) == [str(index) for index in range(10, 0, -1)]
    assert browser.errors == []


def test_a_run_is_hidden_everywhere_and_shown_again(browser, sample_of, save, tmp_path):
    folders = [save(tmp_path / name, *sample_of(seed=seed)) for seed, name in enumerate(("one", "two"))]
    browser.open(write_side_by_side(folders, tmp_path / "compare.html").as_uri())
    # A hidden group of a drawing still calls itself visible, so its style is asked too.
    visible = "part.checkVisibility() && getComputedStyle(part).display !== 'none'"
    seen = f"[...document.querySelectorAll('.row-1')].filter(part => {visible}).length"
    others = seen.replace("row-1", "row-0")
    both, kept = browser.evaluate(seen), browser.evaluate(others)
    assert both == kept + 1  # the second is compared with the first
    assert kept > 10
    browser.evaluate("document.querySelector('#show-1').focus()")
    browser.press(" ", 32, " ")
    assert (browser.evaluate(seen), browser.evaluate(others)) == (0, kept)
    assert browser.evaluate("document.querySelector('#show-1').checkVisibility()")
    browser.press(" ", 32, " ")
    assert browser.evaluate(seen) == both
    assert browser.errors == []


def federated(sample_of, save, folder):
    """The server's page of a federation of parties with long names."""
    result, rounds = sample_of(clients=3)
    parties = [{"name": f"hospital-of-the-town-{name}", "bytes_up": 1, "bytes_down": 1} for name in "abc"]
    answers = [{"round": 1, "client": client, "time": "2026-01-02T03:04:05.678+00:00"} for client in range(3)]
    return write_report(save(folder, {**result, "parties": parties, "answers": answers}, rounds))


def followed(save, folder):
    """The status of a run of such parties, as a file."""
    save(folder, {"method": "linear"}, [{"round": 1, "accuracy": 50.0}, {"round": 2, "accuracy": 60.0}])
    (folder / "config.toml").touch()
    names = [f"hospital-of-the-town-{name}" for name in "abc"]
    (folder / "status.json").write_text(json.dumps({"parties": names}))
    (folder / "status.html").write_text(render_status(read_status(folder)), encoding="utf-8")
    return folder / "status.html"


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_the_screen_and_nothing_is_fetched(browser, sample_of, save, tmp_path, width):
    browser.screen(width, 800, phone=width == 390)
    folders = [save(tmp_path / name, *sample_of(classes=45, clients=60, seed=seed)) for seed, name in enumerate("ab")]
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / "comparison.json").write_text(
        json.dumps(make_grid("radar", columns=["a very long column name"] * 3))
    )
    pages = [
        write_report(folders[0]),
        federated(sample_of, save, tmp_path / "federated"),
        followed(save, tmp_path / "followed"),
        write_side_by_side(folders, tmp_path / "c.html"),
        write_report(tmp_path / "grid"),
    ]
    for page in pages:
        before = len(browser.requests)
        browser.open(page.as_uri())
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, page
        assert browser.requests[before:] == [page.as_uri()]
        # the tables of parties need no scrolling either
        tables = "[...document.querySelectorAll('#parties .scroll')]"
        assert browser.evaluate(f"{tables}.every(part => part.scrollWidth <= part.clientWidth)"), page


def test_figures_of_a_wide_table_stand_below_each_other_on_a_phone(browser, tmp_path):
    """Each with its heading, its interval on a line of its own, and nothing to be scrolled sideways."""
    grid = make_grid("table")
    cells = [{**cell, "interval": [54.25, 65.75], "images": 500} for cell in grid["cells"]]
    (tmp_path / "comparison.json").write_text(json.dumps({**grid, "cells": cells}))
    page = write_report(tmp_path).as_uri()
    browser.screen(390, 800, phone=True)
    browser.open(page)
    assert browser.evaluate("document.querySelector('#table .scroll').scrollWidth") <= 390
    places = "new Set([...row.querySelectorAll('td')].map(cell => cell.offsetLeft)).size"
    lefts = f"[...document.querySelectorAll('#table tbody tr')].map(row => {places})"
    assert browser.evaluate(lefts) == [1, 1]
    lines = "[...document.querySelectorAll('#table .figure small')].every(part => part.getClientRects().length === 1)"
    assert browser.evaluate(lines)
    heads = "getComputedStyle(document.querySelector('#table td'), '::before').content"
    assert browser.evaluate(heads) == '"pets"'
    browser.screen(1280, 900)
    browser.open(page)
    assert browser.evaluate(lefts) == [3, 3]


def test_the_command_can_be_copied_and_print_unfolds_what_matters(browser, sample, save, tmp_path):
    browser.open(write_report(save(tmp_path, *sample)).as_uri())
    browser.evaluate("document.querySelector('[data-copies]').click()")
    assert browser.wait_for("document.querySelector('[data-copies]').textContent !== 'Copy'")
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert browser.evaluate("[...document.querySelectorAll('details[data-print]')].every(part => part.open)")


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_wrong_images_are_reached_from_the_matrix_and_corrected(browser, folder_of, tmp_path, width, dark):
    """From a cell of the report to its images; the CSV that the page downloads is read as corrected labels."""
    folder = RunFolder(shutil.copytree(folder_of("linear"), tmp_path / "run"))
    write_images_page(folder, Silent())
    confusion, names = folder.result.confusion, folder.result.class_names
    row, column = next((r, c) for r in range(10) for c in range(10) if r != c and confusion[r][c] > 1)
    browser.screen(width, 900, dark=dark, phone=width < 500)
    browser.open((folder.path / "report.html").as_uri())
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    link = f"#confusion a[href='images.html#true={row}&predicted={column}']"
    assert browser.evaluate("document.querySelector('#confusion .scroll').scrollWidth") <= width  # no column is cut off
    browser.evaluate(f'[...document.querySelectorAll("{link}")].find((each) => each.checkVisibility()).focus()')
    browser.press("Enter", 13, "\r")
    browser.wait_for("document.title.startsWith('Test images of linear') && document.readyState === 'complete'")
    shown = "[...document.querySelectorAll('#images li')].filter((each) => each.checkVisibility())"
    assert browser.evaluate(f"{shown}.length") == confusion[row][column]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(f"{shown}.every((each) => each.querySelector('img').alt)")
    browser.command("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    first, second = browser.evaluate(f"{shown}.slice(0, 2).map((each) => each.dataset.file)")
    assert browser.evaluate("document.getElementById('download').disabled")
    browser.evaluate(f"{shown}[0].querySelector('input[list]').focus()")
    browser.type(names[column])
    browser.evaluate(f"{shown}[1].querySelector('[type=checkbox]').click()")
    browser.evaluate("document.getElementById('download').click()")
    saved = tmp_path / "corrected.csv"
    assert until(saved.exists)
    labels = read_corrections(saved)
    assert labels == {first: names[column], second: ""}
    dataset = with_corrected_labels(open_dataset("cifar10-mini", None), labels, saved.name)
    assert dataset.notes[-1] == "1 labels were corrected and 1 images left out by corrected.csv."
    browser.evaluate(
        "const kind = document.querySelector('[name=kind]'); kind.value = 'error'; kind.form.true.value = '';"
        "kind.form.predicted.value = ''; kind.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    assert browser.evaluate(f"{shown}.every((each) => each.dataset.kinds.includes('error'))")
    assert browser.errors == []
