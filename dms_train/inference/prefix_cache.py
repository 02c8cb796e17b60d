"""Snapshots of cache rows, from which sequences with the same first tokens start.

The state of a cache after a token depends on the tokens up to it only. A sequence that begins with
the tokens of a snapshot therefore need not compute them again. A snapshot can be taken at any
token, but not be cut later: evicted tokens are gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dms_train.inference.cache.interface import Snapshot

_PROMPTS = 64  # recent ones that are compared with a new one
_SHORTEST = 16  # tokens of a common prefix that are worth a snapshot


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A snapshot.

    Attributes:
        tokens: What it holds.
        snapshot: Of the cache.
        owner: Request that may use it; None for all.
    """

    tokens: list[int]
    snapshot: Snapshot
    owner: str | None


class PrefixCache:
    """Snapshots, the least recently used first.

    Args:
        most: Number of snapshots that are kept for all requests; those of a request are besides.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: list[_Entry] = []
        self._prompts: deque[list[int]] = deque(maxlen=_PROMPTS)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, tokens: list[int], take: Callable[[], Snapshot], owner: str | None) -> None:
        """Take a snapshot, unless there is one of these tokens; another may be released for it."""
        if any(entry.owner == owner and entry.tokens == tokens for entry in self._entries):
            return
        self._entries.append(_Entry(tokens, take(), owner))
        shared = [entry for entry in self._entries if entry.owner is None]
        if len(shared) > self._most:
            self._release(shared[0])

    def length(self, tokens: list[int], request: str) -> int:
        """Tokens of the longest snapshot that a sequence of these tokens can start from."""
        found = self._find(tokens, request)
        return 0 if found is None else len(found.tokens)

    def restore(self, tokens: list[int], request: str, row: int) -> int:
        """Put that snapshot, if there is one, into an empty row. Returns its tokens."""
        found = self._find(tokens, request)
        if found is None:
            return 0
        self._entries.remove(found)
        self._entries.append(found)
        found.snapshot.restore(row)
        return len(found.tokens)

    def common_prefix(self, prompt: list[int]) -> int:
        """Most first tokens that a prompt shares with a recent one; it is a recent one then.

        Returns:
            Their number, less than the prompt's; 0 if they are too few for a snapshot.
        """
        lengths = (_common(prompt[:-1], other) for other in self._prompts)
        longest = max(lengths, default=0)
        self._prompts.append(prompt)
        return longest if longest >= _SHORTEST else 0

    def reclaim(self, tokens: list[int] | None, request: str | None) -> bool:
        """Release the least recently used snapshot. False if there is none.

        Args:
            tokens: The snapshot that a sequence of these tokens would start from is kept.
            request: The sequence's.
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
        """The longest snapshot of first tokens that leaves one to compute."""
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
    """Length of the common prefix of two lists."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
