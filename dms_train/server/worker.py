"""Thread that runs the engine, and its requests on the event loop.

`InferenceEngine` blocks and is not thread-safe, so only this thread uses it. The event loop sends
calls to the thread through a queue. After each step the thread returns the outputs. A reader that
is slower than the engine finds only the latest output, with all tokens so far.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import SamplingParams
from dms_train.inference.outputs import RequestOutput
from dms_train.inference.request_builder import Prompt
from dms_train.observe.log import logger
from dms_train.server.errors import ApiError

Positions = list[list[list[int]]]  # [layers][KV heads][live tokens]
MOST_FAILURES = 5  # number of failed steps after which the engine counts as broken
_BROKEN = "the engine is broken; the server is shutting down, see its log"
_PROOF_STEPS = 3  # steps in a row with tokens after which the engine counts as working
_PAUSE_SECONDS = 0.1  # pause after a failed step; twice as long after each further one in a row


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """Request of the engine on the event loop.

    Attributes:
        changed: Event that is set whenever a field below changes; requests may share it.
        request_id: Id from the engine; None until the engine has accepted the request.
        output: Latest output.
        positions: Live positions at that time, if they were requested and the cache keeps them.
        failure: Reason why the request ended without an output.
        wants_positions: True if `positions` are requested.
        on_done: Called on the event loop after the last change.
    """

    changed: asyncio.Event
    request_id: str | None = None
    output: RequestOutput | None = None
    positions: Positions | None = None
    failure: ApiError | None = None
    wants_positions: bool = False
    on_done: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """Return whether the request has ended."""
        return self.failure is not None or (self.output is not None and self.output.finished)


@dataclass(slots=True, kw_only=True)
class _Update:
    ticket: Ticket
    output: RequestOutput | None = None
    positions: Positions | None = None
    failure: ApiError | None = None

    def deliver(self) -> None:
        """Pass the update to its request, on the event loop."""
        ticket = self.ticket
        if self.output is not None:
            ticket.output, ticket.positions = self.output, self.positions
        ticket.failure = ticket.failure or self.failure
        ticket.changed.set()
        if ticket.done and ticket.on_done is not None:
            ticket.on_done()


class EngineThread:
    """Thread that runs an engine until `stop`.

    A step that fails ends its requests. The engine counts as broken after `MOST_FAILURES` failed
    steps without a proof between them that it works. All requests then end, further ones are
    refused, and no further step is computed. A proof is a finished request, or `_PROOF_STEPS` steps
    in a row that return tokens. One good step proves nothing: on a GPU it may only launch a later
    failure.

    Args:
        engine: Engine; from `start` on, only the thread may use it.

    Attributes:
        allocated_bytes: Bytes of the cache after the last step or abort.
        failures: Number of steps that raised an exception.
        broken: Last error of a broken engine; otherwise None.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[str, Ticket] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_broken: Callable[[], None] | None = None
        self._in_a_row = 0  # failed steps since the last proof that the engine works
        self._returned = 0  # steps in a row that returned tokens
        self.allocated_bytes = engine.allocated_bytes
        self.failures = 0
        self.broken: str | None = None

    def start(self, loop: asyncio.AbstractEventLoop, on_broken: Callable[[], None]) -> None:
        """Start the thread.

        Args:
            loop: Event loop that receives outputs.
            on_broken: Called on the event loop once the engine is broken.
        """
        self._loop, self._on_broken = loop, on_broken
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the current step; unfinished requests end with 503."""
        self._calls.put(None)
        failure = ApiError(503, "the server is shutting down")
        await asyncio.to_thread(self._thread.join)
        _deliver([_Update(ticket=ticket, failure=failure) for ticket in self._tickets.values()])
        self._tickets.clear()

    async def add(
        self, ticket: Ticket, prompt: Prompt, params: SamplingParams, priority: int, seconds: float
    ) -> None:
        """Send a request to the engine.

        Args:
            ticket: Receives the outputs.
            prompt: See `InferenceEngine.add_request`.
            params: See `InferenceEngine.add_request`.
            priority: See `InferenceEngine.add_request`.
            seconds: Time limit of the request.

        Raises:
            InferenceError: The engine refuses it.
            ApiError: 503 if the engine is broken.
        """
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[None] = loop.create_future()

        def call() -> None:
            try:
                if self.broken is not None:
                    raise ApiError(503, _BROKEN)
                request_id = self._engine.add_request(
                    prompt,
                    params,
                    priority=priority,
                    timeout_s=seconds,
                    keep_cache=ticket.wants_positions,
                )
            except Exception as error:
                loop.call_soon_threadsafe(_resolve_future, accepted, error)
                return
            self._tickets[request_id] = ticket
            ticket.request_id = request_id
            loop.call_soon_threadsafe(_resolve_future, accepted, None)

        self._calls.put(call)
        try:
            await accepted
        except asyncio.CancelledError:
            self.abort(ticket)  # the engine sees this call after the one above
            raise

    def abort(self, ticket: Ticket) -> None:
        """Remove a request and free its cache before the next step."""

        def call() -> None:
            if ticket.request_id is not None:
                self._tickets.pop(ticket.request_id, None)
                self._free(ticket.request_id)

        self._calls.put(call)

    def _run(self) -> None:
        while self._make_calls():
            if self._has_work:
                self._step()

    @property
    def _has_work(self) -> bool:
        return self.broken is None and self._engine.has_unfinished_requests()

    def _make_calls(self) -> bool:
        """Run the queued calls; wait for one if there is nothing else to do."""
        try:
            call = self._calls.get(block=not self._has_work)
            while call is not None:
                call()
                call = self._calls.get_nowait()
        except queue.Empty:
            return True
        return False

    def _step(self) -> None:
        updates: list[_Update] = []
        failures = self.failures
        try:
            for output in self._engine.step():
                if output.request_id in self._tickets:
                    # one by one, so that earlier outputs are kept if a later one fails
                    updates.append(self._update(output))  # noqa: PERF401
            self.allocated_bytes = self._engine.allocated_bytes
            self._note_success(updates)
        except Exception as error:
            logger().exception("a step of the engine failed")
            updates += self._lost(error)
        if updates:
            self._call_on_loop(_deliver, updates)
        if self.broken is not None:
            assert self._on_broken is not None
            self._call_on_loop(self._on_broken)
        elif self.failures > failures:
            time.sleep(_PAUSE_SECONDS * 2 ** (self._in_a_row - 1))

    def _call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *arguments)

    def _update(self, output: RequestOutput) -> _Update:
        ticket = self._tickets[output.request_id]
        positions = None
        if ticket.wants_positions:
            live = self._engine.live_positions(output.request_id)
            if live is not None:
                positions = [[head.tolist() for head in layer] for layer in live]
        if output.finished:
            del self._tickets[output.request_id]
            self._free(output.request_id)
        return _Update(ticket=ticket, output=output, positions=positions)

    def _note_success(self, updates: list[_Update]) -> None:
        self._returned += bool(updates)
        ended = any(item.output is not None and item.output.finished for item in updates)
        if ended or self._returned >= _PROOF_STEPS:
            self._in_a_row = 0

    def _lost(self, error: Exception) -> list[_Update]:
        """Return failures for the requests aborted by a failed step, or for all requests."""
        self.failures += 1
        self._in_a_row += 1
        self._returned = 0
        if self._in_a_row == MOST_FAILURES:
            self.broken = f"{type(error).__name__}: {error}"
        lost = [known for known in self._tickets if not self._engine.has_request(known)]
        if self.broken is not None or not lost:
            lost = list(self._tickets)
        failure = ApiError(500, "the forward pass of this request failed; see the log")
        updates = []
        for request_id in lost:
            updates.append(_Update(ticket=self._tickets.pop(request_id), failure=failure))
            self._free(request_id)
        return updates

    def _free(self, request_id: str) -> None:
        """Abort a request in the engine; log an error."""
        try:
            self._engine.abort(request_id)
            self.allocated_bytes = self._engine.allocated_bytes
        except Exception:
            logger().exception("the cache of a request cannot be freed")


def _resolve_future(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _deliver(updates: list[_Update]) -> None:
    for item in updates:
        item.deliver()
