"""Rules for all tests, set before anything reads them.

Code of test exports is imported from a folder of this run. Without a GPU Triton's interpreter runs
the kernels; the choice is read when triton, or a kernel, is first imported.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings

FIRST = ("distributed", "e2e", "faults", "golden", "unit/mcore", "unit/inference", "unit/wiring")

gc.disable()  # until the tests are collected: passes over what they import take seconds
settings.register_profile("untimed", deadline=None)  # an example may be slow beside other work
settings.load_profile("untimed")

# Here and not below: conftest files of folders named on the command line are imported before that
# is called, and megatron imports triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Before transformers and triton are imported, which read these variables once."""
    os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="hf_modules")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # models here are too small to share out, and two workers have two cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First the folders with the longest files: with one last, other workers would be idle."""
    first = tuple(f"{Path(__file__).parent / name}/" for name in FIRST)
    items.sort(key=lambda item: not str(item.path).startswith(first))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Set up Triton's interpreter; let the garbage collector pass over what has been imported."""
    gc.enable()
    gc.collect()
    gc.freeze()
    if "triton" in sys.modules and not torch.cuda.is_available():
        from tests.support.interpreter import leave_out_idle_work, round_fp8_to_nearest

        leave_out_idle_work()
        round_fp8_to_nearest()


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _fresh_log() -> None:
    """Loggers as they are on import: commands, and Hydra, set them up for a whole process."""
    logging.getLogger().setLevel(logging.WARNING)
    logger = logging.getLogger("dms_train")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    logger.disabled = False
