"""Conversion of rows with messages, or with a prompt and its completion, to samples."""

from __future__ import annotations

from typing import Any

from dms_train.data.errors import DataError
from dms_train.data_prep.documents import Message, checked_messages
from dms_train.data_prep.rows import Row
from dms_train.data_prep.samples import Outcome, Sample, Trace

PAIR = ("prompt", "completion")
KEYS = ("uuid", "id")


def sample_of(row: Row, messages_key: str) -> Sample:
    """Return the sample of a row; a conversation without an assistant turn is rejected.

    Raises:
        DataError: The row holds no conversation, or a message without role or content.
    """
    messages = _messages(row, messages_key)
    key = next((str(row.values[name]) for name in KEYS if row.values.get(name) is not None), "")
    asked = "\n".join(message["content"] for message in messages if message["role"] == "user")
    sample = Sample(row.number, row.source, row.where, key, asked, [Trace(messages)])
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    if not any(text.strip() for text in said):
        sample.rejected = Outcome.MISSING_VALUE
    return sample


def _messages(row: Row, messages_key: str) -> list[Message]:
    if row.values.get(messages_key) is not None:
        return checked_messages(row.where, row.values[messages_key])
    if all(row.values.get(name) is not None for name in PAIR):
        prompt, completion = (row.values[name] for name in PAIR)
        if isinstance(prompt, list):
            begun = checked_messages(row.where, prompt)
        else:
            begun = checked_messages(row.where, [_turn("user", prompt)])
        if isinstance(completion, list):
            return begun + checked_messages(row.where, completion)
        return begun + checked_messages(row.where, [_turn("assistant", completion)])
    raise DataError(
        f"{row.where}: needs a column {messages_key}, or {' and '.join(PAIR)}; "
        "name another with --messages-key"
    )


def _turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}
