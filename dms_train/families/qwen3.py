"""Qwen3, the dense models."""

from dms_train.families.base import ModelFamily

FAMILY = ModelFamily(
    name="qwen3",
    classes="Qwen3",
    qk_norm=True,
    head_size=128,  # transformers omits the key for this value
    fixed={"attention_bias": False, "use_sliding_window": False},
)
