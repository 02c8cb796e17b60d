"""Phi-4, and Phi-3 without sliding window: files with joined projections."""

from dms_train.families.base import ModelFamily
from dms_train.families.decoder.joined_modules import FUSED_MLP, FUSED_QKV
from dms_train.families.decoder.windows import refuse_short_window

FAMILY = ModelFamily(
    name="phi3",
    classes="Phi3",
    kv_heads_required=False,
    always_has_head_dim=False,
    norm_epsilon=1e-5,
    rotary_factor=1.0,
    stored={**FUSED_QKV, **FUSED_MLP},
    fixed={"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    # without the key transformers takes token 32000, which small vocabularies do not have
    written={"sliding_window": None, "pad_token_id": None},
    refuse=refuse_short_window,
)
