"""Error class of this package, and the refusal of files that Git LFS left out."""

from __future__ import annotations

from pathlib import Path

from dms_train import git_lfs


class DataError(ValueError):
    """Token data is missing, damaged, unsuitable or too small; the message is one line."""


def refuse_pointer(path: Path) -> None:
    """Refuse a file that Git LFS has left out: DataError with the fix."""
    with path.open("rb") as stream:
        refusal = git_lfs.refusal(stream.read(64))
    if refusal is not None:
        raise DataError(f"{path}: {refusal}")
