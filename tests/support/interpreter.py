"""Triton's interpreter without work that has no effect, and with the rounding of a GPU.

It looks through the modules of the language for functions to replace at every launch and at every
call of a kernel's functions, but their names do not change. It computes whether a sum or a product
of integers overflows, and asserts it in debug mode only. Without both it takes half of the time.

Where rounding to FP8 reaches the next power of two, it loses the carry, so that 1.99 becomes 1
(https://github.com/triton-lang/triton/pull/11897, not merged); torch rounds there instead.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def leave_out_idle_work() -> None:
    """For all kernels of this process; nothing changes where triton is built otherwise."""
    _find_functions_once()
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not options.debug:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def round_fp8_to_nearest() -> None:
    """For all kernels of this process: float32 to e4m3 as on a GPU, ties to even, at most 448."""
    convert = interpreter._convert_float

    def rounded(x: Any, before: Any, after: Any, rounding: Any) -> Any:
        if (before, after) != (tl.float32, tl.float8e4nv):
            return convert(x, before, after, rounding)
        limited = torch.from_numpy(np.ascontiguousarray(x)).clamp(-448, 448)
        return limited.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = rounded


def _find_functions_once() -> None:
    search = getattr(interpreter, "_patch_builtin", None)
    if search is None or [*inspect.signature(search).parameters] != ["pkg", "builder", "scope"]:
        return
    places = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    names = {
        place: [name for name, value in inspect.getmembers(place) if tl.core.is_builtin(value)]
        for place in places
    }

    def replace_known(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in names:
            search(pkg, builder, scope)
            return
        for name in names[pkg]:
            member = getattr(pkg, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    interpreter._patch_builtin = replace_known
