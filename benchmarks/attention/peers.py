"""Peers of the training attention: torch's kernels without DMS, and DMS written with torch alone.

Each peer turns `AttentionInputs` into a `Call` in the memory order that it needs. FlexAttention
peers differ in tile sizes and in whether blocks in the future are skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.attention.shapes import AttentionInputs, Call

_FUTURE = -1e30  # finite, so that no arithmetic on it yields NaN
# By head size; for other sizes FlexAttention's own choices were best.
TUNED = {
    128: {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3},
}


def sdpa(inputs: AttentionInputs, backend: SDPBackend | None) -> Call:
    """Bind torch's fused causal attention without DMS; a `backend` of None lets torch choose."""
    p = inputs.heads_first()

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(
            p.query, p.key, p.value, is_causal=True, scale=p.scale, enable_gqa=True
        )

    def chosen() -> Tensor:
        assert backend is not None
        with sdpa_kernel(backend):
            return forward()

    return Call(forward if backend is None else chosen, [p.query, p.key, p.value], p.d_out)


def materialised(inputs: AttentionInputs) -> Call:
    """Bind SDPA with the bias of every query and key in memory, in the dtype of the queries."""
    p = inputs.heads_first()
    ratio = p.query.shape[1] // p.key.shape[1]

    def forward() -> Tensor:
        key, value = (x.repeat_interleave(ratio, 1) for x in (p.key, p.value))
        bias = dense_bias(p, p.query.dtype).repeat_interleave(ratio, 1)
        return F.scaled_dot_product_attention(p.query, key, value, attn_mask=bias, scale=p.scale)

    return Call(forward, [p.query, p.key, p.value, p.logits], p.d_out)


def dense_bias(inputs: AttentionInputs, dtype: torch.dtype) -> Tensor:
    """Return the bias [b, hk, s, s] of queries and keys, -inf in the future."""
    s = inputs.logits.shape[-1]
    positions = torch.arange(s, device=inputs.logits.device)
    distance = positions[:, None] - positions
    kept = inputs.log_keep().to(dtype)[:, :, None, :]
    bias = torch.where(distance > inputs.window, kept, torch.zeros((), dtype=dtype))
    return bias.masked_fill(distance < 0, float("-inf"))


def flex_causal(inputs: AttentionInputs) -> Call:
    """Bind causal FlexAttention without DMS."""
    p = inputs.heads_first()
    return _flex(p, [p.query, p.key, p.value], lambda: None, causal=True)


def flex_log_keep(inputs: AttentionInputs, options: dict[str, Any] | None = None) -> Call:
    """Bind FlexAttention whose score function reads log(1 - alpha), computed once for each key.

    Computing logsigmoid(-logit) for every element within it takes 1.5 times as long forward.
    """
    p = inputs.heads_first()
    ratio = p.query.shape[1] // p.key.shape[1]

    def make_score() -> Callable[..., Tensor]:
        log_keep = p.log_keep()

        def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(i - j > p.window, x + log_keep[b, h // ratio, j], x)

        return score

    return _flex(p, list(p[:4]), make_score, causal=True, options=options)


def flex_tuned(inputs: AttentionInputs) -> Call:
    """Bind `flex_log_keep` with the best tile sizes of an H200 for the head size."""
    return flex_log_keep(inputs, TUNED.get(inputs.query.shape[-1]))


def flex_no_block_mask(inputs: AttentionInputs) -> Call:
    """Bind NVIDIA's public DMS code: it visits every block, with arithmetic instead of a branch."""
    p = inputs.heads_first()
    ratio = p.query.shape[1] // p.key.shape[1]

    def make_score() -> Callable[..., Tensor]:
        log_keep = p.log_keep()

        def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            old, future = (i - j > p.window).to(x.dtype), (j > i).to(x.dtype)
            return x + old * log_keep[b, h // ratio, j] + future * _FUTURE

        return score

    return _flex(p, list(p[:4]), make_score, causal=False)


def _flex(
    p: AttentionInputs,
    leaves: list[Tensor],
    make_score: Callable[[], Callable[..., Tensor] | None],
    *,
    causal: bool,
    options: dict[str, Any] | None = None,
) -> Call:
    compiled = _compiled_flex()
    mask = _causal_mask(p.query.shape[2], p.query.device) if causal else None

    def forward() -> Tensor:
        return compiled(
            p.query,
            p.key,
            p.value,
            score_mod=make_score(),
            block_mask=mask,
            scale=p.scale,
            enable_gqa=True,
            kernel_options=options,
        )

    return Call(forward, leaves, p.d_out)


def _compiled_flex() -> Any:
    # the backward pass is timed many times on one graph; donated buffers do not allow that
    torch._functorch.config.donated_buffer = False
    torch._dynamo.config.cache_size_limit = 256
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=8)
def _causal_mask(length: int, device: torch.device) -> BlockMask:
    return create_block_mask(_not_later, None, None, length, length, device=str(device))


def _not_later(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


WITHOUT_DMS: dict[str, Callable[[AttentionInputs], Call]] = {
    "cuDNN causal": functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "flash SDPA causal": functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "flex causal": flex_causal,
}
WITH_DMS: dict[str, Callable[[AttentionInputs], Call]] = {
    "flex DMS": flex_log_keep,
    "flex DMS, tuned": flex_tuned,
    "flex DMS, no block mask": flex_no_block_mask,
    "materialised": materialised,
}
