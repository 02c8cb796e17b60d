"""Conversations in tokens: reasoning stays, and the loss counts what the assistant says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dms_train.data.errors import DataError
from dms_train.data_prep.conversations import ChatOptions, ConversationEncoder, LossOn
from dms_train.inference.tokenizer import Tokenizer
from tests.support import piece_tokenizer
from tests.support.r1_tokenizer import ASSISTANT, BEGIN, END, TEMPLATE, USER

THOUGHT = "<think>\nIs it 3? Yes.\n</think>\n\nIt is $\\boxed{3}$."
# A template of the kind that writes empty reasoning before a turn without any.
EMPTY_REASONING = (
    "{% for m in messages %}[{{ m['role'] }}]\n"
    "{% if m['role'] == 'assistant' and '</think>' not in m['content'] %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m['content'].split('</think>')[-1] }}[end]\n{% endfor %}"
)


def talk(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [
        {"role": ("user", "assistant")[place % 2], "content": content}
        for place, content in enumerate(contents)
    ]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def counted(r1: str, messages: list[dict[str, str]], **options) -> tuple[str, list[str]]:
    """The whole text, and the runs that the loss counts."""
    tokens, mask = ConversationEncoder(ChatOptions(tokenizer=r1, **options)).encode("x", messages)
    assert len(tokens) == len(mask)
    decode = AutoTokenizer.from_pretrained(r1).decode
    runs: list[list[int]] = []
    for token, before, one in zip(tokens, [0, *mask[:-1]], mask, strict=True):
        if one and not before:
            runs.append([])
        if one:
            runs[-1].append(int(token))
    return decode(tokens), [decode(run) for run in runs]


def test_reasoning_is_kept_although_the_template_drops_it(r1: str) -> None:
    messages = talk("What is 1 + 2?", THOUGHT)
    stock = AutoTokenizer.from_pretrained(r1).apply_chat_template(messages, tokenize=False)
    assert "Is it 3?" not in stock
    text, runs = counted(r1, messages)
    assert text == f"{BEGIN}{USER}What is 1 + 2?{ASSISTANT}{THOUGHT}{END}"
    assert runs == [THOUGHT + END]


def test_the_document_continues_the_prompt_of_the_template(r1: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(r1)
    prompt = tokenizer.apply_chat_template(
        talk("What is 1 + 2?"), add_generation_prompt=True, tokenize=False
    )
    text, _ = counted(r1, talk("What is 1 + 2?", THOUGHT))
    assert prompt.endswith("<think>\n")
    assert text.startswith(prompt)


def test_every_turn_of_the_assistant_counts(r1: str) -> None:
    messages = talk("One?", THOUGHT, "Two?", "No.", "Three?", THOUGHT, system="Be short. ")
    text, runs = counted(r1, messages)
    assert runs == [THOUGHT + END, "No." + END, THOUGHT + END]
    assert text.startswith(f"{BEGIN}Be short. {USER}One?{ASSISTANT}<think>")


def test_loss_on_all_counts_every_token(r1: str) -> None:
    text, runs = counted(r1, talk("One?", THOUGHT), loss_on=LossOn.ALL)
    assert runs == [text]


def test_the_end_of_the_document_is_not_doubled(r1: str) -> None:
    plain = counted(r1, talk("One?", "Two."))
    assert counted(r1, talk("One?", "Two."), append_eod=True) == plain
    open_end = TEMPLATE.replace(f" + '{END}'", "")
    text, runs = counted(r1, talk("One?", "Two."), chat_template=open_end, append_eod=True)
    assert text.endswith("Two." + END)
    assert runs == ["Two."]


def test_empty_reasoning_of_a_template_does_not_precede_the_real_one(r1: str) -> None:
    text, runs = counted(r1, talk("One?", THOUGHT), chat_template=EMPTY_REASONING)
    assert text == f"[user]\nOne?[end]\n[assistant]\n{THOUGHT}[end]\n"
    assert runs == [THOUGHT]  # [end] is no special token here
    text, _ = counted(r1, talk("One?", "Two."), chat_template=EMPTY_REASONING)
    assert text == "[user]\nOne?[end]\n[assistant]\n<think>\n\n</think>\n\nTwo.[end]\n"


def test_other_writing_systems_and_empty_turns(r1: str) -> None:
    text, runs = counted(r1, talk("12 = 144。", "是 144。😀", "", ""))
    assert runs == ["是 144。😀" + END, END]
    assert text.endswith(f"{USER}{ASSISTANT}{END}")


def test_a_template_with_todays_date_needs_a_date(r1: str) -> None:
    dated = "{{ date_string or strftime_now('%d %b %Y') }}" + TEMPLATE
    with pytest.raises(DataError, match=r"today's date.*--template-variable"):
        ConversationEncoder(ChatOptions(tokenizer=r1, chat_template=dated))
    text, _ = counted(
        r1,
        talk("One?", "Two."),
        chat_template=dated,
        variables=(("date_string", "23 July 2024"),),
    )
    assert text.startswith(f"23 July 2024{BEGIN}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0]['content'] }}", "leaves out message 2 of role 'assistant'"),
        ("{{ messages[1]['content'] * 2 }}", "leaves out message 1 of role 'user'"),
        ("{{ messages[-1]['content'] + messages[1]['content'] }}", "leaves out message 1"),
        ("{% for m in messages %}{{ m['content'] * 2 }}{% endfor %}", "repeats or moves"),
        ("{% for m in messages[::-1] %}{{ m['content'] }}{% endfor %}", "repeats or moves"),
        ("{{ raise_exception('odd roles') }}", r"failed \(odd roles\)"),
        ("{{ messages[", "failed"),
    ],
)
def test_an_unfit_template_is_refused(r1: str, template: str, message: str) -> None:
    encoder = ConversationEncoder(ChatOptions(tokenizer=r1, chat_template=template))
    with pytest.raises(DataError, match=rf"^row 7: .*{message}.*--chat-template FILE"):
        encoder.encode("row 7", talk("One?", "Two.", "Three?", "Four."))


def test_a_tokenizer_without_a_template_is_refused(r1: str, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(r1) / name).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(DataError, match="no chat template; pass one"):
        ConversationEncoder(ChatOptions(tokenizer=str(tmp_path)))


BLANK_BEFORE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} "
    "[/INST]{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)
NEWLINE_BEFORE = (
    "{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}{% endfor %}"
)
NO_END = "{% for m in messages %}{{ bos_token }}{{ m['content'] }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "around"),
    [
        (BLANK_BEFORE, "{} </s>"),  # as of Llama 2
        (BLANK_BEFORE.replace(" {{ eos_token", "{{ eos_token"), "{}</s>"),  # as of Mistral
        (NEWLINE_BEFORE, "{}</s>"),
        (NO_END, "{}"),  # the next token begins another turn
    ],
)
def test_whole_answers_and_their_end_are_in_the_loss(
    tmp_path: Path, template: str, around: str
) -> None:
    """Offsets are not trusted: the text of the counted tokens is compared."""
    folder = piece_tokenizer.write_tokenizer(tmp_path)
    encoder = ConversationEncoder(ChatOptions(tokenizer=str(folder), chat_template=template))
    decoder = Tokenizer.load(folder)
    assert decoder is not None
    for answer in ("there was a cat", "a", "to the park", "naïve 東京"):
        tokens, mask = encoder.encode("x", talk("was there a cat", answer, "who", answer))
        runs, counted = [], b""
        for token, one in [*zip(tokens.tolist(), mask.tolist(), strict=True), (0, 0)]:
            if one:
                counted += decoder.token_bytes(token)
            elif counted:
                runs.append(counted.decode())
                counted = b""
        # a blank in front is counted where it is in one token with the first word
        assert [run.removeprefix(" ") for run in runs] == [around.format(answer)] * 2


def test_the_marker_of_the_next_role_does_not_count(r1: str) -> None:
    """In a template without an end token the marker is not the assistant's."""
    roles = f"{{{{ '{USER}' if m['role'] == 'user' else '{ASSISTANT}' }}}}"
    template = f"{{% for m in messages %}}{roles}\n{{{{ m['content'] }}}}\n{{% endfor %}}"
    _, runs = counted(r1, talk("One?", "Two.", "Three?", "Four."), chat_template=template)
    assert runs == ["Two.", "Four."]


def test_every_special_token_of_the_file_may_end_a_turn(tmp_path: Path) -> None:
    """Also one that tokenizer_config.json gives no name, as of Llama 3's <|eot_id|>."""
    folder = piece_tokenizer.write_tokenizer(tmp_path)
    ends = {"content": "<|eot|>", "lstrip": False, "rstrip": False, "normalized": False}
    described = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    described["added_tokens"].append({"id": 292, **ends, "single_word": False, "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    template = "{% for m in messages %}{{ m['content'] }}<|eot|>{% endfor %}"
    encoder = ConversationEncoder(ChatOptions(tokenizer=str(folder), chat_template=template))
    tokens, mask = encoder.encode("x", talk("who", "a"))
    assert tokens[mask.astype(bool)][-1] == 292


@pytest.mark.parametrize("role", ["developer", "tool", "human", "User"])
def test_a_message_that_the_template_leaves_out_is_refused(r1: str, role: str) -> None:
    knows = "['system', 'user', 'assistant']"
    template = (
        f"{{% for m in messages if m['role'] in {knows} %}}{{{{ m['content'] }}}}{{% endfor %}}"
    )
    lost = [*talk("One?", "Two."), {"role": role, "content": "o"}, *talk("Three?", "Four.")]
    encoder = ConversationEncoder(ChatOptions(tokenizer=r1, chat_template=template))
    encoder.encode("row 7", [m for m in lost if m["role"] != role])
    encoder.encode("row 7", [{**m, "content": ""} if m["role"] == role else m for m in lost])
    with pytest.raises(DataError, match=f"^row 7: .* leaves out message 3 of role '{role}'"):
        encoder.encode("row 7", lost)
