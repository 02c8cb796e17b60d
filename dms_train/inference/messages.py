"""Chat messages as in OpenAI's API, checked and reduced to the fields of a chat template.

A null or empty field counts as absent, so that clients can send an answer back in the next turn. An
unsupported field that would change the result is refused.
"""

from __future__ import annotations

from typing import Any

from dms_train.inference.errors import InferenceError

_ROLES = ("system", "developer", "user", "assistant")
_FOR_TEMPLATES = ("name", "reasoning_content")  # texts besides the content
_WITHOUT_EFFECT = ("annotations", "prompt_cache_breakpoint")
_NO_TOOLS = "tool calls are not supported; send text messages only"
_REASONS = {
    "tool_calls": _NO_TOOLS,
    "tool_call_id": _NO_TOOLS,
    "function_call": _NO_TOOLS,
    "audio": "only text is supported",
    "refusal": "send the text of a refusal as content",
}
_UNKNOWN = "not a known field of a message; leave it out"


def plain_messages(messages: Any) -> list[dict[str, str]]:
    """Check the messages of a chat.

    Args:
        messages: Objects with `role` and `content`; the content is a text or a list of text parts.

    Returns:
        `role` and `content` of each message as texts, and `name` and `reasoning_content` if given.

    Raises:
        InferenceError: A message is malformed or has content other than text. The error names the
            field, such as `messages.2.tool_calls`.
    """
    if not isinstance(messages, list) or not messages:
        raise InferenceError("messages: give a list of at least one message")
    return [_plain(message, f"messages.{index}") for index, message in enumerate(messages)]


def _plain(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise InferenceError(f"{where}: give an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        reason = _NO_TOOLS if role in ("tool", "function") else f"one of {', '.join(_ROLES)}"
        raise InferenceError(f"{where}.role={_shown(role)}: {reason}")
    if content is None and role == "assistant":
        content = ""
    plain = {"role": role, "content": _text(content, f"{where}.content")}
    for field in _given(message, ("role", "content")):
        if field not in _FOR_TEMPLATES:
            raise InferenceError(f"{where}.{_name(field)}: {_REASONS.get(field, _UNKNOWN)}")
        if not isinstance(message[field], str):
            raise InferenceError(f"{where}.{field}={_shown(message[field])}: give a text")
        plain[field] = message[field]
    return plain


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InferenceError(f"{where}={_shown(content)}: give a text or a list of text parts")
    return "".join(_part_text(part, f"{where}.{index}") for index, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise InferenceError(f'{where}: give an object {{"type": "text", "text": ...}}')
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise InferenceError(f"{where}.type={_shown(kind)}: only text is supported")
    if not isinstance(text, str):
        raise InferenceError(f"{where}.text={_shown(text)}: give a text")
    for field in _given(part, ("type", "text")):
        raise InferenceError(f"{where}.{_name(field)}: not a known field of a part; leave it out")
    return text


def _given(item: dict[Any, Any], known: tuple[str, ...]) -> list[Any]:
    """Return the fields besides `known` that have a value and an effect."""
    return [
        field
        for field, value in item.items()
        if field not in known and field not in _WITHOUT_EFFECT and value not in (None, "", [], {})
    ]


def _name(field: Any) -> str:
    return str(field)[:100]


def _shown(value: Any) -> str:
    """Return a value as shown in an error; objects and long texts are shortened."""
    if value is None:
        return "null"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
