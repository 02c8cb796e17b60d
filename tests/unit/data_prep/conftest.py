"""Rows in the schema of OpenR1-Math-220k, and a tokenizer with R1's special tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.r1_tokenizer import write_tokenizer

# `dms-data` that stops itself where it is about to commit for the second time.
STOPS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it was ignored before
from dms_train.data_prep.prepare import main

commits = []

def stop(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("state.json"):
        commits.append(arguments)
        if len(commits) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)

sys.addaudithook(stop)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="session")
def r1(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer directory whose template drops the reasoning."""
    folder = tmp_path_factory.mktemp("r1")
    write_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the real inputs; skips where it is absent."""
    default = Path(__file__).parents[4] / "shared" / "data"
    folder = Path(os.environ.get("DMS_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip("set DMS_TEST_DATA to the folder with the real input files")
    return folder


def trace(answer: str, thought: str = "Let me see.") -> str:
    """A trace of R1."""
    return f"<think>\n{thought}\n</think>\n\nThe answer is $\\boxed{{{answer}}}$"


def row(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A row whose first trace is right and whose second is wrong."""
    values = {
        "problem": f"What is {number} + 1?",
        "answer": str(number + 1),
        "uuid": f"row-{number}",
        "generations": [trace(str(number + 1)), trace(str(number + 2))],
        "correctness_math_verify": [True, False],
        "is_reasoning_complete": [True, True],
    }
    return {**values, **changes}


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """A function that writes rows as JSON lines and returns the path."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write
