"""`dms-serve` with an engine that fails in the second step of every prompt.

python -m tests.support.broken_server MODEL ...
"""

from __future__ import annotations

import sys
from typing import NoReturn

from dms_train.cli import serve
from dms_train.inference.engine import InferenceEngine
from dms_train.server import run

warm_up = run.warm_up


def fails(*_arguments: object, **_options: object) -> NoReturn:
    raise RuntimeError("a broken kernel")


def break_engine(engine: InferenceEngine) -> None:
    warm_up(engine)
    runner, compute = engine._runner, engine._runner.step

    def step(batch: list, **options: object) -> object:
        return (fails if batch[0][0].num_computed_tokens else compute)(batch, **options)

    runner.step, runner.cache.free = step, fails


if __name__ == "__main__":
    run.warm_up = break_engine
    sys.exit(serve.main())
