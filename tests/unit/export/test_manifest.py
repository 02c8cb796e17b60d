"""The Python files of an export import only shipped or public modules."""

from __future__ import annotations

import ast

import pytest

from dms_train.export.manifest import shipped_code
from dms_train.families import FAMILIES
from dms_train.hf.formats import FORMATS

ALLOWED = {
    "__future__",
    "collections",
    "dataclasses",
    "heapq",
    "importlib",
    "inspect",
    "itertools",
    "torch",
    "transformers",
    "typing",
}


def imports(text):
    """(level, module) of every import."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""
        elif isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_import_is_shipped_or_public(family):
    files = shipped_code(family, FORMATS["dms"])
    for name, text in files.items():
        for level, module in imports(text):
            if level:
                assert f"{module}.py" in files, f"{name} imports .{module}"
            else:
                assert module.partition(".")[0] in ALLOWED, f"{name} imports {module}"


def test_the_modelling_file_names_every_shipped_file():
    """transformers 4 copies only what the modelling file itself imports."""
    files = shipped_code("llama", FORMATS["dms"])
    named = {f"{module}.py" for level, module in imports(files["modeling_llama_dms.py"]) if level}
    assert named == set(files) - {"modeling_llama_dms.py"}
