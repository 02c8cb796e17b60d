"""Triton's interpreter without what it repeats at every call of a kernel's functions.

It looks through the modules of the language for functions to replace, launch by launch and call by
call, which takes a quarter of its time. Their names do not change.
"""

from __future__ import annotations

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def find_functions_once() -> None:
    """Replace the search; nothing happens where another version of triton has none like it."""
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
