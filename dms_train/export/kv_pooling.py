"""Fewer KV heads by mean pooling: a dense model becomes one with grouped-query attention.

The projections of keys and values of neighbouring KV heads are averaged, and the projection of
queries is kept (GQA: arXiv:2305.13245, section 2.1). Query heads of the pooled heads then read
their mean. Keys are averaged before their norm and before RoPE. The weight of a key norm stays
where all heads share it, and is averaged where every head has its own factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from dms_train.export.card import POOLED_FROM
from dms_train.export.writer import write_export
from dms_train.families.decoder.tensors import layer_tensors
from dms_train.hf import formats
from dms_train.hf.architecture import Architecture
from dms_train.hf.directory import read_architecture, resolve
from dms_train.hf.errors import HFError
from dms_train.hf.tensors import expected_shapes
from dms_train.hf.typed import typed
from dms_train.hf.weight_reader import WeightReader
from dms_train.observe.log import logger

_STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@typed
def with_kv_heads(architecture: Architecture, kv_heads: int) -> Architecture:
    """Return the architecture with fewer KV heads.

    Raises:
        HFError: `kv_heads` is not below the number of KV heads of the model, or does not divide it.
    """
    now = architecture.num_query_groups
    possible = [str(n) for n in range(now - 1, 0, -1) if now % n == 0]
    if str(kv_heads) not in possible:
        fix = f"use {' or '.join(possible)}" if possible else "there is nothing to pool"
        raise HFError(f"--kv-heads {kv_heads}: the model has {now} KV heads; {fix}")
    return replace(architecture, num_query_groups=kv_heads)


@typed
def mean_of_groups(rows: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Average the heads of each group in float32 (float64 stays).

    Args:
        rows: [heads * d, ...], projection of keys or values, or its bias.
        heads: KV heads of `rows`.
        kv_heads: Groups, each of heads / kv_heads consecutive heads.

    Returns:
        [kv_heads * d, ...] in the dtype of `rows`.
    """
    wide = rows if rows.dtype == torch.float64 else rows.float()
    grouped = wide.unflatten(0, (kv_heads, heads // kv_heads, -1))
    return grouped.mean(1).flatten(0, 1).to(rows.dtype)


@typed
def pooled_weights(
    reader: WeightReader, architecture: Architecture, kv_heads: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the model with fewer KV heads, one at a time.

    Args:
        reader: Weights of the model.
        architecture: Architecture of that model.
        kv_heads: KV heads afterwards.
    """
    dimensions = layer_tensors(architecture.described, architecture.num_experts)
    of_kv_heads = tuple(name for name, of in dimensions.items() if of[0] == "key")
    for name in expected_shapes(architecture):
        tensor = reader.get(name)
        if name.endswith(of_kv_heads):
            tensor = mean_of_groups(tensor, architecture.num_query_groups, kv_heads)
        yield name, tensor


@typed
def pool_kv_heads(
    model: str, out: Path, kv_heads: int, *, revision: str | None = None, download: bool = False
) -> None:
    """Write a dense model with fewer KV heads; memory is bounded by one shard of the result.

    Args:
        model: Directory or hub id of a dense model.
        out: Directory to write; must not exist.
        kv_heads: Number of KV heads afterwards, a divisor of their present number.
        revision: Hub revision; ignored for directories.
        download: Whether the hub may be accessed over the network.

    Raises:
        FileExistsError: `out` exists.
        HFError: The number is impossible, or the model is damaged, not supported or retrofitted.
    """
    if out.exists():
        raise FileExistsError(17, "exists; choose another folder", str(out))
    directory = resolve(model, revision=revision, local_files_only=not download)
    if formats.read_spec(directory) is not None:
        raise HFError(
            f"{directory}: a retrofitted model, whose heads decide what the cache holds; give the "
            "original model, and retrofit what is written"
        )
    architecture = read_architecture(directory)
    fewer = with_kv_heads(architecture, kv_heads)
    reader = WeightReader(directory)
    leftovers = reader.require(architecture)
    if leftovers is not None:
        logger().warning(leftovers)
    write_export(
        out,
        architecture=fewer,
        spec=None,
        cr_factor=None,
        target_cr=1.0,
        dtype=_dtype(reader, architecture),
        export_format="dense",
        weights=pooled_weights(reader, architecture, kv_heads),
        source_dir=directory,
        selftest=None,
        provenance={"model": model, POOLED_FROM: architecture.num_query_groups},
    )


def _dtype(reader: WeightReader, architecture: Architecture) -> torch.dtype:
    """Find the narrowest dtype that holds every tensor without loss."""
    stored = {reader.dtype(name) for name in expected_shapes(architecture)}
    return reduce(torch.promote_types, (_STORED[name] for name in stored))
