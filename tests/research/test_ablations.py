"""The ablations' greedy decoding is the engine's, and their tables are means of the runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from research import ablations
from tests.unit.inference import conftest as inference

folder = inference.folder
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8] * 12]


def test_masked_greedy_decoding_equals_the_compact_cache(folder) -> None:
    from transformers import AutoModelForCausalLM

    path = folder("llama", inference.small_spec("dms"))
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    outputs = LLM(path, max_num_seqs=3).generate(PROMPTS, greedy)
    assert ablations.greedy(model, PROMPTS, 40) == [o.outputs[0].token_ids for o in outputs]
    assert outputs[0].kv.cr_factor > 1.3


def write(run: Path, hits: list[int], **values: float) -> None:
    run.mkdir(parents=True)
    found = {"hits": hits, "problems": [2] * len(hits), "kl": 0.5, "cr_factor": 3.0, **values}
    (run / "accuracy.json").write_text(json.dumps({"train_tokens": 2e6, **found}))


def test_report_averages_seeds_and_picks_the_best_rate(tmp_path, capsys) -> None:
    runs = tmp_path / "runs"
    for kind, rate, hits in (("delayed", "1e-4", [2, 2]), ("immediate", "1e-4", [0, 1])):
        write(runs / "eviction" / kind / "2" / rate / "seed1", hits, kl=0.1)
        write(runs / "eviction" / kind / "2" / rate / "seed2", [1, 1], kl=0.3)
    write(runs / "eviction" / "immediate" / "2" / "4e-4" / "seed1", [2, 2])
    assert ablations.main(["report", str(runs), "--output", str(tmp_path / "out")]) == 0
    row = next(x for x in capsys.readouterr().out.splitlines() if "delayed 2 1e-4" in x)
    assert "| 2 | 0.7500 [" in row
    assert "| 0.500 to 1.000 | 0.2000 | 3.00 | 2.00 M |" in row
    best = ablations.best_rate(ablations._results(runs)["eviction"])
    assert [run["hits"] for run in best["2"]] == [[2, 2]]
    assert (tmp_path / "out" / "ablation_cr.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", [["solve", "--problems"], ["report"]])
def test_an_empty_folder_is_one_line(tmp_path, capsys, command) -> None:
    problems = tmp_path / "p.jsonl"
    problems.write_text('{"prompt": "a", "answers": ["1"]}\n')
    extra = [str(problems)] if "--problems" in command else []
    assert ablations.main([command[0], str(tmp_path / "none"), *command[1:], *extra]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
