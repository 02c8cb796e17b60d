"""Constants of the kernels that the configuration and the commands also use; no torch."""

from __future__ import annotations

from pathlib import Path

# Backends of the training attention that a configuration may name.
KERNELS = ("auto", "triton", "flex", "blockwise", "reference")
# The training attention keeps its statistics, lse, delta and the sums of dq, for whole tiles of
# this many queries.
ROW_TILE = 128
# Tokens that the gated delta rule computes at once.
DELTA_CHUNK = 64
# Tile sizes that `tuning` measured: {family: [forward tiles, backward tiles]}.
TUNED_FILE = Path.home() / ".cache" / "dms-train" / "attention_tiles.json"
