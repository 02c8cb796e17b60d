"""Llama 2 and 3."""

from dms_train.families.base import ModelFamily

FAMILY = ModelFamily(
    name="llama",
    classes="Llama",
    kv_heads_required=False,
    rope_types=("llama3",),
    fixed={"attention_bias": False, "mlp_bias": False},
)
