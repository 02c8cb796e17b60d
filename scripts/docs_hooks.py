"""Hooks of mkdocs: fill in the help of the commands, and refuse loads from other hosts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_HELP = Path(__file__).with_name("cli_help.py")
_MARK = "<!-- help of all commands -->"
# Attributes that make a browser load what they name. `href` does so for <link> only.
_LOADING = {"src", "srcset", "data", "poster"}


class _Loads(HTMLParser):
    """Collects the addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        wanted = _LOADING | ({"href"} if tag == "link" else set())
        self.found += [value for name, value in attrs if name in wanted and value]


def outside_loads(page: str) -> list[str]:
    """Addresses on other hosts that the HTML text of a page loads."""
    parser = _Loads()
    parser.feed(page)
    return [address for address in parser.found if address.startswith(("http:", "https:", "//"))]


def _outside(site: Path) -> Iterator[str]:
    for page in sorted(site.rglob("*.html")):
        for address in outside_loads(page.read_text(encoding="utf-8")):
            yield f"{page.relative_to(site)} loads {address}"
    for sheet in sorted(site.rglob("*.css")):
        text = sheet.read_text(encoding="utf-8")
        if "url(http" in text or "url(//" in text or "@import" in text:
            yield f"{sheet.relative_to(site)} loads a file of another host"


@cache
def _commands() -> str:
    done = subprocess.run([sys.executable, str(_HELP)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PluginError(f"{_HELP.name}: {done.stderr.strip()[-500:]}")
    return done.stdout


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page, before it is rendered."""
    return markdown.replace(_MARK, _commands()) if _MARK in markdown else markdown


def on_post_build(config: Any) -> None:
    """Called by mkdocs when the site is complete."""
    problems = list(_outside(Path(config["site_dir"])))
    if problems:
        raise PluginError("; ".join(problems))
