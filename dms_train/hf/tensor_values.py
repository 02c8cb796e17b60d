"""Values and dtypes of tensors, as model directories state them."""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.hf.typed import typed


@typed
def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinite numbers; makes no copy of it."""
    return not tensor.numel() or all(bound.isfinite() for bound in torch.aminmax(tensor))


@typed
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name in config.json, such as `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
