"""One model for all tests of the server, and one server for each module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import served_model
from tests.support.served_model import Running


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model.write_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with served_model.serving(model, engine={"max_num_seqs": 8}, max_body_bytes=2**20) as running:
        yield running
