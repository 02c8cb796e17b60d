"""The last lines of an export's code files: the classes of its family."""

from __future__ import annotations

from dms_train.families import ModelFamily

_LINES = {
    "configuration_dms.py": """

from transformers import {classes}Config  # noqa: E402

{classes}ConfigDMS = config_with_dms({classes}Config)
""",
    "modeling_dms.py": """

from transformers.models.{name}.modeling_{name} import (  # noqa: E402
    {classes}Attention,
    {classes}ForCausalLM,
)

from .configuration_dms import {classes}ConfigDMS  # noqa: E402

{classes}AttentionDMS = attention_with_dms({classes}Attention)
{classes}ForCausalLMDMS = model_with_dms(
    {classes}ForCausalLM, {classes}ConfigDMS, {classes}AttentionDMS
)
""",
}


def class_lines(file: str, family: ModelFamily) -> str:
    """What an export of this family adds to a file of `export/code`; nothing to most."""
    return _LINES.get(file, "").format(name=family.name, classes=family.classes)
