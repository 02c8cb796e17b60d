"""`dms-train` in ranks that count the bytes which safetensors hands out.

    launch.workers(PROCESSES, "tests.support.reading_worker", WORDS...)

Rank r writes `{tensor: bytes}` to READS_FOLDER/r.json.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import safetensors
import torch

import dms_train.app.session  # noqa: F401 - imported once, before the forks
from dms_train.cli.train import main as train

_open = safetensors.safe_open
READS: Counter[str] = Counter()


def _counted(name: str, tensor: torch.Tensor) -> torch.Tensor:
    READS[name] += tensor.nbytes
    return tensor


class _Slice:
    def __init__(self, name: str, inner: Any) -> None:
        self._name, self._inner = name, inner

    def __getitem__(self, index: Any) -> torch.Tensor:
        return _counted(self._name, self._inner[index])


class _File:
    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._inner = _open(*arguments, **options)

    def get_tensor(self, name: str) -> torch.Tensor:
        return _counted(name, self._inner.get_tensor(name))

    def get_slice(self, name: str) -> _Slice:
        return _Slice(name, self._inner.get_slice(name))


def main() -> int:
    safetensors.safe_open = _File  # type: ignore[assignment, misc]
    try:
        return train()
    finally:
        file = Path(os.environ["READS_FOLDER"]) / f"{os.environ.get('RANK', '0')}.json"
        file.write_text(json.dumps(READS))


if __name__ == "__main__":
    main()
