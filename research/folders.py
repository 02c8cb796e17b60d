"""Folders of the experiments."""

from __future__ import annotations

from pathlib import Path

CONFIG_DIR = Path(__file__).parent / "conf"  # for `dms-train --config-dir`
RESULTS = Path(__file__).parent / "results"  # stored records
