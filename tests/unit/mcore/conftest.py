"""One process on the CPU, with megatron's real groups, for each module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dms_train.mcore import groups, runtime
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.options import OptimOptions, ParallelOptions, Trainable
from dms_train.method.spec import PRESETS
from tests.support import tiny


@pytest.fixture(scope="module")
def view() -> Iterator[ParallelView]:
    """The parallel groups of a single process; torch is as before afterwards."""
    yield groups.start(ParallelOptions(), seed=1)
    groups.stop()
    runtime.stop()


@pytest.fixture(scope="module")
def build(view: ParallelView) -> Callable[..., McoreEngine]:
    """(family, preset, dtype, sizes, **spec changes) -> engine with small eviction channels."""

    def _build(
        family: str,
        preset: str,
        dtype: str = "fp32",
        trains: bool = True,
        kernels: str = "auto",
        sizes: dict[str, object] | None = None,
        train: str = "all",
        **changes: object,
    ) -> McoreEngine:
        base = PRESETS[preset]
        window = {"window": 4} if base.kind == "dms" else {}
        spec = base.override(**{**window, **changes})
        architecture = tiny.architecture(family, num_layers=2, **(sizes or {}))
        options = TrainEngineOptions(
            parallel=ParallelOptions(params_dtype=dtype),
            optim=OptimOptions(lr=1e-3),
            seed=7,
            trains=trains,
            kernels=kernels,
            trainable=Trainable(weights=train),
        )
        weights = tiny.small_channels(spec.kind)(architecture, 1, spec.channel)
        return McoreEngine(architecture, spec, view, options, weights)

    return _build
