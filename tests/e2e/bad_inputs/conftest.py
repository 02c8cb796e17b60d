"""Sound inputs, and a copy of them for each case."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import refusals
from tests.support.refusals import Workspace


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> refusals.Assets:
    return refusals.make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture
def workspace(tmp_path: Path, assets: refusals.Assets) -> Iterator[Workspace]:
    with refusals.open_workspace(tmp_path, assets) as opened:
        yield opened
