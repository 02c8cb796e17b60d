"""Base model of adapters: the model whose weights a run leaves as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dms_train.hf.formats import AdapterBase
from dms_train.mcore.checkpoints.state import ADAPTERS
from dms_train.mcore.options import Trainable

_KEY = "adapter_base"  # of a checkpoint; None if the frozen weights are not those of a base model


def frozen_base(
    trainable: Trainable, model: str | None, revision: str | None
) -> AdapterBase | None:
    """Return the base model of new adapters; None unless adapters are all that trains.

    Args:
        trainable: Weights that train.
        model: Directory, GGUF file or hub id of the base model; None without one.
        revision: Hub revision.
    """
    if model is None or not trainable.adapts:
        return None
    path = Path(model).expanduser()
    return AdapterBase(str(path.resolve())) if path.exists() else AdapterBase(model, revision)


def stored_base(state: Mapping[str, Any]) -> AdapterBase | None:
    """Return the base model of a checkpoint's adapters; None if its state names none."""
    base = state.get(_KEY)
    return None if base is None or state.get(ADAPTERS) is None else AdapterBase(**base)


def described_base(base: AdapterBase | None, params_dtype: str) -> dict[str, Any]:
    """Return the entry of a checkpoint's state that `stored_base` reads.

    Args:
        base: Base model at the start of the run.
        params_dtype: Precision of the run, `fp32` or `bf16`.
    """
    if base is not None and params_dtype == "bf16":
        base = replace(base, dtype="bfloat16")
    return {_KEY: None if base is None else asdict(base)}
