"""One rule for all tests: code of test exports is imported from a folder of this session."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Before transformers is imported, which reads these variables once."""
    os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="hf_modules")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # models here are too small to share out


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)
