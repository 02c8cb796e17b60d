"""The report of a recipe: scores, intervals and what has not finished."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from dms_train.evaluation.harness.comparison import published_scores
from research.recipe.evaluations import perplexity_file, results
from research.recipe.measured import measured
from research.recipe.report import report_text, write_report
from research.recipe.steps import ORIGINAL, RECIPES, exports
from tests.research.recipe_settings import settings
from tests.research.stored_runs import SCORED, write_scores


def write_metrics(run: Path, end: str = "") -> None:
    run.mkdir()
    logged = {"step": 4, "tokens": 120, "train/tokens_per_second": 2.0}
    (run / "metrics.jsonl").write_text(json.dumps(logged) + "\n" + end)


def test_the_report_has_the_main_metric_with_its_interval(tmp_path: Path) -> None:
    chosen = settings(tmp_path, recipe=replace(RECIPES["toy"], tasks=SCORED))
    for name in (ORIGINAL, *exports(chosen)):
        write_scores(results(chosen, name), right=5 if name == ORIGINAL else 4)
    for name, export in exports(chosen).items():
        folder = tmp_path / "validation" / name
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text('{"cr_factor": 2.5, "kl_nats_per_token": 0.125}')
        export.mkdir(parents=True)
        (chosen.root / "train").mkdir(exist_ok=True)
        training = {"step": 10, "tokens": 1200, "train/tokens_per_second": 10.0}
        (chosen.root / "train" / "metrics.jsonl").write_text(json.dumps(training) + "\n")
        (export / "README.md").write_text("<!-- evaluation -->\n<!-- end of evaluation -->\n")
    report = write_report(chosen).read_text()
    scored = "0.250 +- 0.039"
    own = f"| cr2 | 2.5 | 0.125 | 1.50 | 40 | 0.400 +- 0.020 | {scored} | 0.400 | -0.100 ["
    (row,) = (line for line in report.splitlines() if line.startswith(own))
    low, high = row.removeprefix(own).removesuffix("] |").split(", ")
    assert -0.5 < float(low) < -0.1 < float(high) < 0.3  # one of ten documents differs
    assert f"| original | - | - | 1.50 | 40 | 0.500 +- 0.020 | {scored} | 0.500 | - |" in report
    assert "| train | 10 | 1,200 | 2.0 | 128 |" in report
    card = (exports(chosen)["cr2"] / "README.md").read_text()
    assert "0.400 +- 0.020" in card
    assert "0.125" in card


def test_the_report_has_the_published_scores_with_their_source(tmp_path: Path) -> None:
    published = "SmolLM2-135M-Instruct"
    chosen = settings(tmp_path, recipe=replace(RECIPES["toy"], published=published))
    write_metrics(tmp_path / "train")
    shown = write_report(chosen).read_text()
    assert "## Published scores of the original" in shown
    for score in published_scores()[published]:
        cells = (score[name] for name in ("task", "metric", "value", "settings", "source"))
        assert f"| {' | '.join(map(str, cells))} |" in shown
    without = settings(tmp_path, recipe=RECIPES["toy"])
    assert "Published" not in write_report(without).read_text()


def test_perplexities_are_paired_with_the_original(tmp_path: Path) -> None:
    """Windows differ more than models do; the intervals are of the difference."""
    chosen = settings(tmp_path, recipe=replace(RECIPES["toy"], tasks=()))
    lost = {ORIGINAL: [0.0] * 3, "cr2": [0.1, 0.2, 0.3], "cr3": [0.2] * 3}
    for name, more in lost.items():
        nats = [base + each for base, each in zip((1.0, 3.0, 5.0), more, strict=True)]
        mean = statistics.fmean(nats)
        part = {"nats": mean, "perplexity": math.exp(mean), "cr_factor": 2.5, "per_window": nats}
        file = perplexity_file(chosen, name)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"model": {"window": part, "continuation": part}}))
    write_metrics(tmp_path / "train")
    found = {m["name"]: m["perplexity"]["continuation"] for m in measured(chosen)["models"]}
    assert "difference" not in found[ORIGINAL]
    paired = found["cr2"]["difference"]
    assert paired["value"] == pytest.approx(0.2)
    assert 0.1 <= paired["low"] < 0.2 < paired["high"] <= 0.3 + 1e-9
    shown = write_report(chosen).read_text()
    assert "| original | 20.09 | 20.09 | - | 2.50 |" in shown
    assert "| cr3 | 24.53 | 24.53 | +0.2000 [+0.2000, +0.2000] | 2.50 |" in shown


def test_tasks_that_have_finished_are_in_the_report(tmp_path: Path) -> None:
    """The original has one task, an export both; the mean over both is not there yet."""
    chosen = settings(tmp_path, recipe=replace(RECIPES["toy"], tasks=SCORED))
    write_scores(results(chosen, "cr2"), right=4)
    write_metrics(tmp_path / "train")
    (found,) = (m for m in measured(chosen)["models"] if m["name"] == "cr2")
    assert found["tasks"]["hellaswag@10"]["difference"] is None
    write_scores(results(chosen, ORIGINAL), right=5, tasks=SCORED[:1])
    original, found = measured(chosen)["models"][:2]
    assert original["tasks"]["lambada_openai"] is None
    assert original["choices"] is None
    assert "kv" not in original
    assert found["tasks"]["hellaswag@10"]["difference"]["value"] == pytest.approx(-0.1)
    assert found["tasks"]["lambada_openai"]["difference"] is None


def test_scores_of_other_versions_are_not_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = settings(tmp_path, recipe=replace(RECIPES["toy"], tasks=SCORED))
    write_scores(results(chosen, ORIGINAL), right=5)
    write_scores(results(chosen, "cr2"), right=4, version="2")
    write_metrics(tmp_path / "train")
    numbers = measured(chosen)
    (found,) = (model for model in numbers["models"] if model["name"] == "cr2")
    assert found["tasks"]["hellaswag@10"]["score"] == 0.4
    assert found["tasks"]["hellaswag@10"]["difference"] is None
    assert "cr2: no differences to the original" in caplog.text
    assert "lm-eval (versions) was 1, here it is 2" in caplog.text


def test_a_report_leaves_out_what_is_not_measured(tmp_path: Path) -> None:
    """Training and one validation have finished, nothing else."""
    chosen = settings(tmp_path, haystack=Path("essays.txt"), held_out=Path("wikitext.txt"))
    write_metrics(tmp_path / "train", end='{"cut off')
    validation = tmp_path / "validation" / "cr4"
    validation.mkdir(parents=True)
    (validation / "metrics.json").write_text(json.dumps({"cr_factor": 4.1}))
    numbers = measured(chosen)
    assert numbers["trainings"]["train"]["minutes"] == 1.0
    lines = report_text(numbers).splitlines()
    assert "| model | cr_factor |" in lines
    assert "| original | - |" in lines
    assert "| cr4 | 4.1 |" in lines


def test_the_report_says_that_weights_were_quantised(tmp_path: Path) -> None:
    write_metrics(tmp_path / "train")
    model = tmp_path / "model"
    model.mkdir()
    chosen = settings(tmp_path, model=model)
    assert "Weights" not in report_text(measured(chosen))
    (model / "gguf.json").write_text('{"tensor_types": {"Q4_1": 210, "F32": 61}}')
    stated = "quantised weights, dequantised from GGUF (210 Q4_1, 61 F32 tensors)"
    assert f"\nWeights of the original: {stated}.\n" in report_text(measured(chosen))
