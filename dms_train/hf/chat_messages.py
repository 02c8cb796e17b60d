"""Chat messages that a template must not lose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Private-use characters, which no template writes.
_PLACEHOLDER = "\ue000message {}\ue001"


def find_lost(
    messages: Sequence[Mapping[str, Any]], render: Callable[[list[dict[str, Any]]], str]
) -> int | None:
    """Return the index of the first message whose content a chat template leaves out.

    Most templates have a branch for each role that they know and write nothing for another one.
    Parts of a content may be left out, such as earlier reasoning. The messages are rendered once
    more with placeholders, because a short content is found in any text.

    Args:
        messages: `role` and `content` of each, and further keys of the template.
        render: Applies the template to messages.

    Returns:
        None if nothing is lost. A message without content cannot be lost.
    """
    names = [_PLACEHOLDER.format(number) for number in range(len(messages))]
    hidden = [{**m, "content": name} for m, name in zip(messages, names, strict=True)]
    try:
        text = render(hidden)
    except Exception:  # a template may raise anything, although it accepted the messages
        return None
    pairs = zip(messages, names, strict=True)
    lost = (i for i, (m, name) in enumerate(pairs) if m["content"].strip() and name not in text)
    return next(lost, None)


def with_known_roles(messages: Sequence[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Replace the role `developer` by `system`, unless the template names `developer`.

    OpenAI's clients send `developer` where they sent `system` before.
    """
    if "developer" in template:
        return list(messages)
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
