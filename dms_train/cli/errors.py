"""End of a command: exit code, one line for an expected failure, a traceback for a bug."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from dms_train.app import failures, launcher
from dms_train.cli.known_warnings import hide_known_warnings

INTERRUPTED = 130
_PATIENCE_SECONDS = 5.0


def run_main(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code.

    An expected failure prints one line for each problem on stderr and returns 2. Expected are the
    project's ValueError classes, errors of the operating system (such as a full disk), missing
    optional packages, and the loss of another rank. Ctrl-C returns 130. Any other
    exception is a bug and propagates.

    Most failures occur on all ranks, so ranks other than 0 wait before they print. Meanwhile the
    launcher sees rank 0 fail and ends them. Rank 0 is never ended before it has printed.
    """
    hide_known_warnings()
    try:
        return command() or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError, ModuleNotFoundError, failures.PeerLost) as error:
        if not failures.is_expected(error):
            raise
        if _may_repeat_others(error):
            time.sleep(_PATIENCE_SECONDS)
        sys.stderr.write("".join(f"{line}\n" for line in failures.describe(error)))
        sys.stderr.flush()
        return failures.REFUSED


def run_process(command: Callable[[], int | None]) -> NoReturn:
    """Call `run_main`, then end this process.

    A rank that fails after the process group exists ends without shutting the interpreter down.
    The shutdown would wait for collectives that other ranks may never join, and may crash in
    gloo's threads, which hold tensors (https://github.com/pytorch/pytorch/pull/179291).
    """
    try:
        code = run_main(command)
    except Exception:
        if launcher.world_size() == 1:
            raise
        traceback.print_exc()
        code = 1
    if code and launcher.world_size() > 1 and _has_met_others():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _has_met_others() -> bool:
    distributed = sys.modules.get("torch.distributed")  # a light command must not import torch
    return distributed is not None and distributed.is_initialized()


def _may_repeat_others(error: BaseException) -> bool:
    if isinstance(error, OSError | ModuleNotFoundError):
        return False  # a full disk, a missing mount or package concerns one machine only
    return isinstance(error, failures.PeerLost) or launcher.rank() != 0
