"""The page of a client in a real browser: join, pin, dry run, approve and refuse, with the keyboard alone; other origins."""

import http.server
import os
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.browser import PATIENCE, Browser
from helpers.sites import join_all, make_site

from fedvl.deployment.policy import approved
from fedvl.deployment.site import site_server
from fedvl.deployment.state import log_of
from fedvl.report.loopback import served

TOKEN = "t" * 22
TEXT = "document.body.innerText"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return join_all(tmp_path_factory.mktemp("clinic") / "clinic")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def site(shared, tmp_path):
    return make_site(shared, tmp_path)


@pytest.fixture
def address(browser, site):
    with served(site_server(site, 0, TOKEN)) as server:
        yield f"http://127.0.0.1:{server.server_port}/#token={TOKEN}"
        browser.open("about:blank")


def press(browser, text):
    """Go to a button with the Tab key, and press it with Enter."""
    focused = "document.activeElement === document.body ? '' : document.activeElement.textContent"
    for _ in range(60):
        browser.press("Tab", 9)
        if text in (browser.evaluate(focused) or ""):
            browser.press("Enter", 13, "\r")
            return
    raise AssertionError(f"The Tab key does not reach {text}.")


def pinned(site, shared):
    site.act("/roster", {"content": (shared / "roster.json").read_text()})
    site.act("/pin", {"fingerprint": site.state().participants.fingerprint})


def test_a_person_joins_with_the_keyboard(browser, shared, tmp_path):
    site = make_site(shared, tmp_path, joined=False)
    with served(site_server(site, 0, TOKEN)) as server:
        browser.screen(1400, 900)
        browser.open(f"http://127.0.0.1:{server.server_port}/#token={TOKEN}")
        browser.wait_for(f"{TEXT}.includes('Make the key and the request')")
        press(browser, "Make the key and the request")
        browser.wait_for(f'{TEXT}.includes("this client\'s key")')
        assert site.state().joined
        assert site.state().key in browser.evaluate(TEXT)
        browser.open("about:blank")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1400])
def test_dry_run_approval_and_refusal(browser, site, shared, address, width, dark):
    pinned(site, shared)
    errors = len(browser.errors)
    browser.screen(width, 900, dark=dark, phone=width == 390)
    browser.open(address)
    browser.wait_for(f"{TEXT}.includes('not decided')")
    asked = site.state().experiments[0]
    for told in (asked.roster, asked.identity, "sums over clients only", "known after the dry run"):
        assert told in browser.evaluate(TEXT)
    if not dark:
        press(browser, "Dry run")
        browser.wait_for("document.getElementById('work').textContent !== ''")
        site.do(*site.jobs.get())
        browser.wait_for(f"{TEXT}.includes('attacks show a leak')")
        assert "10,280 bytes in 2 tensors" in browser.evaluate(TEXT)
    press(browser, "Approve")
    browser.wait_for(f"{TEXT}.includes('approved')")
    assert (asked.identity, asked.roster) in approved(log_of(site.folder))
    press(browser, "Refuse")
    browser.wait_for("!document.getElementById('notice').hidden")
    browser.type("<b>Not before the vote</b>")
    press(browser, "Refuse")
    browser.wait_for(f"{TEXT}.includes('refused: <b>Not before the vote</b>')")
    assert not approved(log_of(site.folder))
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.errors[errors:] == []
    if shots := os.environ.get("FEDVL_SCREENSHOTS"):
        browser.screenshot(Path(shots) / f"site-{width}-{'dark' if dark else 'light'}.png", whole=True)


@pytest.mark.parametrize("width", [390, 1400])
def test_key_renewal_image_check_survey_and_stop(browser, site, shared, address, width, tmp_path):
    """With the keyboard alone; work is begun by the page and done here."""
    pinned(site, shared)
    asked = site.state().experiments[0]
    site.act("/approve", {"identity": asked.identity, "roster": asked.roster})
    site.data = str(images(tmp_path))
    browser.screen(width, 900, phone=width == 390)
    browser.open(address)
    browser.wait_for(f"{TEXT}.includes('approved')")
    press(browser, "Check the images")
    browser.wait_for(f"{TEXT}.includes('Now: ') || document.querySelectorAll('#faults .card').length")
    site.do(*site.jobs.get())
    browser.wait_for("document.querySelectorAll('#faults .card').length > 0")
    assert "torn.png" in browser.evaluate(TEXT)
    press(browser, "Answer a survey")
    work, _ = site.jobs.get()
    assert work == "answering a survey"
    site.connected = SimpleNamespace(stopping=False)
    browser.wait_for("![...document.querySelectorAll('button')].find((each) => each.textContent === 'Stop').disabled")
    press(browser, "Stop")
    wait_for(lambda: site.connected.stopping)
    site.connected, key = None, site.state().key
    press(browser, "Make another key, if")
    press(browser, "Make another key")
    browser.wait_for("document.getElementById('notice').textContent.includes('Say first')")
    browser.press("Tab", 9)
    browser.evaluate("document.getElementById('renewal').focus()")
    browser.press(" ", 32, " ")
    press(browser, "Make another key")
    wait_for(lambda: site.state().key != key)
    browser.wait_for(f"{TEXT}.includes({site.state().key!r})")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def images(folder):
    """Three images of one colour, and one that is torn."""
    for number in range(3):
        (folder / "images" / "cat").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (9 * number, 80, 70)).save(folder / "images" / "cat" / f"{number}.png")
    (folder / "images" / "cat" / "torn.png").write_bytes(b"not a picture")
    return folder / "images"


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_page_of_another_origin_cannot_act(browser, site, shared, address):
    """It can neither read the state nor send a form or a script's request, even if it knew the token."""
    pinned(site, shared)
    asked = site.state().experiments[0]
    target = address.partition("#")[0]
    body = f'{{"identity": "{asked.identity}", "roster": "{asked.roster}"}}'

    class Evil(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<p>evil</p>")

        def log_message(self, *ignored):
            pass

    with served(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil)) as evil:
        browser.open(f"http://127.0.0.1:{evil.server_port}/")
        browser.evaluate(
            f"""window.done = 0;
            const end = () => window.done += 1, body = {body!r};
            const json = {{ "content-type": "application/json", authorization: "Bearer {TOKEN}" }};
            const ask = (path, options) => fetch("{target}" + path, options).catch(() => 0).finally(end);
            ask("state", {{ headers: json }}).then((answer) => answer.text()).then((text) => window.read = text);
            ask("approve", {{ method: "POST", mode: "no-cors", headers: {{ "content-type": "text/plain" }}, body }});
            ask("approve", {{ method: "POST", headers: json, body }});
            true"""
        )
        browser.wait_for("window.done === 3")
        assert browser.evaluate("window.read === undefined")
    assert not approved(log_of(site.folder))
    browser.errors.clear()


def test_without_the_token_the_page_shows_nothing(browser, address):
    browser.screen(1400, 900)
    browser.open("about:blank")
    browser.open(address.partition("#")[0])
    browser.wait_for("!document.getElementById('notice').hidden")
    text = browser.evaluate(TEXT)
    assert "its end is the token" in text
    assert "fed.example.org" not in text
    browser.errors.clear()
