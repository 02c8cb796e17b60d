"""What the kernels and the configuration both need to know; no torch."""

from __future__ import annotations

# Backends of the training attention that a configuration may name.
KERNELS = ("auto", "triton", "flex", "blockwise", "reference")
# The training attention keeps its statistics, lse, delta and the sums of dq, for whole tiles of
# this many queries.
ROW_TILE = 128
