"""Admission of sequences: limits how many wait and run, and refuses others."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dms_train.server.errors import ApiError

_MOST_WAIT_SECONDS = 60


class Admission:
    """Counter of requests and of sequences in the engine. Used on the event loop only.

    Args:
        rows: Number of sequences that the engine computes at the same time.
        queue: Number of sequences that may wait for a batch slot.

    Attributes:
        draining: True if new requests are refused.
        inside: Number of sequences that run or wait in the engine.
        rows: Number of batch slots.
        most: Largest value of `inside`.
    """

    def __init__(self, rows: int, queue: int) -> None:
        self.draining = False
        self.inside = 0
        self.rows = rows
        self.most = rows + queue
        self._requests = 0
        self._seconds = 1.0  # mean time of a request, recent ones weighted most
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def enter(self, sequences: int) -> Iterator[Callable[[], None]]:
        """Admit a request with this many sequences while the context is open.

        Returns:
            Function that releases the sequences early. Call it when the engine has finished,
            because a client may take long to read the answer.

        Raises:
            ApiError: 503 while draining; 429 when the queue is full; 400 when the request can never
                run.
        """
        if self.draining:
            raise ApiError(
                503, "the server is shutting down; use another one", headers={"Retry-After": "5"}
            )
        if sequences > self.most:
            raise ApiError(
                400, f"{sequences} continuations: this server takes {self.most} at a time"
            )
        if self.inside + sequences > self.most:
            wait = str(self._expected_wait())
            raise ApiError(
                429, f"the queue is full; try again in {wait} s", headers={"Retry-After": wait}
            )
        self.inside += sequences
        self._requests += 1
        self._empty.clear()
        begin, held = time.monotonic(), [sequences]

        def leave() -> None:
            if held:
                self.inside -= held.pop()
                self._seconds += 0.2 * (time.monotonic() - begin - self._seconds)

        try:
            yield leave
        finally:
            leave()
            self._requests -= 1
            if not self._requests:
                self._empty.set()

    async def wait_until_empty(self) -> None:
        """Return when all requests are answered."""
        await self._empty.wait()

    def _expected_wait(self) -> int:
        """Return the seconds, rounded up, until the sequences that wait now have batch slots."""
        rounds = max(1.0, self.inside / self.rows - 1)
        return min(_MOST_WAIT_SECONDS, math.ceil(rounds * self._seconds))
