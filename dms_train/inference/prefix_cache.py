"""Snapshots of the cache, from which sequences with the same first tokens start.

The state of a cache after a token depends only on the tokens up to it, with some policies inside
prompts alone. A sequence that begins with the tokens of a snapshot therefore need not compute them
again. A snapshot cannot be shortened later, because evicted tokens are gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dms_train.inference.cache.interface import Snapshot

_PROMPTS = 64  # number of recent prompts to compare a new prompt with
_SHORTEST = 16  # least tokens of a common prefix that is worth a snapshot


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """Snapshot of the cache and its tokens.

    Attributes:
        tokens: Tokens that the snapshot covers.
        snapshot: Snapshot of the cache.
        owner: Only request that may use it; None for all requests.
    """

    tokens: list[int]
    snapshot: Snapshot
    owner: str | None


class PrefixCache:
    """Snapshots, the least recently used first.

    Args:
        most: Number of snapshots kept for all requests; snapshots with an owner are not counted.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: list[_Entry] = []
        self._prompts: deque[list[int]] = deque(maxlen=_PROMPTS)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, tokens: list[int], take: Callable[[], Snapshot], owner: str | None) -> None:
        """Take a snapshot unless one of these tokens exists; another one may be released for it."""
        if any(entry.owner == owner and entry.tokens == tokens for entry in self._entries):
            return
        self._entries.append(_Entry(tokens, take(), owner))
        shared = [entry for entry in self._entries if entry.owner is None]
        if len(shared) > self._most:
            self._release(shared[0])

    def length(self, tokens: list[int], request: str) -> int:
        """Return the length of the longest snapshot that a sequence can start from."""
        entry = self._find(tokens, request)
        return 0 if entry is None else len(entry.tokens)

    def restore(self, tokens: list[int], request: str, row: int) -> int:
        """Restore the longest snapshot into an empty cache row; return its length, or 0."""
        entry = self._find(tokens, request)
        if entry is None:
            return 0
        self._entries.remove(entry)
        self._entries.append(entry)
        entry.snapshot.restore(row)
        return len(entry.tokens)

    def common_prefix(self, prompt: list[int]) -> int:
        """Return the length of the longest prefix shared with a recent prompt; remember the prompt.

        Returns:
            Less than the length of the prompt; 0 if the prefix is too short for a snapshot.
        """
        lengths = (_common(prompt[:-1], other) for other in self._prompts)
        longest = max(lengths, default=0)
        self._prompts.append(prompt)
        return longest if longest >= _SHORTEST else 0

    def reclaim(self, tokens: list[int] | None, request: str | None) -> bool:
        """Release the least recently used snapshot.

        Args:
            tokens: Keep the snapshot that a sequence of these tokens would start from; None keeps
                none.
            request: Request of this sequence.

        Returns:
            False if there was no snapshot to release.
        """
        kept = None if tokens is None or request is None else self._find(tokens, request)
        for entry in self._entries:
            if entry is not kept:
                self._release(entry)
                return True
        return False

    def forget(self, owner: str) -> None:
        """Release the snapshots of a request."""
        for entry in [entry for entry in self._entries if entry.owner == owner]:
            self._release(entry)

    def _find(self, tokens: list[int], request: str) -> _Entry | None:
        """Return the longest snapshot of a proper prefix, so that one token is left to compute."""
        usable = (
            entry
            for entry in self._entries
            if entry.owner in (None, request)
            and len(entry.tokens) < len(tokens)
            and entry.tokens == tokens[: len(entry.tokens)]
        )
        return max(usable, key=lambda entry: len(entry.tokens), default=None)

    def _release(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        entry.snapshot.release()


def _common(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix of two lists."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
