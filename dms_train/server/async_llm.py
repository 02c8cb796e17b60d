"""`AsyncLLM(path)`: one engine for the prompts of many coroutines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions, SamplingParams, named_options
from dms_train.inference.outputs import RequestOutput
from dms_train.inference.request_builder import Prompt
from dms_train.server.errors import ApiError
from dms_train.server.worker import EngineThread, Ticket


class AsyncLLM:
    """Model that continues the prompts of coroutines in one batch.

    The engine runs in its own thread inside `async with AsyncLLM(path) as llm:`.

    Args:
        model: As in `LLM`.
        options: Engine options; single values can be given by name instead.
        **overrides: Fields of `EngineOptions`.
    """

    def __init__(
        self, model: str | Path, options: EngineOptions | None = None, **overrides: Any
    ) -> None:
        engine = InferenceEngine(model, named_options(options, overrides))
        engine.capture()
        self._thread = EngineThread(engine)
        self._entered = self._closed = False

    async def __aenter__(self) -> AsyncLLM:
        if self._entered:
            raise InferenceError("AsyncLLM: enter it once; make another one")
        self._entered = True
        # a broken engine refuses requests by itself; nothing else has to end here
        self._thread.start(asyncio.get_running_loop(), lambda: None)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        await self._thread.stop()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt.

        A consumer that is slower than the engine skips outputs, never tokens. Closing the
        generator, or cancelling its task, aborts the request and frees its cache.

        Args:
            prompt: Text, token ids or `{"prompt_token_ids": [...]}`.
            sampling_params: Sampling parameters.
            priority: Lower values go first.

        Yields:
            All tokens so far; the last output is `finished`.

        Raises:
            InferenceError: The prompt is refused, its forward pass failed, or the context manager
                is not entered or was left.
        """
        if not self._entered or self._closed:
            raise InferenceError("AsyncLLM: use it inside `async with AsyncLLM(...) as llm:`")
        ticket = Ticket(changed=asyncio.Event())
        params = sampling_params or SamplingParams()
        try:
            await self._thread.add(ticket, prompt, params, priority, math.inf)
            finished = False
            while not finished:
                await ticket.changed.wait()
                ticket.changed.clear()
                output = ticket.output
                if ticket.failure is not None or output is None:
                    left = "AsyncLLM was left before the request had finished"
                    raise InferenceError(left if self._closed else str(ticket.failure))
                finished = output.finished
                yield output
        except ApiError:
            raise InferenceError(f"the engine is broken - {self._thread.broken}") from None
        finally:
            if not ticket.done:
                self._thread.abort(ticket)
