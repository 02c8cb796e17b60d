"""How many sequences the server takes at a time, and when it accepts none."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

from dms_train.server.errors import ApiError

_MOST_WAIT_SECONDS = 60


class Admission:
    """Counts sequences from their arrival to their end. Used on the event loop only.

    Args:
        rows: Sequences that the engine computes at the same time.
        queue: Sequences that may wait for one of these rows.

    Attributes:
        draining: Whether new requests are refused.
        inside: Sequences that run or wait.
        rows: As given.
    """

    def __init__(self, rows: int, queue: int) -> None:
        self.draining = False
        self.inside = 0
        self.rows = rows
        self._queue = queue
        self._requests = 0
        self._seconds = 1.0  # mean time of a request, recent ones weighted most
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def enter(self, sequences: int) -> Iterator[None]:
        """Hold places for a request of so many sequences.

        Raises:
            ApiError: 503 while draining; 429 when the queue is full; 400 when it could never run.
        """
        if self.draining:
            raise ApiError(503, "the server stops; use another one", headers={"Retry-After": "5"})
        if sequences > self.rows + self._queue:
            most = self.rows + self._queue
            raise ApiError(400, f"{sequences} continuations: this server takes {most} at a time")
        if self.inside + sequences > self.rows + self._queue:
            wait = str(self._expected_wait())
            raise ApiError(
                429, f"the queue is full; try again in {wait} s", headers={"Retry-After": wait}
            )
        self.inside += sequences
        self._requests += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.inside -= sequences
            self._requests -= 1
            if not self._requests:
                self._empty.set()

    def note(self, seconds: float) -> None:
        """Record how long a request took."""
        self._seconds += 0.2 * (seconds - self._seconds)

    async def wait_until_empty(self) -> None:
        """Return when no request runs or waits."""
        await self._empty.wait()

    def _expected_wait(self) -> int:
        """Whole seconds until the sequences that wait now have their rows."""
        rounds = max(1.0, self.inside / self.rows - 1)
        return min(_MOST_WAIT_SECONDS, math.ceil(rounds * self._seconds))
