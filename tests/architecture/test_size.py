"""Functions stay small enough to be read in one go."""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

from tests.support.definitions import definitions

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    file
    for package in ("dms_train", "benchmarks", "research")
    for file in (ROOT / package).rglob("*.py")
)
FUNCTION_CAP, FUNCTION_P95, FUNCTION_MEDIAN = 60, 45, 12
KERNEL_CAP = 120  # the body of a Triton kernel is one function


def functions(file: Path) -> list[tuple[str, int]]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [
        (f"{file.relative_to(ROOT)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1)
        for node in definitions(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_functions():
    found = {file: functions(file) for file in FILES}
    sizes = [size for each in found.values() for _, size in each]
    too_long = [
        name
        for file, each in found.items()
        for name, size in each
        if size > (KERNEL_CAP if file.name.startswith("triton_") else FUNCTION_CAP)
    ]
    assert too_long == []
    assert statistics.median(sizes) <= FUNCTION_MEDIAN
    assert statistics.quantiles(sizes, n=20)[-1] <= FUNCTION_P95


def test_names_of_modules_are_specific():
    vague = {"utils", "util", "helpers", "misc", "common", "new", "v2"}
    assert [f for f in FILES if vague & set(f.stem.split("_"))] == []


def test_no_module_shadows_the_standard_library():
    allowed = {"types"}  # imported by its full name only
    assert [f for f in FILES if f.stem in sys.stdlib_module_names - allowed] == []
