"""The routes as OpenAI's own client and plain HTTP see them."""

from __future__ import annotations

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dms_train import LLM, SamplingParams
from tests.support import served_model
from tests.support.served_model import LONGEST, NAME, VOCABULARY

GREEDY = {"model": NAME, "temperature": 0, "extra_body": {"ignore_eos": True}}
CHAT = [{"role": "user", "content": "seven old birds"}]


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model)


def test_a_completion_is_what_the_engine_generates(client, llm):
    answer = client.completions.create(prompt="the river", max_tokens=40, **GREEDY)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    output = llm.generate("the river", params)[0]
    assert answer.choices[0].text == output.outputs[0].text
    assert answer.choices[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    assert answer.usage.completion_tokens == 40
    assert answer.usage.kv == {
        "kv_reads": output.kv.kv_reads,
        "peak_live_tokens": output.kv.peak_live_tokens,
        "peak_live_bytes": output.kv.peak_live_bytes,
        "cr_factor": output.kv.cr_factor,
    }
    assert output.kv.cr_factor > 1.2


def test_a_chat_is_the_completion_of_its_template(client, llm):
    answer = client.chat.completions.create(messages=CHAT, max_completion_tokens=20, **GREEDY)
    text = "<|im_start|>user\nseven old birds<|im_end|>\n<|im_start|>assistant\n"
    ids = llm.tokenizer.encode(text)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    output = llm.generate([ids], params)[0]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == output.outputs[0].text
    assert answer.usage.prompt_tokens == len(ids)


def test_parts_of_a_message_are_joined(client):
    parts = [{"type": "text", "text": "seven "}, {"type": "text", "text": "old birds"}]
    answers = [
        client.chat.completions.create(
            messages=[{"role": "user", "content": content}], max_tokens=8, **GREEDY
        )
        for content in ("seven old birds", parts)
    ]
    assert answers[0].choices[0].message == answers[1].choices[0].message


@given(
    seed=st.integers(0, 2**62),
    stop=st.lists(st.sampled_from(["e", "th", " s", "é", "a b", "ou", "\n"]), max_size=3),
    n=st.integers(1, 3),
    chat=st.booleans(),
)
@settings(max_examples=12)
def test_the_parts_of_a_stream_are_the_whole_answer(client, seed, stop, n, chat):
    options = {"model": NAME, "seed": seed, "stop": stop, "n": n, "max_tokens": 15}
    options |= {"temperature": 1.5}
    if chat:
        create, options["messages"] = client.chat.completions.create, CHAT
    else:
        create, options["prompt"] = client.completions.create, "the old"
    whole = create(**options)
    texts, reasons = [""] * n, [None] * n
    for chunk in create(**options, stream=True):
        for choice in chunk.choices:
            piece = (choice.delta.content or "") if chat else choice.text
            texts[choice.index] += piece
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [c.message.content if chat else c.text for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices]
    assert not any(text in found for text in stop for found in texts)


def test_bytes_that_form_no_character_are_held_back_until_the_end(client, llm):
    half = llm.tokenizer.encode("🦀")[0]
    options = {**GREEDY, "prompt": "the", "max_tokens": 3, "logit_bias": {str(half): 100}}
    whole = client.completions.create(**options)
    assert whole.choices[0].text == llm.tokenizer.decode([half] * 3) == "\ufffd" * 3
    pieces = [c.choices[0].text for c in client.completions.create(**options, stream=True)]
    assert [piece for piece in pieces if piece] == ["\ufffd" * 3]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logit_bias={half: 100})
    assert llm.generate("the", params)[0].outputs[0].text == "\ufffd" * 3


def test_several_prompts_and_continuations_are_numbered_in_order(client):
    options = {**GREEDY, "max_tokens": 6}
    each = [client.completions.create(prompt=p, **options).choices[0].text for p in ("the", "old")]
    both = client.completions.create(prompt=["the", "old"], n=2, **options)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert [c.text for c in both.choices] == [each[0], each[0], each[1], each[1]]
    assert both.usage.completion_tokens == 24


def test_a_seed_gives_the_same_twice_and_continuations_differ(client):
    options = {"model": NAME, "prompt": "stone", "n": 2, "max_tokens": 20, "temperature": 2.0}
    first, again = (client.completions.create(seed=5, **options) for _ in range(2))
    assert [c.text for c in first.choices] == [c.text for c in again.choices]
    assert first.choices[0].text != first.choices[1].text
    other = client.completions.create(seed=6, **options)
    assert other.choices[0].text != first.choices[0].text


def test_a_stop_text_ends_the_text_before_it(client):
    options = {**GREEDY, "prompt": "the river", "max_tokens": 60}
    text = client.completions.create(**options).choices[0].text
    stop = text[10:13]
    cut = client.completions.create(stop=stop, **options).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"


def test_logprobs_of_a_completion(client, llm):
    answer = client.completions.create(prompt="the river", max_tokens=5, logprobs=3, **GREEDY)
    found = answer.choices[0].logprobs
    ids = llm.tokenizer.encode("the river")
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    output = llm.generate([ids], params)[0].outputs[0].token_ids
    logits = llm.logits(ids + output).double().log_softmax(-1)
    truth = [logits[len(ids) - 1 + i, token].item() for i, token in enumerate(output)]
    assert found.token_logprobs == pytest.approx(truth, abs=1e-4)
    texts = [llm.tokenizer.decode([t], special=True) for t in output]
    for token, text in zip(found.tokens, texts, strict=True):
        assert token.startswith("bytes:\\x") if "\ufffd" in text else token == text
    assert all(len(top) == 3 for top in found.top_logprobs)
    assert [max(top.values()) for top in found.top_logprobs] == found.token_logprobs
    assert found.text_offset[0] == 0


def test_logprobs_of_a_chat_whole_and_streamed(client):
    options = {**GREEDY, "messages": CHAT, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    assert len(whole) == 6
    assert all(len(entry.top_logprobs) == 2 for entry in whole)
    for entry in whole:
        escaped = "".join(f"\\x{byte:02x}" for byte in entry.bytes)
        assert entry.token in (bytes(entry.bytes).decode(errors="replace"), escaped)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content
    ]
    assert [e.token for e in streamed] == [e.token for e in whole]
    assert [e.logprob for e in streamed] == pytest.approx([e.logprob for e in whole], abs=1e-4)


def test_a_stream_ends_with_the_usage_if_requested(client):
    options = {**GREEDY, "messages": CHAT, "max_tokens": 6}
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == client.chat.completions.create(**options).usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_bias_and_stop_tokens_reach_the_engine(client):
    options = {"model": NAME, "prompt": "the", "temperature": 0, "max_tokens": 4}
    extra = {"ignore_eos": True}
    ids = {"logit_bias": {"70": 100}}
    first = client.completions.create(**options, **ids, logprobs=0, extra_body=extra)
    assert len(set(first.choices[0].logprobs.tokens)) == 1
    extra["stop_token_ids"] = [70]
    stopped = client.completions.create(**options, **ids, extra_body=extra)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "user speaks first"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"guided_regex": "x"}, "guided_regex"),
        ({"kv_positions": True}, "kv_positions"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias"),
        ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
        ({"stop": ""}, "stop"),
        ({"repetition_penalty": 1e-9}, "repetition_penalty=1e-09: must be"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "1000"),
    ],
    ids=str,
)
def test_what_has_no_effect_here_is_refused_by_name(server, changes, field):
    body = {"model": NAME, "messages": CHAT, "max_tokens": 2, **changes}
    status, _, answer = server.ask("/v1/chat/completions", body)
    assert status == 400
    assert field in answer["error"]["message"]


@pytest.mark.parametrize(
    "changes",
    [{"max_tokens": 0}, {"best_of": 3}, {"suffix": "end"}, {"prompt": []}, {"prompt": ""}],
)
def test_a_completion_refuses_what_it_cannot_do(server, changes):
    status, _, answer = server.ask("/v1/completions", {"prompt": "the", **changes})
    assert status == 400
    assert next(iter(changes)) in answer["error"]["message"]


def test_fields_without_effect_are_accepted(server):
    body = {
        "messages": CHAT,
        "max_tokens": 2,
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "seed": None,
    }
    assert server.ask("/v1/chat/completions", body)[0] == 200


def test_openai_sees_a_bad_request(client):
    with pytest.raises(openai.BadRequestError, match="tool calls are not supported"):
        client.chat.completions.create(
            model=NAME, messages=CHAT, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.NotFoundError, match=NAME):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model=NAME, input="x")


def test_models_and_tokens(server, client, llm):
    assert [m.id for m in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME) == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match=NAME):
        client.models.retrieve("another/model")
    ids = llm.tokenizer.encode("naïve river")
    status, _, answer = server.ask("/tokenize", {"prompt": "naïve river"})
    assert (status, answer["tokens"], answer["count"]) == (200, ids, len(ids))
    assert server.ask("/detokenize", {"tokens": ids})[2] == {"prompt": "naïve river"}
    assert server.ask("/detokenize", {"tokens": [VOCABULARY]})[0] == 400


def test_a_prompt_leaves_room_for_one_token(server):
    fits = {"prompt": [5] * (LONGEST - 1), "max_tokens": 5}
    status, _, answer = server.ask("/v1/completions", fits)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 1)
    status, _, answer = server.ask("/v1/completions", {"prompt": [5] * LONGEST})
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"


def test_a_model_without_a_template_names_the_other_route(tmp_path):
    plain = served_model.write_model(tmp_path, chat=False)
    with served_model.serving(plain) as running:
        status, _, answer = running.ask("/v1/chat/completions", {"messages": CHAT})
        assert status == 400
        assert "/v1/completions" in answer["error"]["message"]
