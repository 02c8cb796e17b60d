"""HTTP connections with deadlines and a limit to their number.

uvicorn closes a connection that stays idle after an answer. It does not limit the time in which a
request arrives or an answer is read.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

BACKLOG = 128  # connections that wait to be accepted; asyncio accepts as many at a time
HEADER_SECONDS = 10.0  # time in which the header of a request must arrive
SEND_SECONDS = 30.0  # time in which a client must read some of the data sent
_SPARE = 256  # connections in addition to one per running or waiting request


def most_connections(requests: int) -> int:
    """Return the number of connections that may be open at a time.

    Connections use at most half of the process's file descriptors.

    Args:
        requests: Most requests that run or wait.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(requests + _SPARE, descriptors // 2)


class Connection(H11Protocol):
    """uvicorn's protocol with deadlines for connections.

    If there are more than `limit_concurrency` connections, the longest idle one is closed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrival: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # `pause_writing` as soon as any data is left
        self._limit_arrival()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._close_idle()

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request."""
        super().data_received(data)
        self._limit_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        super().connection_lost(exc)
        for timer in (self._arrival, self._sending):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        """Limit the time in which the client reads."""
        super().pause_writing()
        self._limit_sending()

    def resume_writing(self) -> None:
        """Stop the timer, because the client has read all data."""
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()

    @property
    def idle_until(self) -> float | None:
        """Return the time to close an idle connection; None while a request is answered."""
        timer = self._arrival or self.timeout_keep_alive_task
        return None if timer is None else timer.when()

    def _limit_arrival(self) -> None:
        """Limit the time to the next header, or to the rest of an unneeded body."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None
        elif not answering and self._arrival is None:
            self._arrival = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _limit_sending(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(SEND_SECONDS, self._require_progress, left)

    def _require_progress(self, left_before: int) -> None:
        if self.transport.get_write_buffer_size() < left_before:
            self._limit_sending()
        else:
            self.transport.abort()

    def _close_idle(self) -> None:
        """Close the connection that has waited longest for a request, maybe this one."""
        connections = cast("set[Connection]", self.connections)
        idle = [c for c in connections if c.idle_until is not None and not c.transport.is_closing()]
        min(idle, key=lambda c: c.idle_until or 0.0).transport.abort()
        self.logger.warning("too many connections: the oldest idle one is closed")
