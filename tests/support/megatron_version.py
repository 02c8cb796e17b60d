"""A small run with whatever version of megatron-core is first on the path.

    python -m tests.support.megatron_version write FOLDER      first half, a checkpoint, second half
    python -m tests.support.megatron_version continue FOLDER   second half from that checkpoint

Each prints one line, a JSON object: the version, and the losses of the second half. One process may
run several commands: `write FOLDER continue ANOTHER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron.core import package_info

from dms_train.cli.known_warnings import hide_known_warnings
from dms_train.mcore import groups
from dms_train.mcore.options import ParallelOptions
from tests.support import saving_cases as run

CASE = {"architecture": {"num_layers": 2}, "parallel": {"params_dtype": "bf16"}, "length": 24}


def main(what: str, folder: Path) -> None:
    """Run one of the two commands above."""
    view = groups.start(ParallelOptions(params_dtype="bf16"), seed=1)
    engine = run.build(CASE, view, seed=1 if what == "write" else 55)
    if what == "write":
        run.train(engine, CASE, 0, run.HALF)
        engine.save(folder, {"step": run.HALF})
    else:
        engine.load(folder, with_optimizer=True)
    rows = run.train(engine, CASE, run.HALF, run.STEPS)
    print(json.dumps({"version": package_info.__version__, "rows": rows}))
    groups.stop()


if __name__ == "__main__":
    hide_known_warnings()
    for command, path in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(command, Path(path))
