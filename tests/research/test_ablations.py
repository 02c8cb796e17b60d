"""The ablations' greedy decoding is the engine's, and their tables are means of the runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from research import ablations
from research.folders import CONFIG_DIR
from tests.support import refusals
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


def test_a_finished_run_is_solved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, problems, run = (
        tmp_path / "data",
        tmp_path / "problems.jsonl",
        tmp_path / "runs/train/x/1",
    )
    sheets = ["exam-sheets", "--out", str(data), "--sheets", "60", "--document-tokens", "320"]
    assert refusals.run_here(["data", *sheets, "--n-max", "2"]).code == 0
    made = ["exam-problems", "--out", str(problems), "--sheets", "2", "--n", "2"]
    assert refusals.run_here(["data", *made]).code == 0
    words = [
        *(str(CONFIG_DIR), "experiment=ablation_train", "method.train=lora", f"run.dir={run}"),
        *(f"data.paths=[{data}/train]", "data.micro_batch_size=2", "data.global_batch_size=2"),
        *("stage.zero_neuron.steps=1", "stage.retrofit.steps_per_cr=1", "stage.hold.steps=1"),
        *("run.eval_samples=2", "observe=quiet"),
    ]
    assert refusals.run_here(["train", "--config-dir", *words]).code == 0
    asked = ["--problems", str(problems), "--max-tokens", "4"]
    assert ablations.main(["solve", str(tmp_path / "runs"), *asked]) == 0
    result = json.loads((run / "accuracy.json").read_text())
    assert result["train_tokens"] == 5 * 2 * 320  # a step to clear, three to anneal, one to hold
    assert result["problems"] == [2, 2]
    assert ablations.main(["report", str(tmp_path / "runs"), "--output", str(tmp_path)]) == 0
    assert "| x | 1 | " in capsys.readouterr().out


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
