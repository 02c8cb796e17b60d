"""Imports that the engine makes when it computes its first step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions
from dms_train.server.run import warm_up

engine = InferenceEngine(Path(sys.argv[1]), EngineOptions(enable_prefix_caching=True))
warm_up(engine)
assert not engine.has_unfinished_requests()
assert engine.free_batch_slots == 16
before = set(sys.modules)
engine.add_request([5, 6])
while engine.has_unfinished_requests():
    engine.step()
print(sorted(set(sys.modules) - before))
"""


def test_nothing_is_imported_after_the_warm_up(model: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
