"""`echo`: prompts in front of their continuations, with log-probabilities."""

from __future__ import annotations

import pytest

from dms_train.inference.llm import LLM

GREEDY = {"temperature": 0, "model": "tiny"}
PROMPT = "the river under seven stones walked and the old bird"


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model)


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def exact(llm: LLM, ids: list[int]) -> list[float]:
    """Log-probabilities of all tokens but the first, one text at a time."""
    shares = llm.logits(ids).log_softmax(-1)
    return [shares[i, token].item() for i, token in enumerate(ids[1:])]


def test_a_prompt_alone(client, llm):
    answer = client.completions.create(prompt=PROMPT, max_tokens=0, echo=True, logprobs=2, **GREEDY)
    (choice,) = answer.choices
    ids, found = llm.tokenizer.encode(PROMPT), choice.logprobs
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
    assert "".join(found.tokens) == PROMPT
    assert (found.token_logprobs[0], found.top_logprobs[0], found.text_offset[0]) == (None, None, 0)
    assert found.token_logprobs[1:] == pytest.approx(exact(llm, ids), abs=1e-4)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert PROMPT[offset : offset + len(token)] == token
    most = [max(top.values()) for top in found.top_logprobs[1:]]
    assert all(best >= own for best, own in zip(most, found.token_logprobs[1:], strict=True))


def test_a_prompt_and_its_continuation(client, llm):
    options = {"prompt": PROMPT, "max_tokens": 5, "logprobs": 1, **GREEDY}
    plain = client.completions.create(**options).choices[0]
    echoed = client.completions.create(echo=True, **options).choices[0]
    assert echoed.text == PROMPT + plain.text
    count = len(llm.tokenizer.encode(PROMPT))
    found, own = echoed.logprobs, plain.logprobs
    assert found.tokens[count:] == own.tokens
    assert found.token_logprobs[count:] == pytest.approx(own.token_logprobs, abs=1e-5)
    assert found.text_offset[count:] == [at + len(PROMPT) for at in own.text_offset]
    ids = llm.tokenizer.encode(PROMPT)
    assert found.token_logprobs[1:count] == pytest.approx(exact(llm, ids), abs=1e-4)


def test_streams_several_prompts_and_continuations(client, llm):
    ids = [llm.tokenizer.encode(text) for text in (PROMPT, "seven")]
    options = {
        **{"prompt": ids, "max_tokens": 4, "n": 2, "seed": 3, "model": "tiny"},
        **{"echo": True, "logprobs": 0},
    }
    whole = client.completions.create(**options).choices
    texts, values = [""] * 4, [[] for _ in range(4)]
    for chunk in client.completions.create(stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            values[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole]
    for own, choice in zip(values, whole, strict=True):
        assert own[0] is None
        assert own[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-5)
    for choice in whole:
        prompt = ids[choice.index // 2]
        assert choice.text.startswith(llm.tokenizer.decode(prompt))
        assert choice.logprobs.token_logprobs[1 : len(prompt)] == pytest.approx(
            exact(llm, prompt), abs=1e-4
        )
        assert len(choice.logprobs.token_logprobs) == len(prompt) + 4


def test_special_tokens_that_are_added_or_given(client, llm):
    ids = [1, *llm.tokenizer.encode("the river"), 2]
    echoed = client.completions.create(
        prompt=ids, max_tokens=0, echo=True, logprobs=0, **GREEDY
    ).choices[0]
    assert echoed.text == "<|im_start|>the river<|im_end|>"
    starts = echoed.logprobs.text_offset
    for token, offset in zip(echoed.logprobs.tokens, starts, strict=True):
        assert echoed.text[offset : offset + len(token)] == token


def test_a_prompt_of_one_token(client):
    answer = client.completions.create(prompt=[5], max_tokens=0, echo=True, logprobs=1, **GREEDY)
    assert answer.choices[0].logprobs.token_logprobs == [None]
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("changes", [{"max_tokens": 0}, {"max_tokens": 0, "echo": True, "n": 2}])
def test_nothing_to_return_is_refused(server, changes):
    status, _, answer = server.ask("/v1/completions", {"prompt": "the", **changes})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    assert "echo=true and n=1" in answer["error"]["message"]
