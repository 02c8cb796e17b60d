"""Gated delta net as a loop over tokens, with tensors named as in the files."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from dms_train.hf.architecture import Architecture
from dms_train.hf.linear_attention import LinearAttention


def sizes_of(family: str, key_heads: int = 2) -> LinearAttention | None:
    """Sizes of linear attention in the tiny models of families that have it."""
    if not family.startswith(("qwen3_5", "qwen3_next")):
        return None
    return LinearAttention(
        key_heads=key_heads, value_heads=2 * key_heads, key_channels=6, value_channels=10, taps=4
    )


def delta_net(x: Tensor, w: Callable[[str], Tensor], a: Architecture) -> Tensor:
    """Return the updates of one sequence x [T, h]; w(name) is a tensor of the layer."""
    sizes = a.linear
    assert sizes is not None
    group = sizes.value_heads // sizes.key_heads
    heads = {}
    for part, count in (("q", sizes.key_heads), ("k", sizes.key_heads), ("v", sizes.value_heads)):
        inputs, taps = x @ w(f"in_proj_{part}.weight").T, w(f"conv1d_{part}.weight")[:, 0]
        out = torch.zeros_like(inputs)
        for age in range(sizes.taps):
            out[age:] += inputs[: len(x) - age] * taps[:, sizes.taps - 1 - age]
        heads[part] = silu(out).view(len(x), count, -1)
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 1)
        for x in (heads["q"], heads["k"])
    )
    rate = (x @ w("in_proj_b.weight").T).sigmoid()
    forget = w("A_log").exp() * softplus(x @ w("in_proj_a.weight").T + w("dt_bias"))
    state = x.new_zeros(sizes.value_heads, sizes.key_channels, sizes.value_channels)
    outputs = []
    for t in range(len(x)):
        state = state * (-forget[t]).exp()[:, None, None]
        missing = heads["v"][t] - (state * k[t][..., None]).sum(1)
        state = state + k[t][..., None] * (rate[t][:, None] * missing)[:, None]
        outputs.append((state * q[t][..., None]).sum(1) / sizes.key_channels**0.5)
    out = torch.stack(outputs)
    out = out * (out.pow(2).mean(-1, keepdim=True) + a.layernorm_epsilon).rsqrt()
    out = out * w("norm.weight") * silu((x @ w("in_proj_z.weight").T).view_as(out))
    return out.flatten(1) @ w("out_proj.weight").T
