"""First kernel of a decode step: embeddings, input of the first RMSNorm, and RoPE angles.

Shape letters: m tokens, k channels, d head size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dms_train.kernels.layers.triton_linear import ROWS
from dms_train.kernels.layers.types import EmbeddingTables, NormedInput


@triton.jit
def _embed_kernel(
    tokens_ptr,
    last_ptr,
    position_ptr,
    rows_ptr,
    table_ptr,
    cos_table_ptr,
    sin_table_ptr,
    norm_ptr,
    residual_ptr,
    scaled_ptr,
    squares_ptr,
    cos_ptr,
    sin_ptr,
    m,
    width,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    entry, block = tl.program_id(0), tl.program_id(1)
    token = tl.load(tokens_ptr + entry)
    if token < 0:
        token = tl.load(last_ptr + tl.maximum(tl.load(rows_ptr + entry), 0))
    channel = block * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    at = entry * width + channel
    x = tl.load(table_ptr + token.to(tl.int64) * width + channel, mask=inside, other=0.0)
    tl.store(residual_ptr + at, x, mask=inside)
    wide = x.to(tl.float32)
    norm = tl.load(norm_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled_ptr + at, (wide * norm).to(x.dtype), mask=inside)
    tl.store(squares_ptr + block * m + entry, tl.sum(wide * wide, 0))
    if block == 0:
        angle = tl.arange(0, D_PAD)
        position = tl.load(position_ptr + entry) * D + angle
        cos = tl.load(cos_table_ptr + position, mask=angle < D)
        sin = tl.load(sin_table_ptr + position, mask=angle < D)
        tl.store(cos_ptr + entry * D + angle, cos, mask=angle < D)
        tl.store(sin_ptr + entry * D + angle, sin, mask=angle < D)


def embed(
    tokens: Tensor,
    position: Tensor,
    rows: Tensor,
    tables: EmbeddingTables,
    *,
    norm: Tensor,
    residual: Tensor,
    after: NormedInput,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """Start a step in one kernel; see `LayerKernels.embed`."""
    m, width = residual.shape
    d = cos.shape[-1]
    _embed_kernel[(m, triton.cdiv(width, ROWS))](
        tokens,
        tables.last,
        position,
        rows,
        tables.embedding,
        tables.cos,
        tables.sin,
        norm,
        residual,
        after.scaled,
        after.squares,
        cos,
        sin,
        m,
        width,
        BLOCK=ROWS,
        D=d,
        D_PAD=triton.next_power_of_2(d),
        num_warps=2,
    )
