"""Prints `--help` of every command in pyproject.toml as Markdown, for the documentation.

All commands are called in one process, without torch.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUBCOMMANDS = {
    "dms-data": (
        *("tokenize", "check", "openr1", "chat", "generate", "mix", "show", "packing"),
        *("exam-sheets", "exam-problems"),
    ),
    "dms-eval": ("report",),
}


def commands() -> dict[str, str]:
    """Name of each command, and `module:function` that runs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["scripts"]


def help_text(name: str, target: str, *words: str) -> str:
    """Return what the command prints for `WORDS --help`."""
    module, _, function = target.partition(":")
    main = getattr(importlib.import_module(module), function)
    sys.argv = [name, *words, "--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main()
    text = out.getvalue().replace(str(Path.home()), "~").strip()
    if not text:
        raise RuntimeError(f"{name} --help printed nothing")
    return text


def main() -> None:
    """Entry point."""
    os.environ["COLUMNS"] = "96"
    for name, target in commands().items():
        print(f"## {name}\n\n```text\n{help_text(name, target)}\n```\n")
        for word in SUBCOMMANDS.get(name, ()):
            print(f"### {name} {word}\n\n```text\n{help_text(name, target, word)}\n```\n")


if __name__ == "__main__":
    main()
