"""The last lines of an export's code files: the classes of its family."""

from __future__ import annotations

from dms_train.families import ModelFamily

_CONFIGURATION = """

from transformers import {classes}Config  # noqa: E402

{classes}Config{METHOD} = config_with_{method}({classes}Config)
"""
_MODELING = """

from transformers.models.{name}.modeling_{name} import (  # noqa: E402
    {classes}Attention,
    {classes}ForCausalLM,
)

from .configuration_{method} import {classes}Config{METHOD}  # noqa: E402

{classes}Attention{METHOD} = attention_with_{method}({classes}Attention)
{classes}ForCausalLM{METHOD} = model_with_{method}(
    {classes}ForCausalLM, {classes}Config{METHOD}, {classes}Attention{METHOD}
)
"""
_LINES = {"configuration": _CONFIGURATION, "modeling": _MODELING}


def class_lines(file: str, family: ModelFamily) -> str:
    """What an export of this family adds to a file of `export/code`; nothing to most."""
    stem, _, method = file.removesuffix(".py").rpartition("_")
    lines, names = _LINES.get(stem, ""), {"name": family.name, "classes": family.classes}
    return lines.format(**names, method=method, METHOD=method.upper())
