"""The stage `validate_export` and `dms-validate`, from the command line to the report."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dms_train.data_prep.exam_sheets import held_out_problems
from tests.support import launch, refusals
from tests.support.ranks import Ranks, dms_train, run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
FILES = ("metrics.json", "report.md", "training.png", "retention.png")
SHEETS = 10


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exam sheets, held-out problems and a random model."""
    folder = tmp_path_factory.mktemp("validate")
    sheets = ("exam-sheets", "--out", str(folder / "data"), "--sheets", "100")
    launch.checked(launch.module("dms_train.data_prep.prepare", *sheets))
    sizes = {"max_position_embeddings": 512, "hidden_size": 64}
    refusals.write_model(folder / "model", folder / "data" / "tokenizer", **sizes)
    lines = [
        {"prompt": s.prompt, "answers": [str(a) for a in s.answers], "stop": "\n\n"}
        for s in held_out_problems(SHEETS, 2, 7)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "problems.jsonl").write_text(text)
    return folder


def overrides(root: Path, name: str, *more: str) -> list[str]:
    return [
        f"model.path={root}/model",
        f"data.paths=[{root}/data/train]",
        "data.seq_length=96",
        "data.micro_batch_size=1",
        "data.global_batch_size=4",
        "method.window=8",
        "stage.run=[zero_neuron,retrofit,export,validate_export]",
        "stage.zero_neuron.steps=2",
        "stage.retrofit.target_cr=2",
        "stage.retrofit.steps_per_cr=4",
        "stage.validate_export.samples=6",
        "stage.validate_export.max_tokens=60",
        "stage.validate_export.window_only=true",
        f"stage.validate_export.problems={root}/problems.jsonl",
        "optim.lr=1e-2",
        "optim.lr_warmup_steps=0",
        "run.eval_samples=6",
        "run.check_teacher=false",  # random weights
        "observe=quiet",
        f"run.dir={root}/{name}",
        *more,
    ]


def train(processes: int, *words: str) -> subprocess.CompletedProcess[str]:
    done = run_ranks(dms_train, processes, *words, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done


def kill_when_printed(text: str, log: Path, words: list[str]) -> None:
    """Start a run of one rank and kill it when it has printed a text."""
    ranks = Ranks.start(dms_train, 1, *words, log=log)
    try:
        while text not in ranks.output(0):
            assert ranks.running(), ranks.output(0)[-3000:]
            time.sleep(0.01)
    finally:
        ranks.kill()
    assert ranks.codes == {0: -signal.SIGKILL}


def metrics(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return found


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if name in line]


def change_selftest(export: Path) -> Callable[[], object]:
    """Record another model's logits; returns what undoes it."""
    file = export / "dms_selftest" / "reference.safetensors"
    before = file.read_bytes()
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors["logits"] = 9 * tensors["logits"].flip(0)
    save_file(tensors, file)
    return lambda: file.write_bytes(before)


def test_two_ranks_train_and_rank_0_validates(root: Path) -> None:
    done = train(2, *overrides(root, "tp2", "parallel=tp2"))
    run, found = root / "tp2", metrics(root / "tp2")
    assert all((run / name).is_file() for name in FILES)
    assert "| original, window only |" in done.stdout
    evaluated = rows(run, "validate_export/cr_factor")
    assert len(evaluated) == 1
    assert {f"validate_export/{name}": value for name, value in found.items()}.items() <= evaluated[
        0
    ].items()
    assert found["problems"] == 2 * SHEETS
    card = (run / "exports/final/hf/README.md").read_text()
    assert f"| {found['kl_nats_per_token']:.4g} [" in card
    assert "Not evaluated" not in card
    # the last evaluation of the trainer saw the same sequences through the mask
    last = rows(run, "eval/kl")[-1]
    assert found["kl_nats_per_token"] == pytest.approx(last["eval/kl"], rel=1e-3)
    assert found["text.cr_factor"] > 1.05
    assert found["text.cr_factor"] == pytest.approx(last["eval/cr"], rel=1e-3)
    assert found["text.kv_reads.student"] == pytest.approx(last["eval/kv_reads"], rel=1e-3)


def test_the_command_measures_what_the_stage_measured(root: Path) -> None:
    stage = metrics(root / "tp2")
    launch.checked(
        launch.module(
            "dms_train.cli.validate",
            str(root / "tp2/exports/final/hf"),
            f"--teacher={root}/model",
            f"--data={root}/data/train",
            "--seq-length=96",
            "--samples=6",
            f"--problems={root}/problems.jsonl",
            "--max-tokens=60",
            "--window-only",
            f"--output={root}/again",
        )
    )
    again = metrics(root / "again")
    assert {**again, "seconds": 0} == pytest.approx({**stage, "seconds": 0}, rel=1e-5)
    assert (root / "again/report.md").is_file()


@pytest.mark.slow
def test_a_run_killed_in_validation_validates_and_trains_nothing_more(root: Path) -> None:
    run = root / "killed"
    # long enough to be killed in
    slow = overrides(root, "killed", "stage.validate_export.max_num_seqs=1")
    kill_when_printed("self-test through the compact cache", root / "killed.log", slow)
    assert not (run / "metrics.json").exists()
    trained = rows(run, "train/loss")
    exported = (run / "exports/final/hf/model.safetensors").stat().st_mtime
    restore = change_selftest(run / "exports/final/hf")
    words = overrides(root, "killed")
    failed = run_ranks(dms_train, 2, *words, timeout=400)
    assert failed.returncode != 0
    messages = [line for line in failed.stderr.splitlines() if "self-test failed" in line]
    assert messages
    assert "Traceback" not in failed.stderr, "a rank printed a traceback"
    assert metrics(run)["selftest.kl"] > 0.02
    assert "FAILED" in (run / "report.md").read_text()
    restore()
    # how it is measured may change
    done = train(1, *overrides(root, "killed"))
    assert "resuming from" in done.stderr
    assert metrics(run)["problems"] == 2 * SHEETS
    assert rows(run, "train/loss") == trained
    assert (run / "exports/final/hf/model.safetensors").stat().st_mtime == exported
    finished = train(1, *overrides(root, "killed"))
    assert "nothing left to do" in finished.stderr
