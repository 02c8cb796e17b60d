"""Rank 0 works for longer than the process group waits.

torchrun ... -m tests.support.waiting_worker SECONDS
"""

from __future__ import annotations

import sys
import time

from dms_train.mcore import groups
from dms_train.mcore.options import ParallelOptions
from tests.support.meeting import meet

TIMEOUT_SECONDS = 4.0


def main() -> None:
    meet()
    view = groups.start(ParallelOptions(distributed_timeout_minutes=TIMEOUT_SECONDS / 60), 0)
    begin = time.monotonic()

    def work() -> dict[str, float]:
        time.sleep(float(sys.argv[1]))
        return {"rank": float(view.rank)}

    found = groups.of_rank_0(work)
    assert found == {"rank": 0.0}
    assert time.monotonic() - begin >= float(sys.argv[1])
    assert groups.value_of_rank_0(view.rank) == 0  # the training's group is as it was
    groups.stop()


if __name__ == "__main__":
    main()
