"""A real headless Chromium, driven over its DevTools protocol: what tests of pages share.

``with Browser(tmp_path) as browser: browser.open(url); browser.wait_for("document.title"); browser.screenshot(path)``
"""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 30  # seconds until something that is waited for counts as missing


def find_chromium() -> str:
    """Its path; a test that needs it fails where there is none, unless tools/test said that none can be had."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    if os.environ.get("FEDVL_NO_BROWSER"):
        pytest.skip("Chromium could not be installed on this machine")
    raise AssertionError("There is no Chromium here; install it, for example with apt-get install chromium.")


def until(condition: Callable[[], Any]) -> Any:
    """What a condition says once it is true, or at last."""
    end = time.monotonic() + PATIENCE
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return value


class Browser:
    """One tab. ``errors`` collects what its console and scripts complain about, ``requests`` every address asked for."""

    def __init__(self, profile: Path) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._numbers = itertools.count(1)
        self._open = contextlib.ExitStack()
        self._profile = profile / "chromium"
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"]
        place = [f"--user-data-dir={self._profile}", "--remote-debugging-port=0", "about:blank"]
        self._process = subprocess.Popen(
            [find_chromium(), *flags, *quiet, *place], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def __enter__(self) -> "Browser":
        port = self._port()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as response:
            tab = next(target for target in json.load(response) if target["type"] == "page")
        self._socket = self._open.enter_context(connect(tab["webSocketDebuggerUrl"], max_size=None))
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.command(f"{domain}.enable")
        return self

    def __exit__(self, *ignored: object) -> None:
        self._open.close()
        self._process.terminate()
        self._process.wait(PATIENCE)

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(PATIENCE))
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def open(self, url: str) -> None:
        self.command("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        found = self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """The value of an expression once it is true."""
        if value := until(lambda: self.evaluate(script)):
            return value
        raise AssertionError(f"{script} did not come true; the page says: {self.evaluate('document.body.innerText')}")

    def give_files(self, selector: str, paths: list[Path]) -> None:
        """Choose files in an <input type=file>."""
        root = self.command("DOM.getDocument")["root"]["nodeId"]
        node = self.command("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.command("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key: press("Tab", 9), press("Enter", 13, "\\r")."""
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **typed)

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self.command("Input.insertText", text=text)

    def screen(self, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        scale = 2 if phone else 1
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.command("Emulation.setEmulatedMedia", features=scheme)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """What is on the screen, or the ``whole`` page."""
        taken = self.command("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _port(self) -> int:
        file = self._profile / "DevToolsActivePort"
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if file.is_file() and (lines := file.read_text().splitlines()):
                return int(lines[0])
            time.sleep(0.05)
        raise AssertionError("Chromium did not start.")

    def _note(self, message: dict[str, Any]) -> None:
        method, said = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(said["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.errors.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
