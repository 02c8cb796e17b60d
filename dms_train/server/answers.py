"""Answers in OpenAI's format, whole and as chunks of a stream."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, Protocol

from dms_train.inference.tokenizer import Tokenizer
from dms_train.server.generation import KVView, Part, TokenEntry

Json = dict[str, Any]


class AnswerShape(Protocol):
    """Format in which one route writes continuations."""

    def opening(self, index: int) -> Json | None:
        """Return the chunk choice that precedes a continuation; None for none."""
        ...

    def chunk(self, part: Part) -> Json:
        """Return a choice of a chunk."""
        ...

    def choice(self, index: int, parts: list[Part]) -> Json:
        """Return a choice of a whole answer."""
        ...

    def envelope(self, *, chunk: bool) -> Json:
        """Return everything except choices and usage."""
        ...


class _Shape:
    prefix = ""
    names = ("", "")  # object names of a whole answer and of a chunk

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer | None) -> None:
        self._id, self._model = f"{self.prefix}-{request_id}", model
        self._created = int(time.time())
        self._tokenizer = tokenizer

    def envelope(self, *, chunk: bool) -> Json:
        """Return everything except choices and usage."""
        return {
            "id": self._id,
            "object": self.names[chunk],
            "created": self._created,
            "model": self._model,
        }

    def _extension(self, view: KVView | None) -> Json:
        """Return `kv` of a chunk."""
        return {} if view is None else {"kv": asdict(view)}

    def _shown(self, token: int, prefix: str = "") -> tuple[str, bytes | None]:
        """Return text and bytes of a token; incomplete characters are as in OpenAI's API."""
        if self._tokenizer is None:
            return f"token_id:{token}", None
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in data), data


class CompletionShape(_Shape):
    """Answers of `/v1/completions`."""

    prefix = "cmpl"
    names = ("text_completion", "text_completion")

    def opening(self, index: int) -> Json | None:
        """Return None, because a text needs no opening."""
        return None

    def chunk(self, part: Part) -> Json:
        """Return a choice of a chunk."""
        return {
            "index": part.index,
            "text": part.text,
            "logprobs": self._logprobs(part.entries),
            "finish_reason": part.finish_reason,
            **self._extension(part.kv),
        }

    def choice(self, index: int, parts: list[Part]) -> Json:
        """Return a choice of a whole answer."""
        return self.chunk(_joined(index, parts))

    def _logprobs(self, entries: list[TokenEntry] | None) -> Json | None:
        if entries is None:
            return None
        return {
            "tokens": [self._piece(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob if entry else None for _, entry in entries],
            "top_logprobs": [self._by_piece(entry.top) if entry else None for _, entry in entries],
            "text_offset": [entry.text_offset if entry else 0 for _, entry in entries],
        }

    def _piece(self, token: int) -> str:
        return self._shown(token, "bytes:")[0]

    def _by_piece(self, top: dict[int, float]) -> dict[str, float]:
        """Return log-probabilities by text; further tokens of the same text are named by id."""
        values: dict[str, float] = {}
        for token, value in top.items():
            piece = self._piece(token)
            values[f"token_id:{token}" if piece in values else piece] = value
        return values


class ChatShape(_Shape):
    """Answers of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    names = ("chat.completion", "chat.completion.chunk")

    def opening(self, index: int) -> Json | None:
        """Return the opening chunk, which has the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, part: Part) -> Json:
        """Return a choice of a chunk."""
        return {
            "index": part.index,
            "delta": {"content": part.text} if part.text else {},
            "logprobs": self._logprobs(part.entries),
            "finish_reason": part.finish_reason,
            **self._extension(part.kv),
        }

    def choice(self, index: int, parts: list[Part]) -> Json:
        """Return a choice of a whole answer."""
        whole = _joined(index, parts)
        return {
            "index": index,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            "logprobs": self._logprobs(whole.entries),
            "finish_reason": whole.finish_reason,
        }

    def _logprobs(self, entries: list[TokenEntry] | None) -> Json | None:
        if entries is None:
            return None
        content = [
            {
                **self._token(token, entry.logprob),
                "top_logprobs": [self._token(t, v) for t, v in entry.top.items()],
            }
            for token, entry in entries
            if entry is not None
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> Json:
        text, data = self._shown(token)
        return {"token": text, "logprob": logprob, "bytes": None if data is None else list(data)}


def _joined(index: int, parts: list[Part]) -> Part:
    """Join the parts of one continuation."""
    entries = [entry for part in parts for entry in part.entries or ()]
    return Part(
        index=index,
        text="".join(part.text for part in parts),
        entries=entries if parts and parts[0].entries is not None else None,
        finish_reason=parts[-1].finish_reason if parts else None,
    )
