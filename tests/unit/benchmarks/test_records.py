"""Stored records are printed again, and other files are refused in one line."""

from __future__ import annotations

import json
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from benchmarks import stale
from benchmarks.__main__ import main
from benchmarks.records import ROOT, Table, measured_at, origin, show, write_page
from dms_train.evaluation.errors import EvaluationError

STORED = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "nvidia_h200"
# Command, option, record, page that quotes all rows.
QUOTED = [
    ("serve", "--table", "serve.json", "performance/serving.md"),
    ("serve", "--predicted", "serve.json", "performance/serving.md"),
    ("serve kernels", "--table", "kernels_llama_3_2_1b_1.json", "performance/serving.md"),
    ("serve kernels", "--table", "kernels_llama_3_1_8b_32.json", "performance/serving.md"),
    ("serve online", "--table", "online.json", "performance/serving.md"),
    ("policies_decode", "--table", "policies_decode.json", "performance/serving.md"),
    ("policies_prefill", "--table", "policies_prefill.json", "performance/serving.md"),
    ("policies_prefill", "--table", "policies_prefill_llama_3_1_8b.json", "performance/serving.md"),
    ("attention", "--table", "attention.json", "performance/attention.md"),
    ("attention accuracy", "--table", "accuracy.json", "performance/attention.md"),
    ("vocab_loss", "--table", "vocab_loss.json", "concepts/distillation.md"),
    ("plan_memory", "--table", "plan_memory.json", "guides/planning.md"),
]
UNQUOTED = [  # the pages of these have their numbers in sentences or with further columns
    ("serve throughput", "--table", "throughput.json"),
    ("packed_attention", "--table", "packed_attention.json"),
    ("train_step", "--table", "train_step.json"),
    ("train_step", "--kernels", "train_step.json"),
    ("harness", "--table", "harness.json"),
]


def exit_code(words: list[str]) -> object:
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(("name", "option", "record", "page"), QUOTED)
def test_pages_quote_the_tables_of_the_records(
    name: str, option: str, record: str, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code([*name.split(), option, str(STORED / record)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    quoted = set((ROOT / "docs" / page).read_text().splitlines())
    # the page has Quest from another run
    assert [row for row in rows if row not in quoted and "`quest`" not in row] == []
    assert len(rows) > 4


@pytest.mark.parametrize(("name", "option", "record"), [each[:3] for each in QUOTED] + UNQUOTED)
def test_another_file_is_refused(
    name: str, option: str, record: str, tmp_path: Path, capsys
) -> None:
    assert exit_code([*name.split(), option, str(STORED / record)]) == 0
    capsys.readouterr()
    file = tmp_path / "other.json"
    for text in ("", "[]", "{}", '{"models": {"teacher": {}}}', "\x80"):
        file.write_bytes(text.encode("latin-1"))
        assert exit_code([*name.split(), option, str(file)]) == 2, text
        refusal = capsys.readouterr().err
        assert str(file) in refusal, text
        assert refusal.count("\n") == 1, text


def test_a_gpu_that_is_not_known_is_named(tmp_path: Path, capsys) -> None:
    record = json.loads((STORED / "serve.json").read_text()) | {"device": "Riva 128"}
    (tmp_path / "serve.json").write_text(json.dumps(record))
    assert main(["serve", "--predicted", str(tmp_path / "serve.json")]) == 2
    assert "Riva 128" in capsys.readouterr().err


def test_every_stored_record_is_json_in_the_folder_of_its_device() -> None:
    for file in ROOT.glob("*/results/*/*.json"):
        device = json.loads(file.read_text())["device"]
        assert re.sub(r"\W+", "_", device.lower()) == file.parent.name


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with one committed file."""
    monkeypatch.delenv("DMS_COMMIT", raising=False)
    commit(tmp_path, "code.py", "1")
    return tmp_path


def commit(tree: Path, name: str, text: str) -> str:
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text(text)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", f"{name}: {text[:20]}"]):
        subprocess.run(["git", "-C", str(tree), *words], check=True)
    head = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    return subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()


def test_a_record_names_the_commit_and_whether_files_differ_from_it(tree: Path) -> None:
    head = commit(tree, "code.py", "2")
    assert origin(tree)["commit"] == head
    assert "changed" not in origin(tree)
    (tree / "new.json").write_text("not tracked")
    assert "changed" not in origin(tree)
    (tree / "code.py").write_text("3")
    found = origin(tree)
    assert (found["commit"], found["changed"]) == (head, True)
    assert measured_at({**found, "date": "2026-01-02"}) == f"{head[:7]} with changes, 2026-01-02"


def test_the_variable_names_the_commit_where_there_is_no_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy inside another repository does not take that one's commit."""
    monkeypatch.delenv("DMS_COMMIT", raising=False)
    commit(tmp_path, "other.py", "1")
    copy = tmp_path / "copy"
    copy.mkdir()
    found = origin(copy)
    assert found["commit"] is None
    assert "DMS_COMMIT is not set" in found["no_commit"]
    assert "warning: the record has no commit" in capsys.readouterr().err
    assert measured_at(found).startswith("no commit (no git repository, and DMS_COMMIT is not set)")
    monkeypatch.setenv("DMS_COMMIT", "0123456789abcdef")
    assert origin(copy)["commit"] == "0123456789abcdef"
    monkeypatch.setenv("DMS_COMMIT", "main")
    with pytest.raises(EvaluationError, match="DMS_COMMIT=main: a commit of 7 to 40"):
        origin(copy)


def test_a_printed_record_says_where_it_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"commit": "0123456789", "date": "2026-01-02"}
    (tmp_path / "a.json").write_text(json.dumps(record))
    show(tmp_path / "a.json", lambda _: "| table |")
    assert capsys.readouterr().out == "| table |\n\nMeasured at: 0123456, 2026-01-02.\n"
    assert measured_at({**record, "commit_from": "history"}) == "added in 0123456, 2026-01-02"


def test_a_page_without_markers_is_left_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n<!-- begin results -->\n")
    with pytest.raises(EvaluationError, match="<!-- end results -->"):
        write_page(page, "new")
    assert page.read_text() == "text\n<!-- begin results -->\n"


def test_the_oldest_commits_of_stale_tables_are_listed(tree: Path) -> None:
    """Rows name their commits; a record without one has the commit that added it."""
    results = "benchmarks/results/gpu"
    first = commit(tree, "kernels/a.py", "1")
    rows = {"cases": [{"commit": first, "ms": 1.0}]}
    added = commit(tree, f"{results}/old.json", "{}")
    commit(tree, f"{results}/rows.json", json.dumps(rows))
    tables = [
        Table("*/rows.json", "rows.md", ("kernels",)),
        Table("*/old.json", "old.md", ("kernels", "code.py")),
        Table("*/other.json", "other.md", ("docs",)),
    ]
    assert list(stale.stale(tree, tables)) == []
    commit(tree, "docs/page.md", "text")
    assert list(stale.stale(tree, tables)) == []
    changed = commit(tree, "kernels/a.py", "2")
    rows["cases"].append({"commit": changed, "ms": 2.0})
    commit(tree, f"{results}/rows.json", json.dumps(rows))
    found = list(stale.stale(tree, tables))
    assert [(entry.page, entry.commit, len(entry.later)) for entry in found] == [
        ("rows.md", first, 1),
        ("old.md", added, 1),
    ]
    assert all(changed.startswith(entry.later[0].split()[0]) for entry in found)
    assert "| rows.md |" in stale.text(found)


def test_a_commit_that_the_repository_lacks_is_named(tree: Path) -> None:
    record = json.dumps({"commit": "0123456789"})
    commit(tree, "benchmarks/results/gpu/a.json", record)
    with pytest.raises(EvaluationError, match="commit 0123456789 is not in this repository"):
        list(stale.stale(tree, [Table("*/a.json", "a.md", ("code.py",))]))


def test_every_stored_record_has_one_table_and_its_code_exists() -> None:
    known = stale.tables()
    for file in ROOT.glob("*/results/*/*.json*"):
        name = f"{file.parent.name}/{file.name}"
        assert sum(fnmatch(name, table.records) for table in known) == 1, name
    for table in known:
        assert all((ROOT / path).exists() for path in (table.page, *table.measures))


@pytest.mark.parametrize("table", stale.tables(), ids=lambda table: table.records)
def test_pages_say_where_their_tables_were_measured(table: Table) -> None:
    page = " ".join((ROOT / table.page).read_text().split())
    for file in ROOT.glob(f"*/results/{table.records}"):
        for line in file.read_text().splitlines() if file.suffix == ".jsonl" else [None]:
            assert missing(json.loads(line or file.read_text()), page) == set(), file


def missing(record: object, page: str) -> set[str]:
    """Commits and dates of a record and its rows that a page lacks."""
    if isinstance(record, list):
        return set().union(*(missing(each, page) for each in record))
    if not isinstance(record, dict):
        return set()
    own = {measured_at(record)} if "commit" in record else set()
    return {text for text in own if text not in page}.union(
        *(missing(each, page) for each in record.values())
    )
