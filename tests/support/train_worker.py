"""`dms-train` in ranks that are forked after its imports, which take longer than a short run.

    launch.workers(PROCESSES, "tests.support.train_worker", WORDS...)

What a launcher adds is tested where runs are signalled and killed.
"""

from __future__ import annotations

import dms_train.app.session  # noqa: F401 - imported once, before the forks
from dms_train.cli.train import main

if __name__ == "__main__":
    main()
