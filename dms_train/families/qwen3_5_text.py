"""Qwen3.5, the dense language models: linear attention in three of four layers."""

from dms_train.families.base import ModelFamily
from dms_train.families.decoder.joined_modules import LINEAR_PARTS
from dms_train.families.decoder.linear_layers import LINEAR_LAYERS, refuse_linear

FAMILY = ModelFamily(
    name="qwen3_5_text",
    classes="Qwen3_5",
    package="qwen3_5",
    config_classes="Qwen3_5Text",
    qk_norm=True,
    output_gate=True,
    centered_norms=True,
    head_size=256,
    rotary_factor=0.25,
    stored={**LINEAR_PARTS, "self_attn.q_proj": ("self_attn.q_proj", "self_attn.gate_proj")},
    stored_by_head=("self_attn.q_proj",),
    multimodal="qwen3_5",
    left_out=("model.visual.", "mtp."),
    layers=LINEAR_LAYERS,
    fixed={"attention_bias": False},
    refuse=refuse_linear,
)
