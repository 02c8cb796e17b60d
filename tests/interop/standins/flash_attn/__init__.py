"""Plain torch in place of FlashAttention-2, which has no CPU build; not its code.

Only the two functions and the arguments that the other projects pass, in at least float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output [n, heads, d] and log-sum-exp [heads, n] of query [n, heads, d], key [s, groups, d].

    Causal means that the last query sees the last key. Of no keys at all the sum is a large
    negative number: NVIDIA's prefill would take an infinite one for 0.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.to(wide).repeat_interleave(repeat, 1) for x in (key, value))
    scores = torch.einsum("nhd,shd->hns", query.to(wide), key) * scale
    if causal:
        queries, keys = scores.shape[1:]
        late = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        scores = scores.masked_fill(late, -torch.inf)
    output = torch.einsum("hns,shd->nhd", scores.softmax(-1), value)
    return output.to(query.dtype), scores.logsumexp(-1).clamp(min=-1e9)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: None,
) -> Tensor:
    """Attention inside each of several sequences that lie one after the other."""
    assert block_table is None
    parts = []
    for index in range(len(cu_seqlens_q) - 1):
        queries = slice(int(cu_seqlens_q[index]), int(cu_seqlens_q[index + 1]))
        keys = slice(int(cu_seqlens_k[index]), int(cu_seqlens_k[index + 1]))
        parts.append(_attend(q[queries], k[keys], v[keys], softmax_scale, causal)[0])
    return torch.cat(parts)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    *,
    cache_seqlens: Tensor,
    causal: bool,
    softmax_scale: float,
    block_table: Tensor,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q [b, n, heads, d] to the first tokens of each row's pages [p, slots, g, d]."""
    assert k is None
    assert v is None
    outputs, sums = [], []
    for row, length in enumerate(cache_seqlens.tolist()):
        pages = block_table[row, : -(-length // k_cache.shape[1])].long()
        key, value = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        output, total = _attend(q[row], key, value, softmax_scale, causal)
        outputs.append(output)
        sums.append(total)
    done = torch.stack(outputs)
    return (done, torch.stack(sums)) if return_softmax_lse else done
