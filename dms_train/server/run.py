"""Life of a server, from loading the model to the end of the last request."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from dms_train.hf.directory import resolve
from dms_train.inference.chat import ChatTemplate
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.observe.log import adopt, logger
from dms_train.server.admission import Admission
from dms_train.server.app import Api, ServedModel, build_app
from dms_train.server.connections import BACKLOG, Connection, most_connections
from dms_train.server.errors import ServerError
from dms_train.server.metrics import Metrics
from dms_train.server.options import ServerOptions
from dms_train.server.worker import MOST_FAILURES, EngineThread

_CLOSING_SECONDS = 5
_BROKEN_SECONDS = 2.0  # time between a broken engine and the end, to answer failed requests


def serve(model: str, name: str, engine_options: EngineOptions, options: ServerOptions) -> int:
    """Load a model and serve it until SIGTERM or SIGINT.

    Args:
        model: Directory or hub id (local cache only).
        name: Name of the model in requests and answers.
        engine_options: Engine options.
        options: Address and limits.

    Returns:
        Exit code: 0 after a signal, 1 when the engine is broken.

    Raises:
        ServerError: The address cannot be used.
        InferenceError: The model or an option cannot be used.
    """
    for library in ("asyncio", "uvicorn.error"):
        adopt(library)
    with bound_socket(options) as sock:
        engine = InferenceEngine(model, engine_options)
        served = describe(engine, resolve(model), name)
        served.template.check_variables(options.default_chat_template_kwargs)
        warm_up(engine)
        return asyncio.run(_until_signal(engine, served, options, sock))


def warm_up(engine: InferenceEngine) -> None:
    """Capture all decode steps and compute two tokens, so that no request waits for compilation."""
    engine.capture()
    request_id = engine.add_request([0], SamplingParams(max_tokens=2, ignore_eos=True))
    while engine.has_request(request_id):
        engine.step()


def bound_socket(options: ServerOptions) -> socket.socket:
    """Return a socket that is bound to the address of the options but does not listen yet.

    Raises:
        ServerError: The address is in use or does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((options.host, options.port))
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise ServerError(
            f"{options.host} port {options.port}: {reason}; choose --host and --port"
        ) from None
    return sock


def describe(engine: InferenceEngine, directory: Path, name: str) -> ServedModel:
    """Return the facts about a loaded model that the routes need."""
    return ServedModel(
        name=name,
        longest=engine.longest,
        vocabulary=engine.architecture.vocab_size,
        tokenizer=engine.tokenizer,
        template=ChatTemplate.load(directory),
        created=int(time.time()),
    )


class Server:
    """HTTP server of an engine, from the first request to the last.

    Args:
        engine: Used by this server alone.
        model: Facts about the model that the routes need.
        options: Limits of the server.

    Attributes:
        admission: Admission of sequences.
    """

    def __init__(self, engine: InferenceEngine, model: ServedModel, options: ServerOptions) -> None:
        self.admission = Admission(engine.options.max_num_seqs, options.max_queue)
        self._name, self._drain_seconds = model.name, options.drain_seconds
        self._thread = EngineThread(engine)
        metrics = self._metrics()
        api = Api(model, self._thread, options, self.admission, metrics)
        config = uvicorn.Config(
            build_app(api, options, metrics),
            http=Connection,
            backlog=BACKLOG,
            # uvicorn refuses requests at this number; idle connections are closed before
            limit_concurrency=most_connections(self.admission.most) + 1,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=_CLOSING_SECONDS,
        )
        self._http = _Http(config)
        self._hurry = asyncio.Event()
        self._drained: asyncio.Task[None] | None = None

    async def run(self, sock: socket.socket) -> None:
        """Serve on a bound socket until `stop` was called and running requests have finished.

        A broken engine ends the server too.
        """
        self._thread.start(asyncio.get_running_loop(), self._end_broken)
        host, port = sock.getsockname()[:2]
        sock.listen(BACKLOG)
        logger().info("serving %s on http://%s:%d", self._name, host, port)
        try:
            await self._http.serve(sockets=[sock])
        finally:
            await (self._thread.stop() if self._drained is None else self._drained)

    def stop(self) -> None:
        """Refuse new requests and end after the running ones; a second call ends at once.

        Called on the event loop.
        """
        if self._drained is not None:
            self._hurry.set()
            return
        self.admission.draining = True
        running, seconds = self.admission.inside, self._drain_seconds
        logger().info("stopping: %d sequences may take %g s more", running, seconds)
        self._drained = asyncio.get_running_loop().create_task(self._drain())

    @property
    def broken(self) -> bool:
        """True once the engine counts as broken."""
        return self._thread.broken is not None

    def _end_broken(self) -> None:
        """Refuse requests, wait until failed requests are answered, and end."""
        self.admission.draining = True
        logger().error(
            "%d steps failed and the engine did no work between them; the server shuts down - %s",
            MOST_FAILURES,
            self._thread.broken,
        )
        loop = asyncio.get_running_loop()
        loop.call_later(_BROKEN_SECONDS, setattr, self._http, "should_exit", True)

    async def _drain(self) -> None:
        ends = [
            asyncio.ensure_future(self.admission.wait_until_empty()),
            asyncio.ensure_future(self._hurry.wait()),
        ]
        await asyncio.wait(ends, timeout=self._drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await self._thread.stop()
        self._http.should_exit = True

    def _metrics(self) -> Metrics:
        metrics, admission, thread = Metrics(), self.admission, self._thread
        watch, rows = metrics.watch, admission.rows
        watch("dms_sequences_running", "With a cache row", lambda: min(admission.inside, rows))
        watch("dms_sequences_waiting", "Without one", lambda: max(0, admission.inside - rows))
        watch("dms_cache_allocated_bytes", "Of the KV cache", lambda: thread.allocated_bytes)
        watch("dms_failed_steps", "Steps that raised an exception", lambda: thread.failures)
        return metrics


class _Http(uvicorn.Server):
    """uvicorn server without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: signal handlers do not change."""
        yield


async def _until_signal(
    engine: InferenceEngine, model: ServedModel, options: ServerOptions, sock: socket.socket
) -> int:
    server, loop = Server(engine, model, options), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    await server.run(sock)
    return int(server.broken)
