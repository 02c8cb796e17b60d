"""`dms-data openr1`: what becomes of every row, and a kill changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dms_train.data.manifest import read_manifest
from dms_train.data.reader import ShardReader
from dms_train.data_prep.prepare import main
from tests.support import dataset_hub, launch
from tests.unit.data_prep.conftest import STOPS, row, trace

WriteRows = Callable[..., str]


@pytest.fixture
def prepare(tmp_path: Path, r1: str) -> Callable[..., int]:
    def run(*words: str) -> int:
        output = str(tmp_path / "out")
        return main(["openr1", *words, "--output", output, "--tokenizer", r1])

    return run


def verdicts(tmp_path: Path, name: str = "out") -> list[Any]:
    lines = (tmp_path / f"{name}.verdicts.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def outcomes(tmp_path: Path) -> list[str]:
    return [one["outcome"] for one in verdicts(tmp_path)]


def texts(tmp_path: Path, r1: str, name: str = "out") -> list[str]:
    decode = AutoTokenizer.from_pretrained(r1).decode
    return [decode(document.tokens) for document in ShardReader(tmp_path / name)]


def refused(capsys: pytest.CaptureFixture[str], status: int, *parts: str) -> None:
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("dms-data: ")
    assert error.count("\n") == 1
    for part in parts:
        assert part in error


SPECIAL = [
    row(0),
    row(1, correctness_math_verify=[False, False]),  # stale: the first trace is right
    row(2, correctness_math_verify=[True]),  # belongs to no trace
    row(3, correctness_math_verify=[], is_reasoning_complete=None),
    row(4, is_reasoning_complete=[False, True]),
    row(5, correctness_math_verify=[False, True]),  # stale: the second trace is wrong
    row(6, generations=["<think>\nSo it is 7.\n</think>\n\nClear.", trace("7")]),
    row(7, answer=None),
    row(8, generations=[]),
]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (
            "flag",
            ["kept", "flag_false", "flag_mismatch", "flag_mismatch", "kept", "kept", "kept"],
        ),
        ("reverify", ["kept"] * 7),
        (
            "strict",
            [
                *("kept", "flag_false", "flag_mismatch", "flag_mismatch", "incomplete", "wrong"),
                "no_answer",
            ],
        ),
    ],
)
def test_filters(
    tmp_path: Path,
    write_rows: WriteRows,
    prepare: Callable[..., int],
    rule: str,
    expected: list[str],
) -> None:
    assert prepare(write_rows(SPECIAL), "--filter", rule) == 0
    assert outcomes(tmp_path) == [*expected, "missing_value", "missing_value"]


def test_traces_of_a_row_and_why_each_is_kept(
    tmp_path: Path, r1: str, write_rows: WriteRows, prepare: Callable[..., int]
) -> None:
    rows = [row(0, generations=[trace("5"), trace("1"), trace("1", "Again."), "none"])]
    file = write_rows(rows)
    assert prepare(file, "--filter", "reverify") == 0
    assert verdicts(tmp_path)[0]["traces"] == ["wrong", "kept", "not_chosen", "no_answer"]
    assert len(texts(tmp_path, r1)) == 1
    assert prepare(file, "--filter", "reverify", "--traces", "all", "--overwrite") == 0
    assert verdicts(tmp_path)[0]["traces"] == ["wrong", "kept", "kept", "no_answer"]
    assert [trace("1") in texts(tmp_path, r1)[0], trace("1", "Again.") in texts(tmp_path, r1)[1]]


def test_lengths_are_limited_and_the_next_trace_is_taken(
    tmp_path: Path, r1: str, write_rows: WriteRows, prepare: Callable[..., int]
) -> None:
    both = {"correctness_math_verify": [True, True]}
    rows = [
        row(0, generations=[trace("1", "Well. " * 50), trace("1")], **both),
        row(1, generations=[trace("2", "Well. " * 50)] * 2, **both),
        row(2, generations=["<think>a</think>b"] * 2, **both),
    ]
    assert prepare(write_rows(rows), "--max-tokens", "100", "--min-tokens", "35") == 0
    assert outcomes(tmp_path) == ["kept", "too_long", "too_short"]
    assert verdicts(tmp_path)[0]["traces"] == ["too_long", "kept"]
    assert trace("1") in texts(tmp_path, r1)[0]
    assert [35 <= len(one.tokens) <= 100 for one in ShardReader(tmp_path / "out")] == [True]


def test_problems_of_evaluation_sets_are_left_out_and_reported(
    tmp_path: Path, write_rows: WriteRows, prepare: Callable[..., int]
) -> None:
    shared = "a train leaves the city at noon and travels north at sixty miles an hour"
    rows = [
        row(0, problem="What is   x+1 IF x = 2?"),
        row(1, problem="What is x-1 if x = 2?"),
        row(2, problem=f"Today {shared}. How far is it after two hours?"),
        row(3, problem="A train leaves the city at noon and travels south. Where is it?"),
    ]
    sets = write_rows(
        [{"problem": "What is x+1 if x = 2?"}, {"question": f"Suppose {shared}! When is it home?"}],
        "evaluation.jsonl",
    )
    assert prepare(write_rows(rows), "--evaluation-set", sets) == 0
    assert outcomes(tmp_path) == ["evaluation_overlap", "kept", "evaluation_overlap", "kept"]
    hits = [one.get("overlap") for one in verdicts(tmp_path)]
    assert (hits[0]["kind"], hits[0]["where"]) == ("exact", "evaluation.jsonl: row 0")
    assert (hits[2]["kind"], hits[2]["where"]) == ("13-gram", "evaluation.jsonl: row 1")
    assert hits[2]["words"] == "a train leaves the city at noon and travels north at sixty miles"
    preparation = read_manifest(tmp_path / "out").preparation
    assert preparation is not None
    assert preparation["overlaps"] == {"evaluation.jsonl, 13-gram": 1, "evaluation.jsonl, exact": 1}


def test_gpqa_and_livecodebench_are_evaluation_sets(
    tmp_path: Path, write_rows: WriteRows, prepare: Callable[..., int]
) -> None:
    gas = "has the lowest boiling point at a pressure of one atmosphere"
    (tmp_path / "gpqa_diamond.csv").write_bytes(
        b"\xef\xbb\xbfPre-Revision Question,Question,Correct Answer\r\n"
        b'old,"Which ""gas"", of these four,\n' + gas.encode() + b'?",Helium\r\n'
        b"\r\n"
        b"What is 3 + 1?,Which is the lightest lepton?,The electron\r\n"
    )
    programs = [
        {"question_title": "What is 3 + 1?", "question_content": "Read n.\nPrint 2n."},
        {"question_title": "B", "question_content": f"Print which gas of these {gas}."},
    ]
    rows = [
        row(0, problem=f'WHICH "gas", of these four, {gas}?'),
        row(1, problem=f"Helium, of these four, {gas}. Why?"),
        row(2, problem="Which is the lightest lepton?"),
        row(3),  # an older version of a question, and a title
        row(4, problem="Read n. Print 2n."),
        row(5, problem=f"We ask which gas of these {gas}."),
    ]
    sets = (str(tmp_path / "gpqa_diamond.csv"), write_rows(programs, "test.jsonl"))
    words = [word for path in sets for word in ("--evaluation-set", path)]
    assert prepare(write_rows(rows), *words) == 0
    hits = [one.get("overlap") for one in verdicts(tmp_path)]
    assert [hit and (hit["kind"], hit["where"]) for hit in hits] == [
        ("exact", "gpqa_diamond.csv: row 0"),
        ("13-gram", "gpqa_diamond.csv: row 0"),
        ("exact", "gpqa_diamond.csv: row 1"),
        None,
        ("exact", "test.jsonl: row 0"),
        ("13-gram", "test.jsonl: row 1"),
    ]
    preparation = read_manifest(tmp_path / "out").preparation
    assert preparation is not None
    found = [(one["name"], one["problems"]) for one in preparation["settings"]["evaluation_sets"]]
    assert found == [("gpqa_diamond.csv", 2), ("test.jsonl", 2)]


def test_the_manifest_says_how_the_documents_were_chosen(
    tmp_path: Path, r1: str, write_rows: WriteRows, prepare: Callable[..., int]
) -> None:
    file = write_rows(SPECIAL)
    assert prepare(file, "--append-eod") == 0
    manifest = read_manifest(tmp_path / "out")
    found = manifest.preparation
    assert found is not None
    assert found["rows"] == {
        "read": 9,
        "kept": 4,
        "flag_mismatch": 2,
        "missing_value": 2,
        "flag_false": 1,
    }
    assert found["traces"] == {"flag_false": 6, "flag_mismatch": 4, "kept": 4}
    tokenizer = AutoTokenizer.from_pretrained(r1)
    assert found["settings"]["chat_template"] == tokenizer.chat_template
    assert found["settings"]["filter"] == "flag"
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    assert found["settings"]["sources"] == [["rows.jsonl", digest]]
    digest = hashlib.sha256((tmp_path / "out.verdicts.jsonl").read_bytes()).hexdigest()
    assert found["verdicts_sha256"] == digest
    assert (manifest.eod_id, manifest.sources[0].rows) == (tokenizer.eos_token_id, 4)
    assert manifest.loss_mask is not None
    assert found["loss_tokens"] == manifest.loss_mask.loss_tokens
    assert main(["check", str(tmp_path / "out")]) == 0


def test_loss_on_all_writes_no_mask(
    tmp_path: Path, write_rows: WriteRows, prepare: Callable[..., int]
) -> None:
    assert prepare(write_rows([row(0)]), "--loss-on", "all") == 0
    assert read_manifest(tmp_path / "out").loss_mask is None
    assert not list(tmp_path.glob("out.loss_mask*"))


def test_parquet_json_and_workers_give_the_same_documents(
    tmp_path: Path, r1: str, write_rows: WriteRows, prepare: Callable[..., int]
) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [row(number) for number in range(90)]
    assert prepare(write_rows(rows), "--filter", "reverify") == 0
    expected = (tmp_path / "out.bin").read_bytes()
    assert len(texts(tmp_path, r1)) == 90
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table.slice(0, 50), tmp_path / "a.parquet", row_group_size=20)
    parquet.write_table(table.slice(50), tmp_path / "b.parquet")
    files = (str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet"))
    assert prepare(*files, "--filter", "reverify", "--workers", "2", "--overwrite") == 0
    assert (tmp_path / "out.bin").read_bytes() == expected
    assert [source.rows for source in read_manifest(tmp_path / "out").sources] == [50, 40]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    assert prepare(str(tmp_path / "rows.json"), "--filter", "reverify", "--overwrite") == 0
    assert (tmp_path / "out.bin").read_bytes() == expected


def test_shards_hold_every_row_once(
    tmp_path: Path, r1: str, write_rows: WriteRows, prepare: Callable[..., int]
) -> None:
    file = write_rows([row(number) for number in range(10)])
    for index in range(3):
        assert prepare(file, "--shard", f"{index}/3") == 0
    names = [f"out-0000{index}-of-00003" for index in range(3)]
    keys = [[one["row"] for one in verdicts(tmp_path, name)] for name in names]
    assert keys == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert sum(len(texts(tmp_path, r1, name)) for name in names) == 10


@pytest.fixture(scope="module")
def long_job(tmp_path_factory: pytest.TempPathFactory, r1: str) -> tuple[Path, list[str]]:
    """A folder with the result of an undisturbed call, and the words of the call."""
    folder = tmp_path_factory.mktemp("long")
    rows = [row(number, problem=f"What is {number}? " * 20) for number in range(1500)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (folder / "evaluation.jsonl").write_text(json.dumps({"problem": "What is 7? " * 20}))
    words = ["openr1", str(folder / "rows.jsonl"), "--tokenizer", r1]
    words += ["--evaluation-set", str(folder / "evaluation.jsonl"), "--output"]
    assert main([*words, str(folder / "out")]) == 0
    return folder, words


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_call_goes_on_and_gives_the_same_files(
    tmp_path: Path, long_job: tuple[Path, list[str]], sent: signal.Signals
) -> None:
    whole, words = long_job
    output = str(tmp_path / "out")
    process = subprocess.Popen(
        [sys.executable, "-c", STOPS, *words, output],
        env=launch.environment(),
        cwd=launch.ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    state = tmp_path / "out.work" / "state.json"
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1]), "give it more rows"
    process.send_signal(sent)
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate()
    assert process.returncode != 0
    if sent is signal.SIGINT:
        assert said == "dms-data: interrupted; run the same command to continue\n"
    assert 0 < json.loads(state.read_text())["next_row"] < 1500
    with (state.parent / "verdicts.jsonl").open("ab") as torn:
        torn.write(b'{"row": 29')  # what was written after the last commit does not count
    assert main([*words, output]) == 0
    for suffix in ("manifest.json", "bin", "idx", "loss_mask.bin", "verdicts.jsonl"):
        pair = [(folder / f"out.{suffix}").read_bytes() for folder in (whole, tmp_path)]
        assert pair[0] == pair[1], suffix
    assert not state.parent.exists()


def test_unfinished_work_with_other_settings_is_not_continued(
    tmp_path: Path,
    write_rows: WriteRows,
    prepare: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = [*(row(number) for number in range(300)), {"problem": "no columns"}]
    file = write_rows(bad)
    refused(capsys, prepare(file), "row 300", "no column")
    assert (tmp_path / "out.work" / "state.json").exists()
    refused(capsys, prepare(file, "--filter", "strict"), "out.work", "filter", "--overwrite")
    write_rows(bad[:-1])
    refused(capsys, prepare(file), "sources", "--overwrite")
    assert prepare(file, "--overwrite") == 0
    assert read_manifest(tmp_path / "out").documents == 300


def test_a_finished_shard_is_kept(
    tmp_path: Path,
    write_rows: WriteRows,
    prepare: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write_rows([row(0)])
    assert prepare(file) == 0
    before = os.stat(tmp_path / "out.manifest.json").st_mtime_ns
    assert prepare(file) == 0
    assert os.stat(tmp_path / "out.manifest.json").st_mtime_ns == before
    capsys.readouterr()
    refused(capsys, prepare(file, "--traces", "all"), "other settings", "--overwrite")


def test_two_processes_do_not_share_an_output(
    tmp_path: Path,
    write_rows: WriteRows,
    prepare: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    import fcntl

    (tmp_path / "out.work").mkdir()
    with (tmp_path / "out.work" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(capsys, prepare(write_rows([row(0)])), "another process works on this output")


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ({"problem": "a"}, ("row 1", "no column answer, generations", "OpenR1-Math-220k")),
        (row(1, answer=3), ("row 1", "answer is int")),
        (row(1, generations="text"), ("row 1", "generations is not a list of str")),
        (row(1, generations=[1]), ("row 1", "generations is not a list of str")),
        (row(1, correctness_math_verify=["x"]), ("row 1", "correctness_math_verify", "bool")),
        (["list"], ("rows.jsonl:2", "give an object with named columns")),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_left(
    tmp_path: Path,
    write_rows: WriteRows,
    prepare: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    value: Any,
    parts: tuple[str, ...],
) -> None:
    refused(capsys, prepare(write_rows([row(0), value])), *parts)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("absent.parquet",), ("absent.parquet: No such file",)),
        (("absent.jsonl",), ("absent.jsonl: No such file",)),
        (("page.pdf",), ("page.pdf: unknown file type",)),
        (("nobody/nothing",), ("nobody/nothing", "local hub cache", "--allow-network")),
        (("broken.parquet",), ("broken.parquet: not a parquet file",)),
        (("rows.jsonl", "--max-tokens", "2", "--min-tokens", "3"), ("3 to 2 tokens",)),
        (("rows.jsonl", "--max-tokens", "2"), ("no row is kept (1 too_long)", "verdicts.jsonl")),
        (("rows.jsonl", "--evaluation-set", "rows.txt"), ("rows.txt: unknown file type",)),
        (("rows.jsonl", "--evaluation-set", "text.jsonl"), ("text.jsonl", "problem, question")),
    ],
)
def test_unfit_input_is_refused(
    tmp_path: Path,
    write_rows: WriteRows,
    prepare: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    parts: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows([row(0)])
    write_rows([{"text": "a"}], "text.jsonl")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    refused(capsys, prepare(*words), *parts)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b'Question\na\n"b\nc\n', (":4: cannot be read", "unexpected end of data")),
        (b'Question\n"a"b\n', (":2: cannot be read", "expected after")),
        (b"id,Question\n1,a\n\n2\n", (":4: cannot be read", "1 cells for 2 columns")),
        (b"Question\na\nb,c\n", (":3: cannot be read", "2 cells for 1 columns")),
        (b"Question,Question\na,b\n", (":1: cannot be read", "two columns have the same name")),
        (b"Question\n" + b"a\n" * 3 + b"\xff\n", (":5: not UTF-8", "invalid start byte")),
        (b"Question\na\n\0\n", (":3: a NUL byte", "UTF-8")),
        ("Question\na\n".encode("utf-16"), (": UTF-16 text", "save the file as UTF-8")),
    ],
)
def test_a_damaged_row_of_a_csv_file_is_named(
    tmp_path: Path,
    write_rows: WriteRows,
    prepare: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    parts: tuple[str, str],
) -> None:
    file = tmp_path / "set.csv"
    file.write_bytes(content)
    where, reason = parts
    status = prepare(write_rows([row(0)]), "--evaluation-set", str(file))
    refused(capsys, status, f"{file}{where}", reason)


def page_of(path: Path) -> int:
    """Return the page on which the problems of rows 30 to 59 begin."""
    from pyarrow import parquet

    column = parquet.read_metadata(path).row_group(1).column(0)
    assert column.path_in_schema == "problem"
    return int(column.data_page_offset)


def text_of(path: Path) -> int:
    return path.read_bytes().index(b"What is 45")


def footer_of(path: Path) -> int:
    content = path.read_bytes()
    return len(content) - 8 - int.from_bytes(content[-8:-4], "little")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (page_of, "rows from 30 on cannot be read (Couldn't deserialize thrift"),
        (text_of, "rows from 30 on cannot be read ('utf-8' codec can't decode byte"),
        (footer_of, "not a parquet file (Couldn't deserialize thrift"),
    ],
)
def test_a_damaged_parquet_file_is_named(
    tmp_path: Path,
    prepare: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    place: Callable[[Path], int],
    said: str,
) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    table = pyarrow.Table.from_pylist([row(number) for number in range(90)])
    parquet.write_table(table, path, row_group_size=30, compression="none", use_dictionary=False)
    start = place(path)
    content = bytearray(path.read_bytes())
    content[start : start + 8] = b"\xff" * 8
    path.write_bytes(content)
    refused(capsys, prepare(str(path)), f"{path}: {said}", "copy it again")


def test_missing_packages_are_named(
    write_rows: WriteRows,
    prepare: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sys, "argv", ["dms-data"])
    monkeypatch.setitem(sys.modules, "math_verify", None)
    refused(capsys, prepare(write_rows([row(0)]), "--filter", "reverify"), "pip install")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "rows.parquet").touch()
    refused(capsys, prepare(str(tmp_path / "rows.parquet")), "needs pyarrow", "dms-train[data]")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(capsys, prepare("owner/name"), "needs datasets", "dms-train[data]")


def test_a_data_set_of_the_local_hub_cache_is_read(
    tmp_path: Path, r1: str, write_rows: WriteRows
) -> None:
    import pyarrow
    from pyarrow import parquet

    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub" / "datasets--owner--name"
    snapshot = cached / "snapshots" / commit / "data"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    rows = [row(number) for number in range(5)]
    table = pyarrow.Table.from_pylist([{**one, "extra": 1} for one in rows])
    parquet.write_table(table, snapshot / "train-00000-of-00001.parquet")
    words = ["--tokenizer", r1, "--output", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "dms_train.data_prep.prepare", "openr1", "owner/name", *words],
        env=launch.environment(HF_HUB_CACHE=str(tmp_path / "hub"), HF_HOME=str(tmp_path / "home")),
        cwd=launch.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert main(["openr1", write_rows(rows), *words[:-1], str(tmp_path / "local")]) == 0
    assert texts(tmp_path, r1) == texts(tmp_path, r1, "local")
    (source,) = read_manifest(tmp_path / "out").sources
    assert source.name == f"owner/name:default:train@{commit}"


def parquet_bytes(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    stream = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), stream, row_group_size=100)
    return stream.getvalue().to_pybytes()


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_streamed_with_consent_and_continued(
    tmp_path: Path, r1: str, write_rows: WriteRows
) -> None:
    rows = [row(number) for number in range(330)]
    parts = {f"data/train-0000{n}-of-00002.parquet": rows[300 * n :][:300] for n in (0, 1)}
    words = ["openr1", dataset_hub.NAME, "--tokenizer", r1, "--output", str(tmp_path / "out")]
    files = {name: parquet_bytes(part) for name, part in parts.items()}
    with dataset_hub.dataset_hub(files) as hub:
        settings = hub.environment(str(tmp_path / "home"))
        hub.lost = {max(files)}
        command = ("-m", "dms_train.data_prep.prepare", *words)
        done = launch.python(*command, **settings)
        assert (done.returncode, hub.requests) == (2, [])
        assert "stream it with --allow-network" in done.stderr
        done = launch.python(*command, "--allow-network", **settings)
        assert done.returncode == 2
        assert "owner/name: row 300 cannot be read" in done.stderr
        state = json.loads((tmp_path / "out.work" / "state.json").read_text())
        assert 0 < state["next_row"] <= 300
        hub.lost = set()
        launch.checked(launch.python(*command, "--allow-network", **settings))
    assert main(["openr1", write_rows(rows), *words[2:5], str(tmp_path / "local")]) == 0
    assert texts(tmp_path, r1) == texts(tmp_path, r1, "local")
    (source,) = read_manifest(tmp_path / "out").sources
    assert source.name == f"owner/name:default:train@{dataset_hub.COMMIT}"
    assert not list((tmp_path / "home").rglob("*.parquet"))  # streamed, not downloaded


@pytest.mark.parametrize(("rule", "kept"), [("flag", 25), ("reverify", 28), ("strict", 23)])
def test_the_sample_records(
    tmp_path: Path, real_data: Path, prepare: Callable[..., int], rule: str, kept: int
) -> None:
    sample = str(real_data / "openr1-sample.jsonl")
    assert prepare(sample, "--filter", rule, "--traces", "all") == 0
    found = {one["row"]: one for one in verdicts(tmp_path)}
    assert sum(one["outcome"] == "kept" for one in found.values()) == kept
    if rule == "reverify":
        assert found[31]["outcome"] == "no_answer"  # no final answer, but the last number is right
        assert found[32]["outcome"] == "wrong"  # two boxes
        assert found[33]["traces"] == ["timeout", "kept"]
        assert found[34]["outcome"] == "no_answer"  # malformed
        assert found[35]["outcome"] == "kept"  # a word
        assert found[37]["outcome"] == "wrong"  # a proof
    if rule == "strict":
        assert found[26]["outcome"] == "wrong"  # flagged, but wrong
        assert found[29]["outcome"] == "incomplete"  # cut off in its reasoning
        assert found[38]["outcome"] == "flag_mismatch"
