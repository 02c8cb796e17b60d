"""Messages that a chat template leaves out, and roles that it does not know."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment

from dms_train.hf.chat_messages import find_lost, with_known_roles

KNOWN = "{% for m in messages if m.role in ['user', 'assistant'] %}[{{ m.content }}]{% endfor %}"
# as templates of reasoning models: what precedes </think> is deleted
REASONING = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
# as of Mistral: the system message moves into the last turn of the user
MOVED = (
    "{% for m in messages[1:] %}{% if loop.last %}{{ messages[0].content }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def lost(template: str, *messages: dict[str, Any]) -> int | None:
    made = Environment().from_string(template)
    return find_lost(messages, lambda given: made.render(messages=given))


def test_a_lost_message_is_found_although_its_text_occurs_elsewhere() -> None:
    user, answer = message("user", "a b"), message("assistant", "yes")
    assert lost(KNOWN, user, answer) is None
    assert lost(KNOWN, message("system", "a"), user, answer) == 0
    assert lost(KNOWN, user, answer, message("tool", "yes"), message("developer", "b")) == 2
    assert lost(KNOWN, message("system", " \n"), user) is None  # nothing is lost with it


def test_a_message_that_is_cut_or_moved_is_not_lost() -> None:
    said = message("assistant", "<think>\nHm.\n</think>\nyes")
    assert lost(REASONING, message("user", "a"), said, message("user", "b")) is None
    assert lost(MOVED, message("system", "s"), message("user", "a"), message("user", "b")) is None


def test_a_developer_is_a_system_where_the_template_does_not_know_it() -> None:
    messages = [message("developer", "a"), message("user", "b")]
    assert with_known_roles(messages, "{% if m.role == 'system' %}") == [
        message("system", "a"),
        message("user", "b"),
    ]
    assert with_known_roles(messages, "{% if m.role == 'developer' %}") == messages
    assert messages[0]["role"] == "developer"
