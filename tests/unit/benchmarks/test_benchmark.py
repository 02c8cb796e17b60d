"""A benchmark that is declared in a few lines: its record, its tables and its exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import benchmark
from benchmarks.benchmark import Args, Benchmark, Source, or_skipped, replace
from benchmarks.tables import field, table

COLUMNS = (("case", field("case")), ("ms", field("ms", ".1f")), ("/ 2", field("ms", ".2f", 0.5)))


def measure(case: str, args: Args) -> Iterator[dict[str, object]]:
    if case == "large":
        reason = or_skipped(lambda: _run_out_of_memory())
        yield {"case": case, **reason}
        return
    if case == "bad":
        yield {"case": case, "failed": "it broke"}
        return
    yield {"case": case, "ms": 3.0 * args.repeats}


def _run_out_of_memory() -> dict[str, object]:
    raise torch.cuda.OutOfMemoryError("tried to allocate 9 GiB\nfurther lines")


def declared(**changes: object) -> Benchmark:
    values = {
        "record": "made_{cases}",
        "options": lambda parser: parser.add_argument("cases"),
        "cases": lambda args: filter(None, args.cases.split(",")),
        "measure": measure,
        "settings": lambda args: {"limit": 7},
        "tables": lambda record: table(COLUMNS, record["cases"]),
        "repeats": 2,
        "check": check,
    }
    return Benchmark(**{**values, **changes})


def check(args: Args) -> None:
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: at least 1")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run a declaration as the benchmark `made thing`."""
    monkeypatch.setenv("DMS_COMMIT", "0123456789")

    def run_(made: Benchmark, *words: str) -> object:
        source = Source("made", "First line.\n\nMore.")
        monkeypatch.setattr(Source, "load", lambda _: made)
        monkeypatch.setattr(benchmark, "find", lambda: {"made thing": source})
        try:
            return command.main(["made", "thing", *words])
        except SystemExit as ended:
            return ended.code

    return run_


def record(tmp_path: Path) -> dict[str, object]:
    (file,) = tmp_path.glob("*/*.json")
    return json.loads(file.read_text())


def test_a_run_writes_its_record_and_prints_what_the_option_table_prints(
    run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["small,large", "--repeats", "4", "--device", "cpu", "--output", str(tmp_path)]
    assert run(declared(), *words) == 0
    (file,) = tmp_path.glob("cpu_*/made_small_large.json")
    found = json.loads(file.read_text())
    assert found["cases"] == [
        {"case": "small", "ms": 12.0},
        {"case": "large", "skipped": "tried to allocate 9 GiB"},
    ]
    assert (found["commit"], found["limit"]) == ("0123456789", 7)
    assert (
        found["command"] == "python -m benchmarks made thing small,large --repeats 4 --device cpu"
    )
    assert found["versions"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert run(declared(), "--table", str(file)) == 0
    shown = capsys.readouterr().out
    assert shown in printed
    assert shown.splitlines()[:4] == [
        "| case | ms | / 2 |",
        "|---|---|---|",
        "| small | 12.0 | 6.00 |",
        "| large | tried to allocate 9 GiB | |",
    ]


def test_rows_are_stored_before_the_next_one_is_measured(run, tmp_path: Path) -> None:
    stored: list[int] = []

    def watched(case: str, args: Args) -> Iterator[dict[str, object]]:
        files = list(tmp_path.glob("*/*.json"))
        stored.append(len(json.loads(files[0].read_text())["cases"]) if files else 0)
        yield from measure(case, args)

    assert run(declared(measure=watched), "a,b,c", "--output", str(tmp_path)) == 0
    assert stored == [0, 1, 2]


def test_a_failed_row_decides_the_exit_code(run, tmp_path: Path) -> None:
    assert run(declared(), "small,bad,small", "--output", str(tmp_path)) == 1
    assert [row["case"] for row in record(tmp_path)["cases"]] == ["small", "bad", "small"]


def test_a_continued_record_keeps_what_is_not_measured_again(run, tmp_path: Path) -> None:
    made = declared(
        record="made", continues="cases", store=replace("cases", lambda row: row["case"])
    )
    assert run(made, "a,b", "--repeats", "1", "--output", str(tmp_path)) == 0
    assert run(made, "b,c", "--repeats", "2", "--output", str(tmp_path)) == 0
    rows = {row["case"]: row["ms"] for row in record(tmp_path)["cases"]}
    assert rows == {"a": 3.0, "b": 6.0, "c": 6.0}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["a", "--repeats", "0"], "--repeats 0: at least 1"),
        (["a", "--sizes", "1"], "--sizes"),
        (["a", "--device", "abacus"], "argument --device"),
        ([","], "no case fits these options"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(
    run, words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(declared(), *words, "--output", str(tmp_path)) == 2
    assert named in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_every_declaration_is_found_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    known = benchmark.find()
    assert {"attention", "serve", "serve online", "train_step", "vocab_loss"} <= set(known)
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    listed = capsys.readouterr().out
    for name, source in known.items():
        assert f"    {name} " in listed or f"    {name}\n" in listed
        assert source.title
        with pytest.raises(SystemExit, match="0"):
            command.main([*name.split(), "--help"])
        shown = capsys.readouterr().out
        assert f"python -m benchmarks {name}" in source.text
        assert "--table FILE" in shown
        assert all(line in shown for line in source.text.splitlines())


def test_a_page_is_written_by_the_benchmark_that_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[tuple[Path, Path]] = []
    page = benchmark.Page(tmp_path / "page.md", lambda *given: written.append(given))
    made = {"made": declared(page=page), "other": declared()}
    monkeypatch.setattr(Source, "load", lambda source: made[source.module])
    monkeypatch.setattr(benchmark, "find", lambda: {name: Source(name, "") for name in made})
    assert command.main(["page", "--results", str(tmp_path)]) == 0
    assert written == [(tmp_path, tmp_path / "page.md")]
    assert command.main(["page", "other"]) == 2
    assert "other: has no page; choose from made" in capsys.readouterr().err
