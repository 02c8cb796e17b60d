"""Text to tokens and back, from the files of a model directory, without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dms_train.hf.json_files import read_config, read_json
from dms_train.inference.errors import InferenceError

_UNSEEN = 8


class Tokenizer:
    """`tokenizer.json`, read by the tokenizers package."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @classmethod
    def load(cls, directory: Path) -> Tokenizer | None:
        """The tokenizer of a directory; None if it has no tokenizer.json.

        Raises:
            InferenceError: The tokenizers package is not installed.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            from tokenizers import Tokenizer as Inner
        except ImportError:
            raise InferenceError("text needs the tokenizers package; install it") from None
        return cls(Inner.from_file(str(path)))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids, with the tokenizer's special tokens around the text if `special`."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens."""
        text: str = self._inner.decode(ids, skip_special_tokens=True)
        return text

    def continuation(self, before: list[int], ids: list[int]) -> str:
        """Text of `ids` after `before`; a tokenizer may decode a first word differently."""
        head, whole = self.decode(before), self.decode(before + ids)
        return whole[len(head) :] if whole.startswith(head) else self.decode(ids)

    def reached(self, tokens: list[int], start: int, stops: tuple[str, ...]) -> bool:
        """Whether the last of `tokens`, generated from `start` on, completes one of the texts."""
        longest = max(len(stop.encode()) for stop in stops)
        # a token is at least a byte; _UNSEEN more allow for special tokens, which decode to nothing
        tail = self.decode(tokens[max(start, len(tokens) - longest - _UNSEEN) :])
        if not any(stop in tail for stop in stops):
            return False
        text = self.continuation(tokens[:start], tokens[start:])
        return until(text, stops) != text


def until(text: str, stops: tuple[str, ...]) -> str:
    """A text up to the first of the stops in it."""
    ends = [at for at in map(text.find, stops) if at >= 0]
    return text[: min(ends)] if ends else text


def read_stop_ids(directory: Path) -> frozenset[int]:
    """End-of-text tokens from generation_config.json, else config.json."""
    path = directory / "generation_config.json"
    stated = read_json(path).get("eos_token_id") if path.is_file() else None
    if stated is None:
        stated = read_config(directory).get("eos_token_id")
    if stated is None:
        return frozenset()
    return frozenset(stated if isinstance(stated, list) else [stated])
