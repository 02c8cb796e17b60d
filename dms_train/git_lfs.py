"""Pointer that Git LFS leaves in place of a file that it has not fetched."""

from __future__ import annotations

_POINTER = b"version https://git-lfs"


def refusal(data: bytes) -> str | None:
    """Return what to do about a file that starts with `data`; None unless it is a pointer."""
    if not data.startswith(_POINTER):
        return None
    return "a Git LFS pointer, not the file itself; run `git lfs pull`"
