"""The thread that runs the engine, and the event loop's side of it.

`InferenceEngine` blocks and is not safe to share between threads, so only this thread touches it.
The event loop sends it calls through a queue. After each step the thread returns the outputs; a
reader that is slower than the engine finds the latest output only, which holds all tokens so far.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import SamplingParams
from dms_train.inference.outputs import RequestOutput
from dms_train.inference.request_builder import Prompt
from dms_train.observe.log import logger
from dms_train.server.errors import ApiError

Positions = list[list[list[int]]]  # [layers][KV heads][live tokens]


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A request of the engine as the event loop sees it.

    Attributes:
        changed: Set whenever something below changes; requests may share it.
        request_id: The engine's; None until it has accepted the request.
        output: The latest.
        positions: Live positions at that time, if they were requested and the cache keeps them.
        failure: Why the request ended without an output.
    """

    changed: asyncio.Event
    request_id: str | None = None
    output: RequestOutput | None = None
    positions: Positions | None = None
    failure: ApiError | None = None
    wants_positions: bool = field(default=False)

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.failure is not None or (self.output is not None and self.output.finished)


@dataclass(slots=True, kw_only=True)
class _Update:
    ticket: Ticket
    output: RequestOutput | None = None
    positions: Positions | None = None
    failure: ApiError | None = None

    def deliver(self) -> None:
        """On the event loop."""
        ticket = self.ticket
        if self.output is not None:
            ticket.output, ticket.positions = self.output, self.positions
        ticket.failure = ticket.failure or self.failure
        ticket.changed.set()


class EngineThread:
    """Runs an engine until `stop`.

    Args:
        engine: Used by the thread alone from `start` on.

    Attributes:
        allocated_bytes: Of the cache after the last step or abort.
        failures: Steps that raised an exception.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[str, Ticket] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.allocated_bytes = engine.allocated_bytes
        self.failures = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; outputs are passed to this event loop."""
        self._loop = loop
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step that runs; what still runs ends with 503."""
        self._calls.put(None)
        failure = ApiError(503, "the server stops")
        await asyncio.to_thread(self._thread.join)
        _deliver([_Update(ticket=ticket, failure=failure) for ticket in self._tickets.values()])
        self._tickets.clear()

    async def add(
        self, ticket: Ticket, prompt: Prompt, params: SamplingParams, priority: int, seconds: float
    ) -> None:
        """Give a request to the engine.

        Args:
            ticket: Takes its outputs.
            prompt: As in `InferenceEngine.add_request`.
            params: Likewise.
            priority: Likewise.
            seconds: Time that it has.

        Raises:
            InferenceError: The engine refuses it.
        """
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[None] = loop.create_future()

        def call() -> None:
            try:
                request_id = self._engine.add_request(
                    prompt,
                    params,
                    priority=priority,
                    timeout_s=seconds,
                    keep_cache=ticket.wants_positions,
                )
            except Exception as error:
                loop.call_soon_threadsafe(_settle, accepted, error)
                return
            self._tickets[request_id] = ticket
            ticket.request_id = request_id
            loop.call_soon_threadsafe(_settle, accepted, None)

        self._calls.put(call)
        try:
            await accepted
        except asyncio.CancelledError:
            self.abort(ticket)  # its call follows the one above
            raise

    def abort(self, ticket: Ticket) -> None:
        """Remove a request and free its cache before the next step."""

        def call() -> None:
            if ticket.request_id is not None:
                self._tickets.pop(ticket.request_id, None)
                self._engine.abort(ticket.request_id)
                self.allocated_bytes = self._engine.allocated_bytes

        self._calls.put(call)

    def _run(self) -> None:
        while self._make_calls():
            if self._engine.has_unfinished_requests():
                self._step()

    def _make_calls(self) -> bool:
        """Run the calls that wait; waits for one when there is nothing else to do."""
        try:
            call = self._calls.get(block=not self._engine.has_unfinished_requests())
            while call is not None:
                call()
                call = self._calls.get_nowait()
        except queue.Empty:
            return True
        return False

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
            updates = [
                self._update(output) for output in outputs if output.request_id in self._tickets
            ]
        except Exception:
            logger().exception("a step of the engine failed")
            updates = self._lost()
        self.allocated_bytes = self._engine.allocated_bytes
        assert self._loop is not None
        if updates:
            self._loop.call_soon_threadsafe(_deliver, updates)

    def _update(self, output: RequestOutput) -> _Update:
        ticket = self._tickets[output.request_id]
        positions = None
        if ticket.wants_positions:
            found = self._engine.live_positions(output.request_id)
            if found is not None:
                positions = [[head.tolist() for head in layer] for layer in found]
        if output.finished:
            del self._tickets[output.request_id]
            self._engine.abort(output.request_id)
        return _Update(ticket=ticket, output=output, positions=positions)

    def _lost(self) -> list[_Update]:
        """Failures for the requests that a failed step has aborted, or for all of them."""
        self.failures += 1
        lost = [known for known in self._tickets if not self._engine.has_request(known)]
        lost = lost or list(self._tickets)
        failure = ApiError(500, "the forward pass of this request failed; see the log")
        updates = []
        for request_id in lost:
            self._engine.abort(request_id)
            updates.append(_Update(ticket=self._tickets.pop(request_id), failure=failure))
        return updates


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _deliver(updates: list[_Update]) -> None:
    for item in updates:
        item.deliver()
