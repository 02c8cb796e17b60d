"""Qwen3-Next: linear attention in three of four layers, and a mixture of experts everywhere."""

from dms_train.families.base import ExpertKeys, ModelFamily
from dms_train.families.decoder.joined_modules import LINEAR_PARTS, LINEAR_PARTS_BY_HEAD
from dms_train.families.decoder.linear_layers import LINEAR_LAYERS, refuse_linear

FAMILY = ModelFamily(
    name="qwen3_next",
    classes="Qwen3Next",
    qk_norm=True,
    output_gate=True,
    centered_norms=True,
    expert_keys=ExpertKeys(
        topk=10,
        experts=512,
        expert_width=512,
        normalizes=True,
        shared="shared_expert_intermediate_size",
    ),
    head_size=256,
    rotary_factor=0.25,
    stored={
        **LINEAR_PARTS_BY_HEAD,
        "linear_attn.conv1d": LINEAR_PARTS["linear_attn.conv1d"],
        "self_attn.q_proj": ("self_attn.q_proj", "self_attn.gate_proj"),
    },
    stored_by_head=(*LINEAR_PARTS_BY_HEAD, "self_attn.q_proj"),
    left_out=("mtp.",),
    layers=LINEAR_LAYERS,
    fixed={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    refuse=refuse_linear,
)
