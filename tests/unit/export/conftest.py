"""Exports of a tiny random model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dms_train.export.writer import write_export
from dms_train.hf.architecture import Architecture
from dms_train.hf.tensors import expected_shapes
from dms_train.method.spec import PRESETS

ARCHITECTURE = Architecture(
    family="llama",
    num_layers=1,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=2,
    num_query_groups=1,
    kv_channels=8,
    vocab_size=31,
    max_position_embeddings=64,
    rotary_base=10000.0,
    layernorm_epsilon=1e-6,
    tie_word_embeddings=False,
)


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Path]:
    """(**overrides of write_export) -> directory of an export in format dms."""

    def _export(**overrides: Any) -> Path:
        draw = torch.Generator().manual_seed(0)
        shapes = expected_shapes(ARCHITECTURE).items()
        arguments = {
            "architecture": ARCHITECTURE,
            "spec": PRESETS["dms"].override(window=5),
            "cr_factor": 2.345678,
            "target_cr": 3.0,
            "dtype": torch.float32,
            "export_format": "dms",
            "weights": [(name, torch.randn(shape, generator=draw)) for name, shape in shapes],
            "source_dir": None,
            "selftest": None,
            "provenance": {"step": 12, "model": None},
            **overrides,
        }
        write_export(tmp_path / "export", **arguments)
        return tmp_path / "export"

    return _export
