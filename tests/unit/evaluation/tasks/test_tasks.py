"""Every task: its documents, prompts and refusals."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.scorers.registry import all_scorers
from dms_train.evaluation.tasks.base import FIXTURES, Messages, fingerprint
from dms_train.evaluation.tasks.data_files import file_sha256, read_rows
from dms_train.evaluation.tasks.prompts import (
    FORMATS,
    detect_format,
    find_format,
    load_tokenizer,
)
from dms_train.evaluation.tasks.registry import all_tasks, task
from dms_train.hf.tokenizer_files import read_chat_tokenizer
from dms_train.inference.tokenizer import Tokenizer
from tests.support import piece_tokenizer, r1_tokenizer

TASKS = all_tasks()
FIXTURE = TaskOptions(fixture=True)
FROM_FILES = [name for name, found in TASKS.items() if found.source is not None]


def tokens(messages: Messages) -> int:
    return len(messages.user.split())


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_tasks_are_these():
    assert list(TASKS) == [
        *("aime24", "aime25", "exam_sheets", "gpqa_diamond", "gsm8k", "humaneval"),
        *("linear_1d", "livecodebench", "math500", "niah", "variable_tracking"),
    ]
    assert {found.scorer for found in TASKS.values()} <= set(all_scorers())
    with pytest.raises(EvaluationError, match=r"task\.name=aime: choose one of aime24, aime25"):
        task("aime")


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_five_documents_in_the_package(name):
    documents = TASKS[name].documents(FIXTURE, tokens)
    assert len(documents) == 5
    assert len({document.id for document in documents}) == 5
    assert all(document.gold and all(document.gold) for document in documents)
    assert len(TASKS[name].documents(TaskOptions(fixture=True, limit=2), tokens)) == 2


@pytest.mark.parametrize("answer", [None, True, float("nan"), [5], {"value": 5}, " "])
def test_an_answer_of_another_type_is_refused(tmp_path, answer):
    path = write(tmp_path / "math.jsonl", [{"problem": "1+1", "answer": answer}])
    with pytest.raises(EvaluationError, match=r"math\.jsonl:1: .*not empty"):
        TASKS["math500"].documents(TaskOptions(path=path, subset=True), tokens)


@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_contains_the_question_and_never_the_answer_alone(name):
    for document in TASKS[name].documents(FIXTURE, tokens):
        messages = TASKS[name].messages(document)
        assert document.question in messages.user
        for prompt_format in FORMATS:
            text = FORMATS[prompt_format](messages)
            assert document.question in text
            assert text.endswith(messages.answer_prefix)


@pytest.mark.parametrize("name", FROM_FILES)
def test_another_number_of_documents_than_published_is_refused(name, tmp_path):
    rows = list(read_rows(FIXTURES / f"{name}.jsonl"))
    path = write(tmp_path / "part.jsonl", rows[:3])
    published = TASKS[name].source.rows
    with pytest.raises(EvaluationError, match=f"3 rows, .* has {published}; task.subset=true"):
        TASKS[name].documents(TaskOptions(path=path), tokens)
    assert len(TASKS[name].documents(TaskOptions(path=path, subset=True), tokens)) == 3


@pytest.mark.parametrize("name", [*FROM_FILES, "exam_sheets"])
def test_a_task_without_its_file_says_where_to_get_it(name):
    with pytest.raises(EvaluationError, match=r"needs task\.path=FILE( or task\.hub=true)?; "):
        TASKS[name].documents(TaskOptions(), tokens)


def test_the_hub_is_not_asked_without_download(monkeypatch):
    import socket

    def refused(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refused)
    with pytest.raises(EvaluationError, match=r"aime_2024/.*task\.download=true fetches it"):
        TASKS["aime24"].documents(TaskOptions(hub=True), tokens)


def test_a_file_with_another_hash_is_refused(tmp_path):
    path = tmp_path / "sheets.jsonl"
    write(path, [{"prompt": "1:", "answers": ["2"]}])
    good = file_sha256(path)
    options = TaskOptions(path=str(path), sha256=good.upper())
    assert len(TASKS["exam_sheets"].documents(options, tokens)) == 1
    path.write_text(path.read_text() + "\n")
    with pytest.raises(EvaluationError, match=f"SHA-256 is .*, not {good.upper()}"):
        TASKS["exam_sheets"].documents(options, tokens)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n', r":1: no column 'answers'"),
        ('{"prompt": "a", "answers": []}\n', r':1: "answers" must be a list of texts'),
        ('{"prompt": "a", "answers": ["1"], "id": 3}\n' * 2, r":2: document 3 occurs twice"),
        ("[1]\n", r":1: give an object"),
        ("{\n", r":1: not valid JSON"),
        ("\n", r": no documents"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(EvaluationError, match=message) as caught:
        TASKS["exam_sheets"].documents(TaskOptions(path=str(tmp_path / "a.jsonl")), tokens)
    assert "\n" not in str(caught.value)


def test_a_file_of_an_unknown_kind_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(EvaluationError, match=r"a\.txt: give a file that ends in \.jsonl"):
        list(read_rows(tmp_path / "a.txt"))


def test_all_kinds_of_files_give_the_same_rows(tmp_path):
    rows = [{"question": "Wie groß?", "answer": "1"}, {"question": 'a, "b"\nc', "answer": "2"}]
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as stream:
        table = csv.DictWriter(stream, ["question", "answer"])
        table.writeheader()
        table.writerows(rows)
    found = [list(read_rows(tmp_path / f"a.{kind}")) for kind in ("jsonl", "json", "csv")]
    assert found == [rows] * 3
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert list(read_rows(tmp_path / "a.parquet")) == rows
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[4:40] = b"\xff" * 36  # the header of the first page
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(EvaluationError, match=r"a\.parquet: not a parquet file, or damaged"):
        list(read_rows(tmp_path / "a.parquet"))
    with pytest.raises(FileNotFoundError):
        list(read_rows(tmp_path / "absent.parquet"))


def test_a_long_cell_of_a_csv_file_is_read_and_a_damaged_one_named(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text(f"question,answer\n{'x' * 200_000},1\n")
    ((row),) = read_rows(file)
    assert row == {"question": "x" * 200_000, "answer": "1"}
    file.write_text('question,answer\n"a"b,1\n')
    with pytest.raises(EvaluationError, match=r"a\.csv:2: cannot be read"):
        list(read_rows(file))


def test_gsm8k_reads_whole_solutions_and_bare_answers():
    gold = [document.gold for document in TASKS["gsm8k"].documents(FIXTURE, tokens)]
    assert gold == [("13",), ("208",), ("60",), ("90",), ("3000",)]
    row = {"number": 1, "problem": "p", "answer": "-1,200"}
    assert TASKS["gsm8k"].document(row, FIXTURE).gold == ("-1200",)


def test_the_prompts_are_those_of_the_paper():
    math = TASKS["aime24"].messages(TASKS["aime24"].documents(FIXTURE, tokens)[0]).user
    assert math.startswith(
        "Solve the following math problem efficiently and clearly.  The last line of your "
        "response should be of the following format: 'Therefore, the final answer is: "
        "$\\boxed{ANSWER}$. I hope it is correct' (without quotes)"
    )
    assert "Think step by step before answering.\n\nFind the number" in math
    gsm8k = TASKS["gsm8k"].messages(TASKS["gsm8k"].documents(FIXTURE, tokens)[1])
    assert FORMATS["llama3"](gsm8k) == (
        "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 23 July 2024\n\nYou are a helpful assistant.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nGiven the following problem, reason and give "
        "a final answer to the problem.\nProblem: Tickets cost $8. A class of 24 pupils and 2 "
        "teachers buys one each. What do they pay in dollars?\nYour response should end with "
        '"The final answer is [answer]" where [answer] is the response to the problem.<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert FORMATS["r1"](Messages(user="Q")) == "<｜User｜>Q<｜Assistant｜><think>\n"  # noqa: RUF001


@pytest.mark.parametrize("known", ["r1", "llama3", "chatml", "plain"])
def test_the_format_is_read_from_the_tokenizer(known):
    marks = {"r1": ["<｜Assistant｜>", "<|im_start|>"], "llama3": ["<|start_header_id|>"]}  # noqa: RUF001
    marks["chatml"] = ["<|im_start|>"]
    single = marks.get(known, [])
    assert detect_format(lambda text: text in single) == known


def model(folder: Path, template: str | None) -> tuple[Tokenizer, Path]:
    """Return the tokenizer and directory of a model with this chat template."""
    r1_tokenizer.write_tokenizer(folder, template)
    return load_tokenizer(folder), folder


def test_the_chat_template_of_the_model_is_a_format(tmp_path):
    tokenizer, directory = model(tmp_path, r1_tokenizer.TEMPLATE)
    found = find_format("template", tokenizer, directory)
    begin, user, assistant = r1_tokenizer.BEGIN, r1_tokenizer.USER, r1_tokenizer.ASSISTANT
    begun = Messages(user="Q", system="S", answer_prefix="A")
    for messages, expected in (
        (Messages(user="Q"), f"{begin}{user}Q{assistant}<think>\n"),
        (begun, f"{begin}S{user}Q{assistant}A"),  # an answer that has begun does not reason
        (replace(begun, plain=True), "S\n\nQA"),
    ):
        ids = found.tokens(messages, tokenizer, directory)
        assert tokenizer.decode(ids, special=True) == expected


def test_another_chat_template_is_another_format(tmp_path):
    names = [
        find_format("template", *model(tmp_path, f"{r1_tokenizer.TEMPLATE}{end}")).name
        for end in ("", "", " ")
    ]
    assert names[0] == names[1] != names[2]
    assert [(name[:9], len(name)) for name in names] == 3 * [("template ", 21)]


@pytest.mark.parametrize("begin", ["{{ bos_token }}", ""])
def test_a_template_gets_the_tokens_of_a_chat_and_no_others(tmp_path, begin):
    """This tokenizer adds its first token to any other text."""
    directory = piece_tokenizer.write_tokenizer(
        tmp_path, chat_template=f"{begin}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
    )
    tokenizer = load_tokenizer(directory)
    chat = read_chat_tokenizer(directory)
    expected = chat.apply_chat_template([{"role": "user", "content": "a"}], return_dict=False)
    asked = Messages(user="a")
    found = find_format("template", tokenizer, directory)
    assert found.tokens(asked, tokenizer, directory) == expected
    whole = found.tokens(replace(asked, plain=True), tokenizer, directory)
    plain = find_format("plain", tokenizer, directory).tokens(asked, tokenizer, directory)
    assert whole == plain == tokenizer.encode("a") != tokenizer.encode("a", special=False)


@pytest.mark.parametrize(
    ("name", "template", "line"),
    [
        ("x", None, r"model\.prompt_format=x: choose one of auto, template, llama3"),
        ("template", None, r"template: .* has no chat template; choose one of auto, llama3"),
        ("template", "{{ strftime_now('%d') }}", r"writes today's date, .*; choose one of auto"),
    ],
)
def test_a_format_that_cannot_be_used_is_refused(tmp_path, name, template, line):
    with pytest.raises(EvaluationError, match=line):
        find_format(name, *model(tmp_path, template))


def test_messages_that_the_template_leaves_out_are_refused(tmp_path):
    made = model(tmp_path, "{{ messages[0].content }}")
    found = find_format("template", *made)
    with pytest.raises(
        EvaluationError, match=r"prompt_format=template: .* leaves out this message"
    ):
        found.tokens(Messages(user="Q", system="S"), *made)


def test_a_problem_that_is_not_text_is_refused(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"question": None, "answer": "#### 1"}])
    with pytest.raises(EvaluationError, match=r"rows\.jsonl:1: the problem is not text"):
        TASKS["gsm8k"].documents(TaskOptions(path=path, subset=True), tokens)


def choices(seed: int) -> list[tuple[list[str], str]]:
    options = TaskOptions(fixture=True, seed=seed)
    found = TASKS["gpqa_diamond"].documents(options, tokens)
    return [(document.details["choices"], document.gold[0]) for document in found]


def test_choices_are_shuffled_by_seed_and_keep_their_answer():
    right = [row["Correct Answer"] for row in read_rows(FIXTURES / "gpqa_diamond.jsonl")]
    for seed in range(20):
        for (order, letter), answer in zip(choices(seed), right, strict=True):
            assert order["ABCD".index(letter)] == answer
    assert choices(3) == choices(3)
    assert choices(3) != choices(4)
    letters = Counter(letter for seed in range(400) for _, letter in choices(seed))
    assert min(letters.values()) > 425  # 500 of 2,000 expected, standard deviation 19


def test_the_fingerprint_tells_documents_apart():
    found = [fingerprint(each.documents(FIXTURE, tokens)) for each in TASKS.values()]
    assert len(set(found)) == len(TASKS)
    documents = TASKS["aime24"].documents(FIXTURE, tokens)
    assert fingerprint(documents) == found[list(TASKS).index("aime24")]
    assert fingerprint(documents[::-1]) != fingerprint(documents)
