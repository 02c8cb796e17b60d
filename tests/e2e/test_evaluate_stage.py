"""The stage `run_tasks`: killed, continued by two ranks, and equal to `dms-eval` of the export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dms_train.cli.config_source import compose_evaluation
from dms_train.evaluation.scaling import results, store
from dms_train.evaluation.scaling.run import evaluate, prepare
from tests.e2e import test_validate
from tests.support import launch

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
CLOCKS = ("session", "clock", "seconds", "peak_allocated_bytes")
root = test_validate.root


def overrides(root: Path, *more: str) -> list[str]:
    return test_validate.overrides(
        root,
        "run",
        "stage.run=[zero_neuron,retrofit,export,run_tasks]",
        "stage.run_tasks.tasks=[exam_sheets]",
        f"stage.run_tasks.task.path={root}/problems.jsonl",
        "stage.run_tasks.task.limit=10",
        "stage.run_tasks.sweep.lengths=[0.03125]",
        "stage.run_tasks.sweep.widths=[1,2]",
        "stage.run_tasks.sampling.temperature=1.0",
        "stage.run_tasks.model.max_num_seqs=2",  # one document at a time
        *more,
    )


def chains(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in CLOCKS} for row in store.read_chains(folder)]


def test_a_killed_evaluation_is_continued_and_equals_that_of_the_command(root: Path) -> None:
    run, folder = root / "run", root / "run" / "evaluation" / "exam_sheets"
    test_validate.kill_when_printed("3/10: ", root / "killed.log", overrides(root))
    before = chains(folder)
    assert 6 <= len(before) < 20
    trained = test_validate.rows(run, "train/loss")

    done = test_validate.train(2, *overrides(root, "parallel=tp2"))
    assert f"{10 - len(before) // 2} of 10 documents to do" in done.stderr
    assert test_validate.rows(run, "train/loss") == trained
    assert (run / "state" / "DONE").exists()
    found = results.load([folder])
    assert found.complete
    shown = [line for line in done.stdout.splitlines() if line.startswith("exam_sheets ")]
    assert shown == [f"{'exam_sheets':18} {point}" for point in found.points()]
    (row,) = test_validate.rows(run, "run_tasks/exam_sheets.0.03125-2-2.kv_reads")
    for point in found.points():
        name = f"run_tasks/exam_sheets.{point.budget}"
        assert row[f"{name}.accuracy"] == point.accuracy.value
        assert row[f"{name}.kv_reads"] == point.kv_reads
        assert row[f"{name}.peak_tokens"] == point.peak_tokens

    options = compose_evaluation(
        [
            f"model.path={run}/exports/final/hf",
            f"task.path={root}/problems.jsonl",
            "task.limit=10",
            "sweep.lengths=[0.03125]",
            "sweep.widths=[1,2]",
            "sampling.temperature=1.0",
            "model.max_num_seqs=2",
            f"run.dir={root}/command",
        ]
    )
    evaluate(prepare(options), lambda line: None)
    assert chains(root / "command") == chains(folder)
    headers = [store.read_header(each) for each in (root / "command", folder)]
    assert headers[0]["config_hash"] == headers[1]["config_hash"]


def test_a_job_of_a_chain_evaluates_the_same(root: Path) -> None:
    run, folder = root / "run", root / "run" / "evaluation" / "exam_sheets"
    before = chains(folder)
    file = folder / "chains" / "00000-of-00001.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-2]))  # without the last document
    (run / "state" / "run_tasks.done").unlink()
    launch.checked(launch.module("dms_train.launch.stage", str(run), "run_tasks"))
    assert chains(folder) == before
    assert len(file.read_text().splitlines()) == len(lines)
    assert (run / "state" / "run_tasks.done").exists()


def test_the_plan_names_the_tasks(root: Path) -> None:
    planned = launch.module("dms_train", *overrides(root, "run.dry_run=true"))
    assert "stage run_tasks: tasks exam_sheets" in launch.checked(planned)


def test_results_of_other_settings_are_refused_and_kept(root: Path) -> None:
    run = root / "run"
    files = [path for path in (run / "evaluation").rglob("*") if path.is_file()]
    kept = {path: path.read_bytes() for path in files}
    state = next(iter(sorted((run / "checkpoints").glob("step_*"), reverse=True)))
    values = json.loads((state / "run_state.json").read_text())
    # as if the run had been killed before it stored that the stage is finished
    (state / "run_state.json").write_text(json.dumps({**values, "stage": values["stage"] - 1}))
    done = launch.module(
        "dms_train", *overrides(root, "stage.run_tasks.sampling.seed=1"), timeout=400
    )
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert "evaluation/exam_sheets: holds a run with another sampling.seed" in line
    assert {path: path.read_bytes() for path in kept} == kept
