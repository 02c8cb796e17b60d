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


def run(what: str, folder: Path, *, newest: bool) -> dict[str, Any]:
    path = os.pathsep.join([str(NEWEST)] * newest + [str(launch.ROOT)])
    command = ("-m", "tests.support.megatron_version", what, str(folder))
    printed = launch.checked(launch.python(*command, PYTHONPATH=path))
    return json.loads(printed.splitlines()[-1])


@pytest.mark.timeout(600)  # four starts of torch and megatron-core
def test_versions_train_alike_and_continue_each_others_checkpoints(tmp_path: Path) -> None:
    if not NEWEST.is_dir():
        pytest.skip(f"{NEWEST} is absent; make setup unpacks the newest megatron-core there")
    written = {new: run("write", tmp_path / f"newest_{new}", newest=new) for new in (False, True)}
    assert written[True]["version"] != written[False]["version"]
    assert written[True]["rows"] == written[False]["rows"]
    for writer in written:
        read = run("continue", tmp_path / f"newest_{writer}", newest=not writer)
        assert read["version"] == written[not writer]["version"]
        assert read["rows"] == written[writer]["rows"]
