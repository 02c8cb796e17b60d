"""Helpers of tests. A process of a test imports megatron-core as a command does."""

from __future__ import annotations

from dms_train.cli.light_imports import skip_unused_imports

skip_unused_imports()
