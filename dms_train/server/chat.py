"""Chat messages to a prompt, with the template of the model directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dms_train.observe.log import logger
from dms_train.server.errors import ApiError

_NO_TEMPLATE = "the model has no chat template; send a prompt to /v1/completions"


class ChatTemplate:
    """The template of a model, run by transformers in Jinja's sandbox.

    Args:
        tokenizer: Of transformers; None for a model without a template.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """Read the local files of a directory; code in it is never run."""
        if not _has_template(directory):
            return cls(None)
        try:
            # this class reads tokenizer files only; AutoTokenizer reads the model's config too
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                os.fspath(directory), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # no transformers, or files that it cannot read
            logger().warning("the chat template cannot be read: %s", error)
            return cls(None)
        return cls(tokenizer if tokenizer.chat_template else None)

    def render(self, messages: list[dict[str, str]]) -> str:
        """The text that the model continues as the assistant.

        Raises:
            ApiError: 400 without a template, or when the template refuses the messages.
        """
        if self._tokenizer is None:
            raise ApiError(400, _NO_TEMPLATE, code="no_chat_template")
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # whatever a template raises about its messages
            reason = " ".join(str(error).split())[:200]
            raise ApiError(400, f"messages: the chat template refuses them: {reason}") from None
        return text


def _has_template(directory: Path) -> bool:
    """Whether one of the files that may hold a template does."""
    if any((directory / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = directory / "tokenizer_config.json"
    return config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")
