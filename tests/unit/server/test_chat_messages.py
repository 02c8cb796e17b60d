"""Messages and template variables of chats: what OpenAI's client sends and gets back."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import openai
import pytest
from openai.types.chat import (
    ChatCompletionMessage,
    chat_completion_assistant_message_param,
    chat_completion_content_part_refusal_param,
    chat_completion_content_part_text_param,
    chat_completion_developer_message_param,
    chat_completion_function_message_param,
    chat_completion_system_message_param,
    chat_completion_tool_message_param,
    chat_completion_user_message_param,
)

from dms_train import LLM, SamplingParams
from dms_train.inference.messages import plain_messages
from tests.support import launch, served_model
from tests.support.served_model import NAME, Running

ROUTE = "/v1/chat/completions"
ASKED = {"role": "user", "content": "seven old birds"}
ANSWERED = {"role": "assistant", "content": "the river"}
OPTIONS: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 8}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CITATION = {"start_index": 0, "end_index": 3, "title": "t", "url": "http://localhost"}
BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
# by field, values that are without effect, and values that are refused
FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    "refusal": ([None, ""], ["I cannot help with that."]),
    "tool_calls": ([None, []], [[CALL]]),
    "function_call": ([None], [{"name": "f", "arguments": "{}"}]),
    "audio": ([None], [{"id": "a"}]),
    "annotations": ([None, [], [{"type": "url_citation", "url_citation": CITATION}]], []),
    "reasoning_content": ([None, ""], [5]),  # a text acts, see below
    "name": ([None, "", "ann"], [5]),  # this template reads no names
    "tool_call_id": ([None, ""], ["c"]),
    "thoughts": ([None, "", [], {}], ["x"]),  # a field that OpenAI does not have
}
MESSAGES = {
    "assistant": (chat_completion_assistant_message_param, "ChatCompletionAssistantMessageParam"),
    "user": (chat_completion_user_message_param, "ChatCompletionUserMessageParam"),
    "system": (chat_completion_system_message_param, "ChatCompletionSystemMessageParam"),
    "developer": (chat_completion_developer_message_param, "ChatCompletionDeveloperMessageParam"),
    "tool": (chat_completion_tool_message_param, "ChatCompletionToolMessageParam"),
    "function": (chat_completion_function_message_param, "ChatCompletionFunctionMessageParam"),
}


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model)


def answer(server: Running, messages: list[Any], **changes: Any) -> tuple[int, str]:
    """Status, and the text or the error of a chat."""
    status, _, body = server.ask(ROUTE, {**OPTIONS, "messages": messages, **changes})
    if status == 200:
        return status, body["choices"][0]["message"]["content"]
    assert "\n" not in body["error"]["message"]
    return status, body["error"]["message"]


def test_the_answer_of_the_client_is_the_next_message(server):
    client = server.client()
    messages: list[Any] = [ASKED]
    plain: list[Any] = [ASKED]
    for _ in range(3):
        found = client.chat.completions.create(messages=messages, **OPTIONS).choices[0].message
        assert found.content == answer(server, plain)[1]
        messages += [found, ASKED]
        plain += [{"role": "assistant", "content": found.content}, ASKED]
    # with every field of the client's class, as `model_dump` writes it
    dumped = [ASKED, ChatCompletionMessage(**ANSWERED).model_dump(), ASKED]
    assert answer(server, dumped) == answer(server, [ASKED, ANSWERED, ASKED])


def test_the_parts_of_a_streamed_answer_are_the_next_message(server):
    stream = server.client().chat.completions.create(messages=[ASKED], stream=True, **OPTIONS)
    deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    whole = {**deltas[0].model_dump(), "content": "".join(d.content or "" for d in deltas)}
    assert whole["content"] == answer(server, [ASKED])[1]
    plain = {"role": "assistant", "content": whole["content"]}
    assert answer(server, [ASKED, whole, ASKED]) == answer(server, [ASKED, plain, ASKED])


def test_every_field_of_openais_messages_is_in_the_table():
    known = {"role", "content", *FIELDS}
    for module, name in MESSAGES.values():
        assert set(get_type_hints(getattr(module, name))) <= known
    assert set(ChatCompletionMessage.model_fields) <= known
    for module, name in (
        (chat_completion_content_part_text_param, "ChatCompletionContentPartTextParam"),
        (chat_completion_content_part_refusal_param, "ChatCompletionContentPartRefusalParam"),
    ):
        fields = set(get_type_hints(getattr(module, name)))
        assert fields <= {"type", "text", "refusal", *BREAKPOINT}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_a_message_has_no_effect_or_is_refused(server, field):
    plain = answer(server, [ASKED, ANSWERED, ASKED])
    ignored, refused = FIELDS[field]
    for value in ignored:
        assert answer(server, [ASKED, {**ANSWERED, field: value}, ASKED]) == plain
    for value in refused:
        status, line = answer(server, [ASKED, {**ANSWERED, field: value}, ASKED])
        assert status == 400
        assert line.startswith(f"messages.1.{field}")


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ({"role": "tool", "content": "x", "tool_call_id": "c"}, "messages.1.role='tool': tool"),
        ({"role": "function", "content": "x", "name": "f"}, "messages.1.role='function': tool"),
        ({"role": "critic", "content": "x"}, "messages.1.role='critic': one of system, dev"),
        ({"content": "x"}, "messages.1.role=null: one of"),
        ({"role": ["user"], "content": "x"}, "messages.1.role=a list: one of"),
        ({"role": "user"}, "messages.1.content=null: give a text"),
        ({"role": "system", "content": None}, "messages.1.content=null: give a text"),
        ({"role": "user", "content": 5}, "messages.1.content=5: give a text"),
        ({"role": "user", "content": {"type": "text", "text": "x"}}, "messages.1.content=an obj"),
        ({"role": "user", "content": ["x"]}, "messages.1.content.0: give an object"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages.1.content.0.type='image_url': only text",
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            "messages.1.content.0.type='refusal': only text",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.1.content.0.text=null"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "bold": True}]},
            "messages.1.content.0.bold: not a known field",
        ),
        ("x", "messages.1: give an object"),
    ],
    ids=str,
)
def test_a_message_that_is_no_text_is_refused_with_its_place(server, message, line):
    status, found = answer(server, [ASKED, message])
    assert (status, found[: len(line)]) == (400, line)
    with pytest.raises(ValueError, match="messages") as refused:
        plain_messages([ASKED, message])
    assert str(refused.value) == found


def test_parts_and_messages_without_text_are_accepted(server):
    plain = answer(server, [ASKED, {**ANSWERED, "content": ""}, ASKED])
    for content in (None, [], [{"type": "text", "text": ""}]):
        assert answer(server, [ASKED, {**ANSWERED, "content": content}, ASKED]) == plain
    parts = [
        {"type": "text", "text": "seven ", **BREAKPOINT},
        {"type": "text", "text": "old birds"},
    ]
    assert answer(server, [{**ASKED, "content": parts}]) == answer(server, [ASKED])


def completed(llm: LLM, prompt: str) -> str:
    """The model's continuation of a prompt in which the special tokens are written out."""
    tokens = llm.tokenizer.encode(prompt, special=False)
    return llm.generate([tokens], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text


USER = "<|im_start|>user\nseven old birds<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"
NO_THINKING = "<think>\n\n</think>\n\n"


def test_reasoning_is_given_to_a_template_that_reads_it(server, llm):
    messages = [ASKED, {**ANSWERED, "reasoning_content": "under"}, ASKED]
    thought = f"{ANSWER}<think>\nunder\n</think>\n\nthe river<|im_end|>\n"
    assert answer(server, messages) == (200, completed(llm, USER + thought + USER + ANSWER))


def test_variables_of_the_template_choose_the_thinking_mode(server, llm):
    found = server.client().chat.completions.create(
        messages=[ASKED],
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        **OPTIONS,
    )
    without = completed(llm, USER + ANSWER + NO_THINKING)
    assert found.choices[0].message.content == without
    assert without != completed(llm, USER + ANSWER)
    for given in (None, {}, {"enable_thinking": True}, {"enable_thinking": None}):
        assert answer(server, [ASKED], chat_template_kwargs=given) == answer(server, [ASKED])


def test_the_last_message_is_continued(server, llm):
    options = {"add_generation_prompt": False, "continue_final_message": True}
    prompt = USER + ANSWER + "the river"
    assert answer(server, [ASKED, ANSWERED], **options) == (200, completed(llm, prompt))
    assert answer(server, [ASKED], add_generation_prompt=False) == (200, completed(llm, USER))
    status, line = answer(server, [ASKED, ANSWERED], continue_final_message=True)
    assert status == 400
    assert "add_generation_prompt" in line


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"enable_thinkng": False}, "chat_template_kwargs.enable_thinkng: the chat template does"),
        ({"role": "x"}, "chat_template_kwargs.role: the chat template does not read it"),
        ({"m": "x"}, "chat_template_kwargs.m: the chat template does not read it"),
        ({"tools": []}, "chat_template_kwargs.tools: cannot be set there"),
        ({"messages": []}, "chat_template_kwargs.messages: cannot be set there"),
        ({"add_generation_prompt": 1}, "chat_template_kwargs.add_generation_prompt: cannot"),
        ([], "chat_template_kwargs: Input should be a valid dictionary"),
    ],
    ids=str,
)
def test_variables_that_have_no_effect_are_refused(server, given, line):
    status, found = answer(server, [ASKED], chat_template_kwargs=given)
    assert (status, found[: len(line)]) == (400, line)


def test_the_server_has_default_variables_that_a_request_replaces(model, llm):
    options = {"default_chat_template_kwargs": {"enable_thinking": False}}
    with served_model.serving(model, **options) as running:
        assert answer(running, [ASKED])[1] == completed(llm, USER + ANSWER + NO_THINKING)
        thinking = {"enable_thinking": True}
        replaced = answer(running, [ASKED], chat_template_kwargs=thinking)
        assert replaced == (200, completed(llm, USER + ANSWER))


def serve(model: Any, *arguments: str) -> tuple[int, str]:
    """Exit code and errors of `dms-serve`, which ends before it serves."""
    done = launch.module("dms_train.cli.serve", str(model), "--port", "0", *arguments)
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_default_variables_that_the_template_does_not_read_end_the_command(model):
    given = json.dumps({"thinking": False})
    code, line = serve(model, "--default-chat-template-kwargs", given)
    assert code == 2
    assert "chat_template_kwargs.thinking: the chat template does not read it" in line
    for given in ("{", "[]"):
        code, line = serve(model, "--default-chat-template-kwargs", given)
        assert code == 2
        assert f"--default-chat-template-kwargs: {given!r}" in line


def test_what_the_engine_has_not_is_refused_by_the_command(model):
    for option, value in (("--tensor-parallel-size", "2"), ("--quantization", "fp8")):
        for arguments in ((option, value), (f"{option}={value}",)):
            code, line = serve(model, *arguments)
            assert code == 2
            assert f"{option}: " in line
    assert "one device" in serve(model, "--tensor-parallel-size", "2")[1]
    assert serve(model, "--unknown", "2")[1].endswith("unrecognized arguments: --unknown 2")


@pytest.mark.parametrize(
    "field", ["guided_json", "guided_regex", "structured_outputs", "tools", "chat_template"]
)
def test_the_clients_extras_that_are_not_supported_are_refused(server, field):
    with pytest.raises(openai.BadRequestError, match=field):
        server.client().chat.completions.create(
            messages=[ASKED], extra_body={field: {"a": 1}}, **OPTIONS
        )
