"""Stored records are printed again, and other files are refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.lab import wall_clock
from benchmarks.serve import __main__ as serve
from benchmarks.serve import kernels, online

STORED = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "nvidia_h200"
COMMANDS = [
    pytest.param(serve.main, "--table", "serve.json", id="serve"),
    pytest.param(serve.main, "--predicted", "serve.json", id="predicted"),
    pytest.param(kernels.main, "--table", "kernels_llama_3_2_1b_1.json", id="kernels"),
    pytest.param(online.main, "--table", "online.json", id="online"),
    pytest.param(wall_clock.main, "--table", "wall_clock.json", id="wall_clock"),
]
Main = Callable[[list[str]], int]


@pytest.mark.parametrize(("main", "option", "name"), COMMANDS)
def test_the_tables_of_the_pages_are_those_of_the_records(
    main: Main, option: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([option, str(STORED / name)]) == 0
    first = capsys.readouterr().out.partition("\n\n")[0]
    rows = [line for line in first.splitlines() if line.startswith("|")]
    docs = Path(__file__).resolve().parents[3] / "docs"
    pages = (docs / "performance" / "serving.md").read_text() + (docs / "science.md").read_text()
    if name != "wall_clock.json":  # whose page has it with models beside each other
        assert set(rows) <= set(pages.splitlines())
    assert len(rows) > 4


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"models": {"teacher": {}}}', "\x80"])
@pytest.mark.parametrize(("main", "option", "name"), COMMANDS)
def test_another_file_is_refused(
    main: Main, option: str, name: str, text: str, tmp_path: Path, capsys
) -> None:
    file = tmp_path / "other.json"
    file.write_bytes(text.encode("latin-1"))
    assert main([option, str(file)]) == 2
    refusal = capsys.readouterr().err
    assert str(file) in refusal
    assert refusal.count("\n") == 1


def test_a_gpu_that_is_not_known_is_named(tmp_path: Path, capsys) -> None:
    record = json.loads((STORED / "serve.json").read_text()) | {"device": "Riva 128"}
    (tmp_path / "serve.json").write_text(json.dumps(record))
    assert serve.main(["--predicted", str(tmp_path / "serve.json")]) == 2
    assert "Riva 128" in capsys.readouterr().err


def test_every_stored_record_is_json() -> None:
    for file in STORED.glob("*.json"):
        assert json.loads(file.read_text())["device"] == "NVIDIA H200"
