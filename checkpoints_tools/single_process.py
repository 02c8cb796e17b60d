"""An engine in this one process, without optimizer: what the converters work with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dms_train.hf.architecture import Architecture
from dms_train.mcore import groups
from dms_train.mcore.engine import EngineOptions, McoreEngine
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.mcore.weights import WeightSource
from dms_train.method.spec import DMSSpec


@contextmanager
def open_engine(
    architecture: Architecture, spec: DMSSpec, dtype: str, source: WeightSource | None
) -> Iterator[McoreEngine]:
    """Build the model in `dtype` (`fp32` or `bf16`); parallel groups exist inside the block."""
    parallel = ParallelOptions(params_dtype=dtype)
    view = groups.start(parallel, seed=0)
    try:
        options = EngineOptions(parallel=parallel, optim=OptimOptions(lr=0.0), seed=0, trains=False)
        yield McoreEngine(architecture, spec, view, options, source)
    finally:
        groups.stop()
