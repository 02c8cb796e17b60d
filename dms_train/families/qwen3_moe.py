"""Qwen3, the mixture-of-experts models."""

from dms_train.families.base import ExpertKeys, ModelFamily

FAMILY = ModelFamily(
    name="qwen3_moe",
    classes="Qwen3Moe",
    qk_norm=True,
    expert_keys=ExpertKeys(),
    fixed={
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)
