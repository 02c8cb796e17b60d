"""Options of the server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dms_train.server.errors import ServerError

_MOST = {"port": 65535}
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#A-Z]+")  # lower case, as browsers send it


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Addresses and limits of a server.

    Attributes:
        host: Address to listen on.
        port: Port; 0 takes a free port.
        api_key: Key that clients must send as `Authorization: Bearer KEY`; None requires none.
        cors_origins: Origins of pages in browsers that may use the server; `*` allows all.
        max_queue: Number of sequences that may wait for a batch slot; further requests get 429.
        max_body_bytes: Maximum size of a request's body.
        max_prompt_tokens: Maximum length of one prompt; None applies the model's limit only.
        request_seconds: Time after which a request is ended.
        drain_seconds: Time limit of running requests after SIGTERM.
        default_chat_template_kwargs: Variables of the chat template, such as `enable_thinking` of
            Qwen3. Variables of a request replace them.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_queue: int = 128
    max_body_bytes: int = 4 * 2**20
    max_prompt_tokens: int | None = None
    request_seconds: float = 600.0
    drain_seconds: float = 30.0
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (
            ("port", 0),
            ("max_queue", 0),
            ("max_body_bytes", 1),
            ("max_prompt_tokens", 1),
            ("drain_seconds", 0),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= _MOST.get(name, float("inf")):
                raise ServerError(f"--{name.replace('_', '-')} {value}: {_range(name, least)}")
        if not self.request_seconds > 0:
            raise ServerError(f"--request-seconds {self.request_seconds}: above 0")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise ServerError("--api-key: ASCII characters that are not all spaces")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ServerError(
                    f"--cors-origin {origin}: give scheme, host and maybe port, without a path, "
                    "in lower case, such as https://example.org, or * for all"
                )


def _range(name: str, least: int) -> str:
    most = _MOST.get(name)
    return f"at least {least}" if most is None else f"from {least} to {most}"
