"""The memory benchmark reports the engine's accounting."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from dms_train.data_prep.exam_tokenizer import write_exam_tokenizer
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from tests.support import launch
from tests.unit.inference import conftest as inference

folder = inference.folder
PROMPTS, LENGTH, TOKENS = 3, 12, 40
TEXTS = ("short", "Solve 4*c + 15 = 6*c", "Divide: c = -30 / -2", "Divide: c = -31", "So far it is")


@pytest.fixture
def workspace(folder, tmp_path) -> Path:
    """`export`, `teacher` and `prompts.jsonl`."""
    for name, spec in (("export", inference.small_spec("dms")), ("teacher", None)):
        shutil.copytree(folder("llama", spec), tmp_path / name)
        write_exam_tokenizer(tmp_path / name)
    lines = (json.dumps({"text": text}) for text in TEXTS)
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return tmp_path


def command(workspace: Path, **changes: object) -> list[str]:
    options = {
        "teacher": workspace / "teacher",
        "prompt-file": workspace / "prompts.jsonl",
        "prompts": PROMPTS,
        "prompt-tokens": LENGTH,
        "tokens": TOKENS,
        "page-slots": 4,
        "output": workspace / "out",
        **changes,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return ["cache_memory", str(workspace / "export"), "--device", "cpu", *words]


def test_report_is_the_engines_accounting(workspace):
    shown = launch.checked(launch.module("benchmarks", *command(workspace)))
    (file,) = (workspace / "out").glob("*/cache_memory.json")
    record = json.loads(file.read_text())
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    llm = LLM(workspace / "export", page_slots=4, max_num_seqs=PROMPTS)
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
        ({"teacher": "{workspace}/export"}, "dense teacher"),
    ],
)
def test_refusals_are_one_line(workspace, capsys, changes, named):
    changes = {name: str(value).format(workspace=workspace) for name, value in changes.items()}
    assert main(command(workspace, **changes)) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert not (workspace / "out").exists()
