"""Writes docs/errors.md from what the cases answer: python -m tests.e2e.bad_inputs.errors_page."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path

from tests.e2e.bad_inputs import (
    test_cluster,
    test_configuration,
    test_data,
    test_model,
    test_run,
    test_server,
    test_tools,
)
from tests.e2e.bad_inputs.cases import Case, answer, message_of
from tests.support import refusals

DOCS = Path(__file__).resolve().parents[3] / "docs" / "errors.md"
GROUPS = {
    "Configuration": test_configuration.CASES,
    "Model": test_model.CASES,
    "Data": test_data.CASES,
    "Run": test_run.CASES,
    "Tools": test_tools.CASES,
    "Server": test_server.CASES,
    "Cluster": test_cluster.CASES,
}
_VARYING = (
    (re.compile(r"(?<![0-9a-zA-Z])[0-9a-f]{12}(?![0-9a-zA-Z])"), "HASH"),
    (re.compile(r"\d+ bytes"), "N bytes"),
    (re.compile(r"(states|says|instead of) \d+"), r"\1 N"),
    (re.compile(r"step \d+:"), "step N:"),
    (re.compile(r"127\.0\.0\.1 port \d+:"), "127.0.0.1 port N:"),
    (re.compile(r"KL \S+ nats"), "KL N nats"),
    (re.compile(r"\d+\.\d [GM]iB"), "N GiB"),
    (re.compile(r"80 GB: .* \(\S+ s a step\)"), "80 GB: OVERRIDES (N s a step)"),
    (re.compile(r"line \d+ column \d+ \(char \d+\)"), "line N"),
)


def row(case: Case, message: str, code: int) -> str:
    """A line of the table in the documentation; numbers that vary are left out."""
    for pattern, name in _VARYING:
        message = pattern.sub(name, message)
    return f"| {case.done} | `{message}` | {code} |".replace("\n", " ")


_INTRODUCTION = """\
# What bad input is answered with

Every command refuses bad input with one line on stderr for each problem: what is wrong, where, and
how to fix it. The exit code is 2, nothing that existed is changed, and nothing half-written stays
behind. Refusals come before a process group is started wherever they can be known by then. A
traceback is a bug in the program.

Under torchrun the exit code is torchrun's own, 1, and its report follows the line.

In the messages `MODEL`, `DATA`, `RUN`, `OUT` and `FOLDER` stand for paths, `N` and `HASH` for
values that differ. The tables are what `tests/e2e/bad_inputs` saw, written by
`python -m tests.e2e.bad_inputs.errors_page`.
"""


def write_docs() -> None:
    """Run every case and write the tables."""
    text = [_INTRODUCTION]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "assets"
        made.mkdir()
        assets = refusals.make_assets(made)
        for title, cases in GROUPS.items():
            text += [f"## {title}\n", "| Input | Message | Exit code |", "| --- | --- | --- |"]
            text += [_row_of(name, case, Path(folder), assets) for name, case in cases.items()]
            text.append("")
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text("\n".join(text))


def _row_of(name: str, case: Case, folder: Path, assets: refusals.Assets) -> str:
    (folder / name).mkdir()
    begin = time.monotonic()
    with refusals.open_workspace(folder / name, assets) as workspace:
        found = answer(case, workspace)
    message = message_of(case, found)
    print(f"{time.monotonic() - begin:5.1f} s  {name}: {found.messages} {found.touched}")
    return row(case, message, found.code)


if __name__ == "__main__":
    write_docs()
