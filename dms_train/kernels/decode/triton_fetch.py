"""Lines of memory brought into the L2 cache before they are needed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fetch(pointers):
    """Prefetch the cache lines of these addresses."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
