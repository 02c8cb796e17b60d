"""Modules that the files of several families join, for `ModelFamily.stored`."""

FUSED_QKV = {"self_attn.qkv_proj": tuple(f"self_attn.{part}_proj" for part in "qkv")}
"""One matrix for queries, keys and values."""
FUSED_MLP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
"""One matrix for gate and up projection."""
LINEAR_PARTS = {
    "linear_attn.in_proj_qkv": tuple(f"linear_attn.in_proj_{part}" for part in "qkv"),
    "linear_attn.conv1d": tuple(f"linear_attn.conv1d_{part}" for part in "qkv"),
}
"""Queries, keys and values of linear attention in one matrix."""
LINEAR_PARTS_BY_HEAD = {
    "linear_attn.in_proj_qkvz": tuple(f"linear_attn.in_proj_{part}" for part in "qkvz"),
    "linear_attn.in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
}
"""Projections of linear attention joined for each key head."""
