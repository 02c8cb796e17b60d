"""Errors of the server: of its command, and of single requests."""

from __future__ import annotations

from typing import Any

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ServerError(ValueError):
    """Error that prevents the server from starting; its line says what to change."""


class ApiError(Exception):
    """Error with which a request is answered.

    Args:
        status: HTTP status.
        message: One line for the client, without text of a prompt.
        param: Field of the request that is wrong.
        code: Short name of the error for programs.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code = param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }
