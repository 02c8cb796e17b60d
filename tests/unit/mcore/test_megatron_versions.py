"""The oldest and the newest megatron-core compute the same steps and read each other's checkpoints.

The newest one may require a newer Python than the tests run on, so `make setup` unpacks its wheel.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import launch

NEWEST = Path(os.environ.get("DMS_MEGATRON_NEWEST", Path(sys.prefix) / "megatron_newest"))


def run(*commands: str | Path, newest: bool) -> list[dict[str, Any]]:
    words = ("tests.support.megatron_version", *map(str, commands))
    if newest:
        path = os.pathsep.join([str(NEWEST), str(launch.ROOT)])
        ended = launch.python("-m", *words, PYTHONPATH=path)
    else:
        ended = launch.module(*words)
    printed = launch.checked(ended)
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@pytest.mark.timeout(600)
def test_versions_train_alike_and_continue_each_others_checkpoints(tmp_path: Path) -> None:
    if not NEWEST.is_dir():
        pytest.skip(f"{NEWEST} is absent; make setup unpacks the newest megatron-core there")
    old, new = tmp_path / "old", tmp_path / "new"
    (first,) = run("write", old, newest=False)
    second, continued = run("write", new, "continue", old, newest=True)
    (back,) = run("continue", new, newest=False)
    assert first["version"] == back["version"] != second["version"] == continued["version"]
    assert first["rows"] == second["rows"] == continued["rows"] == back["rows"]
