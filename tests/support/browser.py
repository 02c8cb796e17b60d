"""Chromium without a window, driven through chromedriver's HTTP interface."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.served_model import wait_for

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element in WebDriver's answers
_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


class Browser:
    """One tab."""

    def __init__(self, driver: str, size: tuple[int, int]) -> None:
        arguments = [*_ARGUMENTS, f"--window-size={size[0]},{size[1]}"]
        options = {"args": arguments}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        self._session = ""
        self._driver = driver
        made = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def open(self, url: str) -> None:
        self._post("/url", {"url": url})

    def type(self, selector: str, text: str) -> None:
        self._post(f"/element/{self._find(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        self._post(f"/element/{self._find(selector)}/click", {})

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self._post("/execute/sync", {"script": f"return {script}", "args": []})

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def console_messages(self) -> list[str]:
        """Warnings and errors of the console."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def screenshot(self, file: Path) -> None:
        with urllib.request.urlopen(f"{self._driver}{self._session}/screenshot") as answer:
            file.write_bytes(base64.b64decode(json.load(answer)["value"]))

    def close(self) -> None:
        request = urllib.request.Request(self._driver + self._session, method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()

    def _find(self, selector: str) -> str:
        found = self._post("/element", {"using": "css selector", "value": selector})
        return found[_ELEMENT]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._driver + self._session + path, data)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]


@contextlib.contextmanager
def opened(size: tuple[int, int] = (1280, 800)) -> Iterator[Browser]:
    """A browser; the test is skipped where there is none."""
    program = shutil.which("chromedriver")
    if program is None or shutil.which("chromium") is None:
        pytest.skip("no chromium: apt-get install chromium chromium-driver")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen([program, f"--port={port}"], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: _listens(port))
        browser = Browser(f"http://127.0.0.1:{port}", size)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True
