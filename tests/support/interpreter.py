"""Triton's interpreter without work that has no effect: half of its time.

It looks through the modules of the language for functions to replace at every launch and at every
call of a kernel's functions, but their names do not change. It computes whether a sum or a product
of integers overflows, and asserts it in debug mode only.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def leave_out_idle_work() -> None:
    """For all kernels of this process; nothing changes where triton is built otherwise."""
    _find_functions_once()
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not options.debug:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


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
