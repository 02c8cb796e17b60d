"""`dms-data` from text files to documents read back through Megatron's reader."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from transformers import AutoTokenizer

from dms_train.data.manifest import file_sha256, read_manifest
from dms_train.data_prep.exam_tokenizer import write_exam_tokenizer
from dms_train.data_prep.prepare import main

KEEPS = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] | trim }}\n{% endfor %}"
DROPS = "{% for m in messages %}{{ m['content'].split('</think>')[-1] }}\n{% endfor %}"
DIALOG = [
    {"role": "user", "content": "two and one"},
    {"role": "assistant", "content": "<think>add</think> 3"},
]


@pytest.fixture(scope="module")
def exam_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_exam_tokenizer(directory)
    return str(directory)


@pytest.fixture(scope="module")
def stories_tokenizer(real_data: Path) -> str:
    return str(real_data / "stories260k-hf")


def tokenize(source: Path, tokenizer: str, *flags: str) -> int:
    output = str(source.parent / "out")
    return main(["tokenize", str(source), "--output", output, "--tokenizer", tokenizer, *flags])


def documents(source: Path, tokenizer: str) -> list[str]:
    data = IndexedDataset(str(source.parent / "out"))
    decode = AutoTokenizer.from_pretrained(tokenizer).decode
    return [decode(data[i]) for i in range(len(data))]


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def write_rows(tmp_path: Path, *rows: Any) -> Path:
    return write(tmp_path, "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out"))


def refused(capsys: pytest.CaptureFixture[str], status: int, *parts: str) -> None:
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("dms-data: ")
    assert error.count("\n") == 1
    for part in parts:
        assert part in error


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), ["one\ntwo\n\n \n\nthree"]),
        (("--split-on-blank-line",), ["one\ntwo", "three"]),
        (("--document-per-line",), ["one", "two", "three"]),
        (("--document-per-line", "--limit", "2"), ["one", "two"]),
    ],
)
def test_text_files(
    tmp_path: Path, exam_tokenizer: str, flags: tuple[str, ...], expected: list[str]
) -> None:
    source = write(tmp_path, "in.txt", "one\ntwo\n\n \n\nthree")
    assert tokenize(source, exam_tokenizer, *flags) == 0
    assert documents(source, exam_tokenizer) == expected


def test_manifest_describes_the_shard(tmp_path: Path, exam_tokenizer: str) -> None:
    source = write_rows(tmp_path, {"text": "ab"}, {"text": " "}, {"text": "cde"})
    assert tokenize(source, exam_tokenizer, "--append-eod") == 0
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.documents, manifest.tokens, manifest.eod_id) == (2, 7, 0)
    assert (manifest.vocab_size, manifest.max_token_id, manifest.dtype) == (50, 28, "uint16")
    assert manifest.tokenizer_sha256 == file_sha256(Path(exam_tokenizer) / "tokenizer.json")
    assert [(s.name, s.rows) for s in manifest.sources] == [("rows.jsonl", 2)]
    assert manifest.sources[0].sha256 == file_sha256(source)
    assert documents(source, exam_tokenizer) == ["ab<eod>", "cde<eod>"]
    assert left(tmp_path) == ["out.bin", "out.idx", "out.manifest.json"]
    assert main(["check", str(tmp_path / "out")]) == 0


def test_a_damaged_shard_fails_the_check(
    tmp_path: Path, exam_tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokenize(write(tmp_path, "in.txt", "one"), exam_tokenizer) == 0
    (tmp_path / "out.bin").write_bytes(b"\1" * 6)
    refused(capsys, main(["check", str(tmp_path / "out")]), "out.bin", "SHA-256")


def test_stories_end_to_end(tmp_path: Path, real_data: Path, stories_tokenizer: str) -> None:
    lines = (real_data / "stories.jsonl").read_text("utf-8").splitlines()[:150]
    source = write(tmp_path, "stories.jsonl", "\n".join(lines))
    assert tokenize(source, stories_tokenizer, "--add-bos", "--append-eod") == 0
    texts = [json.loads(line)["text"] for line in lines]
    data = IndexedDataset(str(tmp_path / "out"))
    assert all(data[i][0] == 1 and data[i][-1] == 2 for i in range(len(data)))
    tokenizer = AutoTokenizer.from_pretrained(stories_tokenizer)
    read = [tokenizer.decode(data[i], skip_special_tokens=True) for i in range(len(data))]
    assert [text.strip() for text in read] == [text.strip() for text in texts]


def test_tokens_equal_the_published_ones(
    tmp_path: Path, real_data: Path, stories_tokenizer: str
) -> None:
    golden = json.loads((real_data / "stories260k-hf" / "golden.json").read_text("utf-8"))
    expected = golden["greedy_from_bos_200"]
    source = write_rows(tmp_path, {"text": expected["text"]})
    assert tokenize(source, stories_tokenizer, "--add-bos") == 0
    data = IndexedDataset(str(tmp_path / "out"))  # its arrays are freed with it
    assert data[0].tolist() == expected["ids"]


def test_wikitext(tmp_path: Path, real_data: Path, stories_tokenizer: str) -> None:
    text = (real_data / "wikitext-2" / "valid.txt").read_text("utf-8")[:20_000]
    source = write(tmp_path, "in.txt", text)
    assert tokenize(source, stories_tokenizer) == 0
    tokenizer = AutoTokenizer.from_pretrained(stories_tokenizer)
    data = IndexedDataset(str(tmp_path / "out"))
    assert data[0].tolist() == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.unk_token_id in data[0]  # written out as <unk> in the text


def test_workers_do_not_change_the_output(tmp_path: Path, exam_tokenizer: str) -> None:
    source = write_rows(tmp_path, *({"text": f"{i}"} for i in range(300)))
    assert tokenize(source, exam_tokenizer) == 0
    alone = (tmp_path / "out.bin").read_bytes()
    assert tokenize(source, exam_tokenizer, "--workers", "2", "--overwrite") == 0
    assert (tmp_path / "out.bin").read_bytes() == alone


def test_conversations_keep_their_reasoning(
    tmp_path: Path, real_data: Path, stories_tokenizer: str
) -> None:
    rows = (real_data / "openr1-sample.jsonl").read_text("utf-8").splitlines()[:5]
    source = write(tmp_path, "in.jsonl", "\n".join(rows))
    template = str(write(tmp_path, "keeps.jinja", KEEPS))
    flags = ("--messages-key", "messages", "--chat-template", template)
    assert tokenize(source, stories_tokenizer, *flags) == 0
    for row, text in zip(rows, documents(source, stories_tokenizer), strict=True):
        assert json.loads(row)["messages"][1]["content"].strip() in text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (DROPS, "rows.jsonl:2: the chat template drops part of an assistant turn"),
        ("{{ raise_exception('odd roles') }}", "the chat template failed (odd roles)"),
        (None, "the chat template failed"),
    ],
)
def test_unfit_chat_templates_are_refused(
    tmp_path: Path,
    exam_tokenizer: str,
    capsys: pytest.CaptureFixture[str],
    template: str | None,
    message: str,
) -> None:
    harmless = {"role": "user", "content": "two"}
    source = write_rows(tmp_path, {"talk": [harmless]}, {"talk": DIALOG})
    flags = ["--messages-key", "talk"]
    if template is not None:
        flags += ["--chat-template", str(write(tmp_path, "template.jinja", template))]
    refused(capsys, tokenize(source, exam_tokenizer, *flags), message, "--chat-template FILE")
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "b"', "not valid JSON"),
        ('{"body": "b"}', 'has no field "text"'),
        ('["b"]', 'has no field "text"'),
        ('{"text": 3}', "expected text, found int"),
        ('{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_a_bad_row_is_named(
    tmp_path: Path,
    exam_tokenizer: str,
    capsys: pytest.CaptureFixture[str],
    line: str,
    message: str,
) -> None:
    source = write(tmp_path, "rows.jsonl", '{"text": "a"}\n\n' + line + "\n")
    refused(capsys, tokenize(source, exam_tokenizer), "rows.jsonl:3:", message)
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "not a list of messages"),
        ("talk", "not a list of messages"),
        ([{"role": "user"}], "a role and a content"),
        ([{"role": "user", "content": None}], "expected text, found NoneType"),
    ],
)
def test_a_bad_conversation_is_named(
    tmp_path: Path,
    exam_tokenizer: str,
    capsys: pytest.CaptureFixture[str],
    value: Any,
    message: str,
) -> None:
    source = write_rows(tmp_path, {"talk": value})
    refused(capsys, tokenize(source, exam_tokenizer, "--messages-key", "talk"), ":1:", message)


@pytest.mark.parametrize("text", ["", " \n\n"])
@pytest.mark.parametrize("name", ["in.txt", "in.jsonl"])
def test_empty_input_is_refused(
    tmp_path: Path,
    exam_tokenizer: str,
    capsys: pytest.CaptureFixture[str],
    text: str,
    name: str,
) -> None:
    source = write(tmp_path, name, text)
    refused(capsys, tokenize(source, exam_tokenizer), "no documents")
    assert left(tmp_path) == []


def test_other_files_are_refused(
    tmp_path: Path, exam_tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, tokenize(tmp_path / "absent.txt", exam_tokenizer), "absent.txt")
    refused(capsys, tokenize(write(tmp_path, "in.csv", "a"), exam_tokenizer), "file type")
    (tmp_path / "in.txt").write_bytes(b"a\n\xff\n")
    refused(capsys, tokenize(tmp_path / "in.txt", exam_tokenizer), "in.txt:2: not UTF-8")


def test_unfit_tokenizers_are_refused(
    tmp_path: Path, exam_tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path, "in.txt", "one")
    refused(capsys, tokenize(source, str(tmp_path)), "no tokenizer.json")
    refused(capsys, tokenize(source, exam_tokenizer, "--add-bos"), "no bos_token")
    refused(capsys, tokenize(source, exam_tokenizer, "--eod-token", "</s>"), "no token '</s>'")
    write(tmp_path, "tokenizer.json", "{}")
    refused(capsys, tokenize(source, str(tmp_path)), "does not load")


def test_existing_shard_is_kept(
    tmp_path: Path, exam_tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path, "in.txt", "one")
    assert tokenize(source, exam_tokenizer) == 0
    before = (tmp_path / "out.bin").read_bytes()
    capsys.readouterr()
    source.write_text("other")
    refused(capsys, tokenize(source, exam_tokenizer), "--overwrite")
    source.write_text("É")
    status = tokenize(source, exam_tokenizer, "--overwrite")
    refused(capsys, status, "in.txt:1: cannot be tokenised")
    assert (tmp_path / "out.bin").read_bytes() == before
    assert main(["check", str(tmp_path / "out")]) == 0


def test_full_disk_leaves_nothing_behind(
    tmp_path: Path, exam_tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "out.partial.bin").symlink_to("/dev/full")
    source = write(tmp_path, "in.txt", "one\n" * 9000)
    refused(capsys, tokenize(source, exam_tokenizer, "--document-per-line"), "No space left")
    assert left(tmp_path) == []


def test_works_without_a_progress_bar(
    tmp_path: Path, exam_tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert tokenize(write(tmp_path, "in.txt", "one"), exam_tokenizer) == 0


def test_exam_sheets_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "exam"
    command = ["exam-sheets", "--out", str(out), "--sheets", "20", "--n-max", "2"]
    assert main(command) == 0
    rows = [json.loads(line) for line in (out / "sheets.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    assert {row["text"].count(": Solve ") for row in rows} == {1, 2}
    data = IndexedDataset(str(out / "train"))
    tokenizer = AutoTokenizer.from_pretrained(str(out / "tokenizer"))
    texts = [tokenizer.decode(data[i]) for i in range(len(data))]
    assert texts == [row["text"] + "<eod>" for row in rows]
    before = (out / "train.bin").read_bytes()
    capsys.readouterr()
    refused(capsys, main(command), "--overwrite")
    assert main([*command, "--overwrite"]) == 0
    assert (out / "train.bin").read_bytes() == before
    assert main([*command, "--overwrite", "--seed", "1"]) == 0
    assert (out / "train.bin").read_bytes() != before


def test_question_range_must_be_a_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["exam-sheets", "--out", str(tmp_path), "--sheets", "1", "--n-min", "3"]
    refused(capsys, main([*command, "--n-max", "2"]), "--n-min 3 is above --n-max 2")


def test_a_folder_gives_all_of_its_text_files_in_order(
    tmp_path: Path, exam_tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    books = tmp_path / "books"
    files = {"b.md": "one", "a/z.txt": "two", "a/c.rst": "three", "d.tex": "four"}
    for name, text in {**files, "x.pdf": "no", ".git/y.md": "no", "a/.z.txt": "no"}.items():
        (books / name).parent.mkdir(parents=True, exist_ok=True)
        (books / name).write_text(text, encoding="utf-8")
    (books / "rows.jsonl").write_text('{"text": "five"}\n', encoding="utf-8")
    assert tokenize(books, exam_tokenizer, "--source", "https://a.b/c", "--license", "CC0") == 0
    assert documents(books, exam_tokenizer) == ["three", "two", "one", "four", "five"]
    manifest = read_manifest(tmp_path / "out")
    names = ["c.rst", "z.txt", "b.md", "d.tex", "rows.jsonl"]
    assert [(one.name, one.rows) for one in manifest.sources] == [(name, 1) for name in names]
    (origin,) = manifest.origins
    assert (origin.source, origin.license, origin.model) == ("https://a.b/c", "CC0", None)
    assert (origin.sha256, origin.tokens) == (manifest.bin_sha256, manifest.tokens)
    capsys.readouterr()
    (tmp_path / "empty").mkdir()
    assert tokenize(tmp_path / "empty", exam_tokenizer, "--overwrite") == 2
    assert "empty: no .txt, .md, .rst, .tex, .jsonl file in this folder" in capsys.readouterr().err


def test_a_file_of_another_encoding_in_a_folder_is_named(
    tmp_path: Path, exam_tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "old.md").write_bytes("caf\u00e9".encode("latin-1"))
    assert tokenize(tmp_path / "books", exam_tokenizer) == 2
    assert f"{tmp_path / 'books' / 'old.md'}:1: not UTF-8" in capsys.readouterr().err
    assert not left(tmp_path)


def test_passages_hold_whole_lines_and_the_whole_text(tmp_path: Path, exam_tokenizer: str) -> None:
    lines = ["", "", *("two and one" for _ in range(8)), "", "", "three", "", ""]
    source = write(tmp_path, "book.md", "\n".join(lines) + "\n")
    assert tokenize(source, exam_tokenizer, "--passages", "30") == 0
    found = [text.split() for text in documents(source, exam_tokenizer)]
    assert " ".join(" ".join(words) for words in found) == " ".join(" ".join(lines).split())
    # blank lines at the beginning of the first document count as its characters
    assert [len(words) for words in found] == [9, 9, 7]
