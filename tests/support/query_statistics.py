"""Files of random query statistics for tests of the policy `triattention`."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

from dms_train.hf.rope import Rope
from dms_train.inference.models.blocks import rotary_frequencies
from dms_train.inference.policies.triattention import QueryStatistics
from tests.unit.inference.conftest import tiny_architecture


@cache
def statistics_file(layers: int, heads: int, size: int, frequency: tuple[float, ...]) -> str:
    """Path of a file that exists until the process ends; norms exceed those of the means."""
    folder = Path(tempfile.mkdtemp(prefix="queries"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    draw = torch.Generator().manual_seed(layers + heads + size)
    mean = torch.randn(layers, heads, size, generator=draw)
    extra = torch.rand(layers, heads, size // 2, generator=draw)
    norm = torch.hypot(*mean.chunk(2, -1)) + extra
    statistics = QueryStatistics(mean=mean, norm=norm, frequency=torch.tensor(frequency))
    statistics.save(folder / "queries.safetensors")
    return str(folder / "queries.safetensors")


def tiny_statistics() -> str:
    """File for the small Llama of the inference tests."""
    a = tiny_architecture("llama")
    frequency = rotary_frequencies(a, Rope(a.rotary_base), torch.device("cpu"))
    return statistics_file(
        a.num_layers, a.num_attention_heads, a.kv_channels, tuple(frequency.tolist())
    )
