"""Chat messages to a prompt, with the template of the model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dms_train.hf.chat_messages import find_lost, with_known_roles
from dms_train.hf.json_files import read_json
from dms_train.hf.tokenizer_files import TOKENIZER_CONFIG, read_chat_tokenizer
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
        """Read the local files of a directory; code in it is never run.

        Raises:
            HFError: The directory has a template that cannot be read.
        """
        if not _has_template(directory):
            return cls(None)
        tokenizer = read_chat_tokenizer(directory)
        return cls(tokenizer if tokenizer.chat_template else None)

    def render(self, messages: list[dict[str, str]]) -> str:
        """Return the text that the model continues as the assistant.

        `developer` becomes `system` where the template does not name it.

        Raises:
            ApiError: 400 without a template, or when the template refuses the messages or leaves
                one out.
        """
        if self._tokenizer is None:
            raise ApiError(400, _NO_TEMPLATE, code="no_chat_template")
        messages = with_known_roles(messages, str(self._tokenizer.chat_template))
        try:
            text = self._apply(messages)
        except Exception as error:  # whatever a template raises about its messages
            reason = " ".join(str(error).split())[:200]
            raise ApiError(400, f"messages: the chat template refuses them: {reason}") from None
        lost = find_lost(messages, self._apply)
        if lost is not None:
            role = messages[lost]["role"]
            raise ApiError(
                400,
                f"messages.{lost}: the chat template leaves out this message of role {role!r}; "
                "use another role or order",
                param="messages",
            )
        return text

    def _apply(self, messages: list[dict[str, Any]]) -> str:
        assert self._tokenizer is not None
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text


def _has_template(directory: Path) -> bool:
    """Whether one of the files that may hold a template does."""
    if any((directory / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = directory / TOKENIZER_CONFIG
    return config.is_file() and "chat_template" in read_json(config)
