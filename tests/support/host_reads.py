"""Operations in which the host of a GPU waits for numbers that the GPU computes."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS = {
    *(getattr(Tensor, name) for name in ("item", "tolist", "cpu", "numpy", "nonzero", "argwhere")),
    *(getattr(Tensor, name) for name in ("__bool__", "__int__", "__float__", "__index__")),
    *(getattr(Tensor, name) for name in ("masked_select", "unique", "unique_consecutive")),
    *(torch.nonzero, torch.argwhere, torch.masked_select, torch.unique, torch.bincount),
    *(torch.tensor, torch.as_tensor, torch.allclose, torch.equal, Tensor.equal, Tensor.new_tensor),
}
_SELECTIONS = (Tensor.__getitem__, Tensor.__setitem__, Tensor.index_put_)
_REPEATS = (torch.repeat_interleave, Tensor.repeat_interleave)


class HostReads(TorchFunctionMode):
    """Places in which code below `folder` waits, in the order in which it comes to them.

    Attributes:
        places: `FILE:LINE` of each read.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder
        self.places: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        if self._folder in caller.f_code.co_filename and _waits(func, args, kwargs):
            self.places.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")
        return func(*args, **kwargs)


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in _READS:
        return True
    if func in _SELECTIONS:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(
            isinstance(each, list) or (isinstance(each, Tensor) and each.dtype == torch.bool)
            for each in index
        )
    if func is torch.where:
        return len(args) == 1
    return func in _REPEATS and kwargs.get("output_size") is None
