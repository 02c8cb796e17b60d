"""Documents packed into one sample.

`cu_seqlens` is int32 [documents + 1]: 0, then where each document ends, up to the sample's length;
a document may be empty. Megatron and flash-attention use the same name. Positions of a document are
neighbours, so their distance, and with it the window, needs no correction.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from dms_train.kernels.errors import KernelError


def document_of(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the document number of each position, int64 [length]; the host does not wait."""
    positions = torch.arange(length, device=cu_seqlens.device)
    return torch.bucketize(positions, cu_seqlens[1:].contiguous(), right=True)


def document_slices(cu_seqlens: Tensor, length: int) -> list[slice]:
    """Return the ranges of documents that are not empty; copies `cu_seqlens` to the host.

    Raises:
        KernelError: The bounds do not rise from 0 to `length`.
    """
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != length or bounds != sorted(bounds):
        raise KernelError(f"cu_seqlens={bounds}: must rise from 0 to the length, {length}")
    return [slice(first, last) for first, last in pairwise(bounds) if first < last]


def require_one_sample(query: Tensor, cu_seqlens: Tensor | None) -> None:
    """Fail if documents are packed and query [b, s, hq, d] is more than one sample."""
    if cu_seqlens is not None and query.shape[0] != 1:
        raise KernelError(
            f"cu_seqlens with {query.shape[0]} samples: documents are packed into one sample; "
            "join the samples"
        )
