"""GLM-4: RoPE turns neighbouring channels of the first half of each head."""

from dms_train.families.base import ModelFamily
from dms_train.families.decoder.joined_modules import FUSED_MLP

FAMILY = ModelFamily(
    name="glm4",
    classes="Glm4",
    qkv_bias=True,
    sandwich_norms=True,
    head_size=128,
    norm_epsilon=1.5625e-7,
    rotary_factor=0.5,
    interleaved_rope=True,
    stored={
        **FUSED_MLP,
        "post_self_attn_layernorm": ("post_attention_layernorm",),
        "post_attention_layernorm": ("pre_feedforward_layernorm",),
        "post_mlp_layernorm": ("post_feedforward_layernorm",),
    },
    fixed={"attention_bias": True},
    # without the key transformers takes token 151329, which small vocabularies do not have
    written={"pad_token_id": None},
)
