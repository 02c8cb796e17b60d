"""`LLM.chat` and the options that `LLM` refuses."""

from __future__ import annotations

import json

import pytest

from dms_train import LLM, SamplingParams
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions
from tests.support import served_model

GREEDY = SamplingParams(temperature=0, max_tokens=6)
ASKED = {"role": "user", "content": "seven old birds"}
USER = "<|im_start|>user\nseven old birds<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    return LLM(served_model.write_model(tmp_path_factory.mktemp("chat")))


def prompts(llm: LLM, *args, **options) -> list[str]:
    """Return the prompts that chats give to the model, with their special tokens."""
    outputs = llm.chat(*args, **options)
    return [llm.tokenizer.decode(o.prompt_token_ids, special=True) for o in outputs]


def test_a_chat_is_the_continuation_of_its_template(llm):
    output = llm.chat([ASKED], GREEDY)[0]
    tokens = llm.tokenizer.encode(USER + ANSWER, special=False)
    assert output.prompt_token_ids == tokens
    assert output.outputs == llm.generate([tokens], GREEDY)[0].outputs


def test_several_chats_and_their_parameters_keep_their_order(llm):
    other = [{"role": "system", "content": "under"}, ASKED]
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=3)]
    outputs = llm.chat([[ASKED], other], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [6, 3]
    assert prompts(llm, [[ASKED], other], GREEDY) == [
        USER + ANSWER,
        "<|im_start|>system\nunder<|im_end|>\n" + USER + ANSWER,
    ]


def test_the_options_of_the_template(llm):
    off = {"enable_thinking": False}
    thinking = f"{USER}{ANSWER}<think>\n\n</think>\n\n"
    assert prompts(llm, [ASKED], GREEDY, chat_template_kwargs=off) == [thinking]
    assert prompts(llm, [ASKED], GREEDY, add_generation_prompt=False) == [USER]
    begun = [ASKED, {"role": "assistant", "content": "the ri"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompts(llm, begun, GREEDY, **options) == [USER + ANSWER + "the ri"]


def test_the_tokenizer_adds_no_special_tokens_to_those_of_the_template(tmp_path):
    folder = served_model.write_model(tmp_path)
    file = folder / "tokenizer.json"
    start = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    token = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    added = {"type": "TemplateProcessing", "single": [start, text], "pair": [start, text]}
    described = json.loads(file.read_text())
    file.write_text(json.dumps({**described, "post_processor": {**added, "special_tokens": token}}))
    llm = LLM(folder)
    assert llm.generate("the", GREEDY)[0].prompt_token_ids[0] == 0
    assert prompts(llm, [ASKED], GREEDY) == [USER + ANSWER]


@pytest.mark.parametrize(
    ("messages", "options", "line"),
    [
        ("hello", {}, "messages: give a list"),
        ([], {}, "messages: give a list"),
        (["hello"], {}, "messages.0: give an object"),
        ([[ASKED], []], {}, "messages: give a list"),
        ([{"role": "tool", "content": "x"}], {}, "messages.0.role='tool': tool calls"),
        ([ASKED], {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x: the chat template"),
        ([ASKED], {"chat_template_kwargs": [1]}, "chat_template_kwargs: give variables"),
        ([{"role": "assistant", "content": "x"}], {}, "the user speaks first"),
    ],
    ids=str,
)
def test_a_chat_that_cannot_be_rendered_is_refused_in_one_line(llm, messages, options, line):
    with pytest.raises(InferenceError) as refused:
        llm.chat(messages, GREEDY, **options)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not llm.engine.has_unfinished_requests()


def test_reasoning_that_the_template_does_not_read_is_refused(tmp_path):
    folder = served_model.write_model(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    llm = LLM(folder)
    answered = {"role": "assistant", "content": "x", "reasoning_content": "under"}
    with pytest.raises(InferenceError, match=r"messages\.1\.reasoning_content: the chat template"):
        llm.chat([ASKED, answered], GREEDY)
    assert prompts(llm, [ASKED, {**answered, "reasoning_content": ""}], GREEDY)


def test_a_template_that_is_not_text_is_refused(tmp_path):
    folder = served_model.write_model(tmp_path)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": 5}))
    with pytest.raises(InferenceError, match=r"chat_template is not text; correct it"):
        LLM(folder).chat([ASKED], GREEDY)


def test_a_model_without_a_template_answers_no_chats(tmp_path):
    llm = LLM(served_model.write_model(tmp_path, chat=False))
    with pytest.raises(InferenceError, match=r"no chat template; use LLM\.generate"):
        llm.chat([ASKED], GREEDY)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"quantization": "fp8"}, "quantization='fp8': weights are not quantised"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: the engine runs on one device"),
        ({"max_seqs": 2}, "max_seqs=2: no such option; choose from policy"),
        ({"options": EngineOptions(), "max_num_seqs": 2}, "options and single values"),
    ],
    ids=str,
)
def test_options_that_do_not_exist_are_refused(tmp_path, options, line):
    with pytest.raises(InferenceError) as refused:
        LLM(tmp_path, **options)
    assert str(refused.value).startswith(line)
