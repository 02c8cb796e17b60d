"""The memory benchmark says what the engine's accounting says."""

from __future__ import annotations

import json
import runpy
import shutil
import statistics
from pathlib import Path

import pytest

from data_prep.exam_tokenizer import write_exam_tokenizer
from dms_train.inference.engine import LLM
from dms_train.inference.options import SamplingParams
from tests.support import launch
from tests.unit.inference import conftest as inference

folder = inference.folder
SCRIPT = launch.ROOT / "benchmarks" / "cache_memory.py"
PROMPTS, LENGTH, TOKENS = 3, 12, 40
TEXTS = ("short", "Solve 4*c + 15 = 6*c", "Divide: c = -30 / -2", "Divide: c = -31", "So far it is")


@pytest.fixture
def room(folder, tmp_path) -> Path:
    """`export`, `teacher` and `prompts.jsonl`."""
    for name, spec in (("export", inference.small_spec("dms")), ("teacher", None)):
        shutil.copytree(folder("llama", spec), tmp_path / name)
        write_exam_tokenizer(tmp_path / name)
    lines = (json.dumps({"text": text}) for text in TEXTS)
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return tmp_path


def command(room: Path, **changes: object) -> list[str]:
    options = {
        "teacher": room / "teacher",
        "prompt-file": room / "prompts.jsonl",
        "prompts": PROMPTS,
        "prompt-tokens": LENGTH,
        "tokens": TOKENS,
        "page-slots": 4,
        "output": room / "out",
        **changes,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return [str(room / "export"), *words]


def test_report_is_the_engines_accounting(room):
    shown = launch.checked(launch.python(str(SCRIPT), *command(room)))
    record = json.loads((room / "out" / "cache_memory.json").read_text())
    assert (room / "out" / "cache_memory.png").read_bytes().startswith(b"\x89PNG")
    llm = LLM(room / "export", page_slots=4, max_num_seqs=PROMPTS)
    prompts = [llm.tokenizer.encode(TEXTS[i])[:LENGTH] for i in (1, 2, 4)]
    series = record["dms"]["series"]
    assert series["tokens"] == [*range(LENGTH, LENGTH + TOKENS)]
    for tokens in (1, 7, TOKENS):
        greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        requests = [output.kv for output in llm.generate(prompts, greedy)]
        for name in ("live_bytes", "allocated_bytes"):
            values = [getattr(kv, name) for kv in requests]
            expected = {"median": statistics.median(values), "min": min(values), "max": max(values)}
            assert series[name][tokens - 1] == expected
    for row, kv in zip(record["dms"]["requests"], requests, strict=True):
        assert row == {name: getattr(kv, name) for name in row}
        assert kv.allocated_bytes > kv.live_bytes
    assert max(series["taken_bytes"]) <= record["dms"]["peak_taken_bytes"]

    a = inference.tiny_architecture("llama")
    token_bytes = a.num_layers * a.num_query_groups * 2 * a.kv_channels * 4
    found = record["comparison"]["peak allocated bytes; dense: keys and values"]
    assert found["dense"]["median"] == (LENGTH + TOKENS - 1) * token_bytes
    reads = record["comparison"]["KV reads, decode"]
    assert reads["dense"]["median"] == sum(range(LENGTH + 1, LENGTH + TOKENS))
    ratios = [kv.kv_reads / reads["dense"]["median"] for kv in requests]
    assert reads["ratio"]["median"] == pytest.approx(statistics.median(ratios))
    assert max(ratios) < 0.9
    assert f"| KV reads, decode | {reads['dms']['median']:,.0f} (" in shown


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompts": 4}, "3 texts begin with 12 tokens"),
        ({"tokens": 2000}, "the model takes 1024"),
        ({"teacher": "{room}/export"}, "dense teacher"),
    ],
)
def test_refusals_are_one_line(room, capsys, changes, named):
    changes = {name: str(value).format(room=room) for name, value in changes.items()}
    assert runpy.run_path(str(SCRIPT))["main"](command(room, **changes)) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert not (room / "out").exists()
