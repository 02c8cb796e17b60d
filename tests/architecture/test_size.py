"""Functions and files stay small enough to be read in one go."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    file
    for package in ("dms_train", "checkpoints_tools", "data_prep", "launch", "benchmarks")
    for file in (ROOT / package).rglob("*.py")
)
FILE_CAP, FUNCTION_CAP, FUNCTION_P95, FUNCTION_MEDIAN = 350, 60, 45, 12
FILE_CAP_OF = {"kernels": 500}
FUNCTION_CAP_OF = {"kernels": 120}  # the body of a Triton kernel is one function


def functions(file: Path) -> list[tuple[str, int]]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [
        (f"{file.relative_to(ROOT)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_files(file):
    lines = len(file.read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_CAP_OF.get(file.parent.name, FILE_CAP)


def test_functions():
    sizes = [size for file in FILES for _, size in functions(file)]
    too_long = [
        name
        for file in FILES
        for name, size in functions(file)
        if size > FUNCTION_CAP_OF.get(file.parent.name, FUNCTION_CAP)
    ]
    assert too_long == []
    assert statistics.median(sizes) <= FUNCTION_MEDIAN
    assert statistics.quantiles(sizes, n=20)[-1] <= FUNCTION_P95


def test_names_say_what_is_inside():
    vague = {"utils", "util", "helpers", "misc", "common", "new", "v2"}
    assert [f for f in FILES if vague & set(f.stem.split("_"))] == []
