"""The backends that a configuration may name."""

from __future__ import annotations

KERNELS = ("auto", "triton", "flex", "blockwise", "reference")
