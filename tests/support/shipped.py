"""The code of an export, imported from a folder outside the package, as transformers does."""

from __future__ import annotations

import importlib
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

from dms_train.export.code_files import shipped_code


@cache
def shipped_module(name: str, family: str = "llama", method: str = "dms") -> ModuleType:
    """Import one module of a family's export, such as `modeling_llama_dms`."""
    return importlib.import_module(f"{_package(family, method)}.{name}")


@cache
def _package(family: str, method: str) -> str:
    folder = Path(tempfile.mkdtemp(prefix="shipped"))
    package = f"shipped_{family}_{method}"
    (folder / package).mkdir()
    for name, text in shipped_code(family, method).items():
        (folder / package / name).write_text(text, encoding="utf-8")
    sys.path.append(str(folder))
    return package
