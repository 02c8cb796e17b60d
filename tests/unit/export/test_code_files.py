"""The code of an export: files copied as they are, which import only each other and public modules.

A change of these files changes every export that is written from then on. The digests below make
such a change deliberate.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import pytest

import dms_train.export
from dms_train.export.code_files import shipped_code, transformers_keys
from dms_train.families import FAMILIES

ALLOWED = {
    "__future__",
    "dataclasses",
    "hashlib",
    "importlib",
    "inspect",
    "json",
    "safetensors",
    "torch",
    "transformers",
    "typing",
}
DIGESTS = {
    "adapter_dms.py": "6a7c7dcfa82b9b39",
    "configuration_dmc.py": "278416c7d34484c6",
    "configuration_dms.py": "769557c4f01dd918",
    "configuration_llama_dmc.py": "efc398054bf24854",
    "configuration_llama_dms.py": "9a593148075f6528",
    "generation_dms.py": "0e8c0d1107f95067",
    "modeling_dmc.py": "8f98ae9fecbe4ed1",
    "modeling_dms.py": "c9201831b4e91ef3",
    "modeling_llama_dmc.py": "35f8867b1790fa60",
    "modeling_llama_dms.py": "5f028f82cf0840af",
    "pages_dms.py": "6ecfdfc934f3df86",
    "pool_dms.py": "690718436cb3fbbf",
}
SHIPPED = Path(dms_train.export.__file__).parent / "shipped"


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def imports(text):
    """(level, module) of every import."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""
        elif isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)


def test_every_shipped_file_is_the_recorded_one():
    found = {
        name: digest(text)
        for method in ("dmc", "dms")
        for name, text in shipped_code("llama", method).items()
    }
    assert found == DIGESTS


def test_the_folder_holds_what_is_shipped_and_exports_hold_it_unchanged():
    shipped = {file.name: file.read_text() for file in SHIPPED.glob("*.py")}
    assert shipped.pop("__init__.py") == ""
    for family in FAMILIES:
        code = shipped_code(family, "dms") | shipped_code(family, "dmc")
        assert {name: code[name] for name in shipped} == shipped
        own = {f"{kind}_{family}_{m}.py" for kind in ("configuration", "modeling") for m in METHODS}
        assert set(code) - set(shipped) == own


METHODS = ("dms", "dmc")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_import_is_shipped_or_public(family, method):
    files = shipped_code(family, method)
    for name, text in files.items():
        for level, module in imports(text):
            if level:
                assert f"{module}.py" in files, f"{name} imports .{module}"
            else:
                assert module.partition(".")[0] in ALLOWED, f"{name} imports {module}"


@pytest.mark.parametrize("method", METHODS)
def test_the_modelling_file_names_every_shipped_file(method):
    """transformers 4 copies only what the modelling file itself imports."""
    files = shipped_code("llama", method)
    modeling = f"modeling_llama_{method}.py"
    named = {f"{module}.py" for level, module in imports(files[modeling]) if level}
    assert named == set(files) - {modeling}


@pytest.mark.parametrize("family", FAMILIES)
def test_config_json_names_classes_that_the_files_define(family):
    classes, configuration = FAMILIES[family].classes, FAMILIES[family].config_class
    assert transformers_keys(family, "dms") == {
        "architectures": [f"{classes}ForCausalLMDMS"],
        "use_cache": True,
        "auto_map": {
            "AutoConfig": f"configuration_{family}_dms.{configuration}DMS",
            "AutoModelForCausalLM": f"modeling_{family}_dms.{classes}ForCausalLMDMS",
        },
    }
    for method in METHODS:
        keys, files = transformers_keys(family, method), shipped_code(family, method)
        for reference in keys["auto_map"].values():
            module, _, name = reference.partition(".")
            defined = [n.name for n in ast.parse(files[f"{module}.py"]).body if hasattr(n, "name")]
            assert name in defined


def test_a_method_without_code_for_transformers_ships_none():
    assert shipped_code("llama", "other") == {}
