"""Retrofit language models with Dynamic Memory Sparsification (DMS), export and run them.

The names below are the public Python interface. Each is imported on first use, so that
`import dms_train` loads neither torch nor megatron-core:

    from dms_train import SamplingParams, load_export

    llm = load_export("outputs/cr4/exports/final/hf")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].outputs[0].text)

`LLM` runs a dense model or an export, `AsyncLLM` does so for coroutines, `load_export` accepts
exports only, `SamplingParams` sets how a prompt is continued, and `DMSSpec` holds the constants of
the method that an export was trained with. Training is started with the command `dms-train`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dms_train.version import __version__

if TYPE_CHECKING:
    from dms_train.inference.exports import load_export
    from dms_train.inference.llm import LLM
    from dms_train.inference.options import SamplingParams
    from dms_train.method.dms.spec import DMSSpec
    from dms_train.server.async_llm import AsyncLLM

__all__ = ["LLM", "AsyncLLM", "DMSSpec", "SamplingParams", "__version__", "load_export"]

_MODULES = {
    "AsyncLLM": "dms_train.server.async_llm",
    "LLM": "dms_train.inference.llm",
    "DMSSpec": "dms_train.method.dms.spec",
    "SamplingParams": "dms_train.inference.options",
    "load_export": "dms_train.inference.exports",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first access (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
