"""Python files of an export.

The modules of `export/shipped` that end in the name of the method are copied as they are. They
import each other, torch and transformers, and nothing of this package. Two short added files define
the classes of the model family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dms_train.families import FAMILIES
from dms_train.hf.typed import typed

_SHIPPED = Path(__file__).parent / "shipped"
_CONFIGURATION = '''"""Configuration of {classes} models with {METHOD}, for transformers."""

from transformers import {config_class}

from .configuration_{method} import {METHOD}Config


class {config_class}{METHOD}({METHOD}Config, {config_class}):
    """{config_class} with {METHOD}."""

    model_type = "{method}_{family}"
'''
_MODELING = '''"""{classes} models with {METHOD}, for transformers."""

from {modeling} import {classes}Attention, {classes}ForCausalLM, apply_rotary_pos_emb

# transformers 4 copies only the files that this one imports, not those that they import.
{imports}
from .configuration_{family}_{method} import {config_class}{METHOD}
{expert_files}

class {classes}Attention{METHOD}({METHOD}Attention, {classes}Attention):
    """{classes}Attention with {METHOD}."""

    rotate = staticmethod(apply_rotary_pos_emb)


class {classes}ForCausalLM{METHOD}({METHOD}ForCausalLM, {classes}ForCausalLM):
    """{classes}ForCausalLM with {METHOD}."""

    config_class = {config_class}{METHOD}
    attention_class = {classes}Attention{METHOD}
'''
# transformers 5 keeps the experts of a layer in one tensor, and files have a tensor for each. It
# looks the conversion up by model type.
_EXPERT_FILES = """
try:
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
except ImportError:  # transformers 4 has a module for each expert
    pass
else:
    _CONVERSION = get_checkpoint_conversion_mapping("{family}")
    register_checkpoint_conversion_mapping("{method}_{family}", _CONVERSION, overwrite=True)

"""


@typed
def shipped_code(family: str, method: str) -> dict[str, str]:
    """Return the code files of a family's export: file name to source text.

    Args:
        family: Model family.
        method: Name of the method. A method without code for transformers has no files.
    """
    copied = {
        file.name: file.read_text("utf-8") for file in sorted(_SHIPPED.glob(f"*_{method}.py"))
    }
    if not copied:
        return {}
    converts = FAMILIES[family].has_experts and not FAMILIES[family].stacked_experts
    names = {
        "family": family,
        "classes": FAMILIES[family].classes,
        "config_class": FAMILIES[family].config_class,
        "modeling": FAMILIES[family].modeling,
        "method": method,
        "METHOD": method.upper(),
        "expert_files": _EXPERT_FILES.format(family=family, method=method) if converts else "",
        "imports": "\n".join(f"from .{Path(name).stem} import *  # noqa: F403" for name in copied),
    }
    return {
        **copied,
        f"configuration_{family}_{method}.py": _CONFIGURATION.format(**names),
        f"modeling_{family}_{method}.py": _MODELING.format(**names),
    }


@typed
def transformers_keys(family: str, method: str) -> dict[str, Any]:
    """Return the keys of config.json with which transformers finds `shipped_code`."""
    described, name = FAMILIES[family], method.upper()
    configuration, model = f"{described.config_class}{name}", f"{described.causal_lm}{name}"
    return {
        "architectures": [model],
        "use_cache": True,
        "auto_map": {
            "AutoConfig": f"configuration_{family}_{method}.{configuration}",
            "AutoModelForCausalLM": f"modeling_{family}_{method}.{model}",
        },
    }
