"""Loader of exports for inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dms_train.hf.directory import resolve
from dms_train.hf.formats import read_spec
from dms_train.inference.errors import InferenceError
from dms_train.inference.llm import LLM


def load_export(path: str | Path, **options: Any) -> LLM:
    """Load an export with the compact cache, which frees evicted tokens.

    Exports of every format are supported. A dense model is refused instead of being run without
    compression; use `LLM` for it. The engine of this package computes the model and does not run
    the code in the export. `dms-verify PATH` runs that code and compares it with the trained model.

    Args:
        path: Directory of the export, such as `RUN/exports/final/hf`, or its hub id (local cache
            only).
        **options: Fields of `dms_train.inference.options.EngineOptions`, such as `device="cuda"`.

    Returns:
        The engine; its `spec` holds the constants that the export was trained with.

    Raises:
        FileNotFoundError: There is no such directory, or weights are missing from it.
        InferenceError: The model is dense, or an option cannot be used.
        HFError: A file of the export is damaged, or its model family is not supported.
    """
    directory = resolve(path)
    if read_spec(directory) is None:
        raise InferenceError(
            f"{directory}: a dense model, not a retrofitted export; load it with dms_train.LLM, or "
            "give the folder of an export such as RUN/exports/final/hf"
        )
    return LLM(directory, **options)
