"""The curve of the retention benchmark ends where the engine's accounting ends."""

from __future__ import annotations

import json
import shutil

import pytest

from dms_train.data_prep.exam_tokenizer import write_exam_tokenizer
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from research.retention import run as retention
from tests.unit.inference import conftest as inference

folder = inference.folder
PROMPTS = [f"Solve {n}*c + 15 = 6*c" for n in range(10, 22)]


def test_the_last_point_is_the_final_cr_factor(folder, tmp_path, capsys) -> None:
    export = tmp_path / "export"
    shutil.copytree(folder("llama", inference.small_spec("dms")), export)
    write_exam_tokenizer(export)
    problems = tmp_path / "p.jsonl"
    problems.write_text(
        "".join(json.dumps({"prompt": p, "answers": ["1"]}) + "\n" for p in PROMPTS)
    )
    out = tmp_path / "out"
    command = [str(export), str(problems), "--max-tokens", "40", "--output", str(out)]
    assert retention.main(command) == 0
    record = json.loads((out / "retention.json").read_text())
    llm = LLM(export, max_num_seqs=len(PROMPTS))
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    outputs = llm.generate(PROMPTS, greedy)
    ends = sorted(o.kv.tokens / o.kv.live_tokens for o in outputs)
    last = max(map(int, record["median_cr_factor"]))
    assert all(output.kv.tokens == last for output in outputs)
    middle = (ends[len(ends) // 2 - 1] + ends[len(ends) // 2]) / 2
    assert record["median_cr_factor"][str(last)] == pytest.approx(middle)
    kept = [1 / factor for layer in llm.kv.cr_factors.tolist() for factor in layer]
    assert [x for layer in record["kept"] for x in layer] == pytest.approx(kept)
    for name in ("cr_by_position.png", "retention_by_head.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
