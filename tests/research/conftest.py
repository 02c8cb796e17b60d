"""Marks the tests of this folder, and registers the tasks and scorers of the experiments."""

from __future__ import annotations

from pathlib import Path

import pytest

from research.registration import register


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("research")


@pytest.fixture(scope="session", autouse=True)
def _registered() -> None:
    register()
