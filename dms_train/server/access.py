"""Middleware of every request: its id, the API key, the log line, unexpected errors."""

from __future__ import annotations

import hmac
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dms_train.observe.log import logger
from dms_train.server.errors import ApiError
from dms_train.server.metrics import Metrics

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_OPEN = frozenset({"/", "/page.css", "/page.js", "/health", "/metrics"})


class Access:
    """ASGI middleware around all routes.

    Args:
        app: Wrapped application.
        api_key: Key required by every route except the page, `/health` and `/metrics`; None
            requires none.
        metrics: Counters of the answers.
        routes: Known paths; only they become labels of metrics.
    """

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, metrics: Metrics, routes: frozenset[str]
    ) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes
        self._api_key = None if api_key is None else api_key.strip().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, headers = time.monotonic(), Headers(scope=scope)
        request_id = _request_id(headers)
        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "notes": []}
        statuses: list[int] = []
        named = _naming(send, request_id, statuses)
        try:
            await self._answer(scope, headers, receive, named)
        except Exception:  # a bug must not end the server
            logger().exception("request %s failed", request_id)
            if not statuses:
                error = ApiError(500, "an error of the server; see its log")
                await JSONResponse(error.body(), 500)(scope, receive, named)
        finally:
            self._log(scope, statuses, time.monotonic() - begin)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if scope["path"] in _OPEN or self._allows(headers.get("authorization", "")):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        response = JSONResponse(error.body(), 401, {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def _allows(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        if self._api_key is None:
            return True
        equal = hmac.compare_digest(key.strip().encode("latin-1"), self._api_key)
        return equal and scheme.lower() == "bearer"

    def _log(self, scope: Scope, statuses: list[int], seconds: float) -> None:
        path: str = scope["path"]
        route = "/v1/models" if path.startswith("/v1/models/") else path
        route = route if route in self._routes else "other"
        status = statuses[0] if statuses else 499  # the client left before an answer
        self._metrics.answered(route, status)
        if route in ("/health", "/metrics") and status == 200:
            return
        state = scope["state"]
        notes = "".join(f" {note}" for note in state["notes"])
        logger().info(
            "%s %s %s %d %.3f s%s",
            state["request_id"],
            scope["method"],
            route,
            status,
            seconds,
            notes,
        )


def _request_id(headers: Headers) -> str:
    """Return the client's request id if it is safe in a log, otherwise a new one."""
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else uuid.uuid4().hex


def _naming(send: Send, request_id: str, statuses: list[int]) -> Send:
    """Return a `send` that adds the id to the answer and records its status."""

    async def _send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
            MutableHeaders(scope=message)["X-Request-Id"] = request_id
        await send(message)

    return _send
