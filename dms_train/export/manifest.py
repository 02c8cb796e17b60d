"""The Python files of an export: its modelling code, and the compact cache that this code runs on.

The cache modules are imported, so that import-linter sees what an export depends on. They need
torch only. In an export all files lie side by side, and their imports name each other.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from dms_train.export.family_classes import class_lines
from dms_train.families import FAMILIES
from dms_train.hf.formats import ExportFormat
from dms_train.hf.typed import typed
from dms_train.inference.cache import (
    allocator,
    base,
    compact,
    policy_hooks,
    policy_state,
    pool,
    pool_attention,
)
from dms_train.inference.policies import base as policy
from dms_train.inference.policies import dms, rotation
from dms_train.kernels.decode import slots

# Module: its name beside the modelling code.
CACHE_MODULES: dict[ModuleType, str] = {
    allocator: "allocator_dms",
    base: "cache_dms",
    compact: "compact_dms",
    policy_hooks: "hooks_dms",
    policy_state: "state_dms",
    pool: "pool_dms",
    pool_attention: "attention_dms",
    policy: "policy_dms",
    dms: "eviction_dms",
    rotation: "rotation_dms",
    slots: "slots_dms",
}
_MODELING = Path(__file__).parent / "code"


@typed
def shipped_code(family: str, layout: ExportFormat) -> dict[str, str]:
    """The files of a family's export, by name, with imports rewritten to siblings.

    Args:
        family: Model family; it names the modelling files.
        layout: The export's format.

    Returns:
        File name to source text.
    """
    files = {
        name: _modeling(original, family) for name, original in layout.code_files(family).items()
    }
    if layout.ships_cache:
        files |= {f"{name}.py": _source(module) for module, name in CACHE_MODULES.items()}
    return {name: _beside(text, family) for name, text in files.items()}


def _modeling(file: str, family: str) -> str:
    return (_MODELING / file).read_text(encoding="utf-8") + class_lines(file, FAMILIES[family])


def _source(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).read_text(encoding="utf-8")


def _beside(text: str, family: str) -> str:
    for stem in ("configuration_dms", "configuration_dmc", "generation_dms"):
        kind, _, method = stem.partition("_")
        text = text.replace(f"from .{stem} ", f"from .{kind}_{family}_{method} ")
    for module, name in CACHE_MODULES.items():
        text = text.replace(f"from {module.__name__} import", f"from .{name} import")
    return text
