"""One process with megatron's groups, and runs that are built from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dms_train.mcore import groups, runtime
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.options import ParallelOptions
from tests.support.wiring import Assets, Built, make_assets


@pytest.fixture(scope="package")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def view() -> Iterator[ParallelView]:
    """The parallel groups of a single process; torch is as before afterwards."""
    yield groups.start(ParallelOptions(), seed=1)
    groups.stop()
    runtime.stop()


@pytest.fixture
def built(assets: Assets, view: ParallelView, tmp_path: Path) -> Iterator[Callable[..., Built]]:
    """(**changes) -> the run of a configuration with these changes, in a folder of its own."""
    runs: list[Built] = []

    def make(**changes: object) -> Built:
        changed = {key.replace(".", "__"): value for key, value in changes.items()}
        runs.append(Built(assets, tmp_path / str(len(runs)), view, **changed))
        return runs[-1]

    yield make
    for run in runs:
        run.close()
