"""The commands of the README, on a model and a text small enough to run here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from dms_train.app.start_point import find_start, with_student
from dms_train.cli.config_source import compose
from dms_train.config.build import ConfigError
from dms_train.mcore.options import ALL_WEIGHTS
from tests.support import launch, paused_run
from tests.support.ranks import Ranks, dms_train, run_ranks

TINY = [
    "model.architecture.num_layers=2",
    "model.architecture.hidden_size=32",
    "model.architecture.ffn_hidden_size=48",
    "model.architecture.kv_channels=8",
    "observe.wandb=disabled",
]
SHORT = [
    "data.seq_length=96",
    "run.eval_samples=8",
    "optim.lr_warmup_steps=0",
    "run.log_interval=1",
]


TO_4 = [
    "parallel=single",
    "stage.retrofit.target_cr=4",
    "stage.run=[zero_neuron,retrofit,hold,export]",
    "stage.hold.steps=4",
]
OF_THE_MACHINE = (
    "train/tokens_per_second",
    "train/tflops_per_device",
    "train/mfu",
    "train/memory_gib",
)


def train(processes: int, *overrides: str) -> str:
    """Run `dms-train` in that many ranks; its log."""
    result = run_ranks(dms_train, processes, *overrides, timeout=400)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    return result.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exam sheets, and a model pretrained on them for a few steps with TP 2."""
    root = tmp_path_factory.mktemp("recipe")
    sheets = ("exam-sheets", "--out", str(root / "sheets"), "--sheets", "200")
    launch.checked(launch.module("dms_train.data_prep.prepare", *sheets))
    train(
        2,
        "experiment=tiny_pretrain",
        *TINY,
        *SHORT,
        f"data.paths=[{root}/sheets/train]",
        f"model.tokenizer={root}/sheets/tokenizer",
        "stage.pretrain.steps=12",
        f"run.dir={root}/pretrain",
    )
    return root


def retrofit(root: Path, name: str) -> list[str]:
    """Overrides of a short retrofit of the pretrained model."""
    return [
        "experiment=tiny_retrofit",
        *SHORT,
        f"data.paths=[{root}/sheets/train]",
        f"model.path={root}/pretrain/exports/final/hf",
        "stage.zero_neuron.steps=6",
        "stage.retrofit.steps_per_cr=5",
        "stage.retrofit.target_cr=3",
        "optim.lr=1e-3",
        "run.save_interval=3",
        "observe.wandb=disabled",
        f"run.dir={root}/{name}",
    ]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """A retrofit to CR 4, and a hold there, in one process."""
    train(1, *retrofit(folder, "whole"), *TO_4)
    return folder / "whole"


def rows(run: Path) -> list[dict[str, Any]]:
    """Training rows of a run without what depends on the machine."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k not in OF_THE_MACHINE} for line in lines]
    return [row for row in kept if "train/loss" in row]


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_pretrain_learns_and_exports_a_dense_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    losses = [row["train/lm"] for row in rows(folder / "pretrain")]
    assert losses[-1] < losses[0] - 0.2
    model = AutoModelForCausalLM.from_pretrained(folder / "pretrain/exports/final/hf")
    assert type(model).__name__ == "LlamaForCausalLM"


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_recipe_under_tp2_exports_what_it_trained(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log = train(
        2,
        *retrofit(folder, "tp2"),
        "parallel.sequence_parallel=true",
        "observe.peak_tflops=0.1",
    )
    exports = folder / "tp2" / "exports"
    assert {path.name for path in exports.iterdir()} == {"cr2", "cr3", "final"}
    assert (exports / "final").is_symlink()
    (layers,) = [line for line in log.splitlines() if "layers: " in line]
    assert "layers: local (Transformer Engine needs a GPU" in layers
    assert layers.endswith("norms by torch, optimizer torch AdamW")
    assert "zero_neuron" in log
    assert "retrofit" in log
    verified = launch.module("dms_train.checkpoints_tools.verify", str(exports / "final/hf"))
    assert "PASS" in launch.checked(verified)
    model = AutoModelForCausalLM.from_pretrained(exports / "final/hf", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(exports / "final/hf", trust_remote_code=True)
    assert_the_report_is_complete(folder / "tp2")
    prompt = tokenizer("1: Solve 4*c + 15 = 6*c - 15 for c.\n", return_tensors="pt").input_ids
    with torch.no_grad():
        answer = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert answer.shape[1] == prompt.shape[1] + 8


def assert_the_report_is_complete(run: Path) -> None:
    launch.checked(launch.module("dms_train.cli.report", str(run)))
    page = (run / "report.html").read_text()
    recorded = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in recorded for name in row}
    assert names >= {
        "tokens",
        "train/kl",
        "train/aux_loss",
        "train/target_cr",
        "train/cr",
        "train/grad_norm",
        "train/checkpoint_seconds",
        "eval/kl",
        "eval/kept",
        *OF_THE_MACHINE,
    }
    assert all(row["tokens"] == row["step"] * 8 * 96 for row in recorded)
    evaluated = [row for row in recorded if "eval/kept" in row][-1]
    shares = [share for layer in evaluated["eval/kept"] for share in layer]
    assert len(shares) == 2 * 2  # layers and KV heads
    assert 1 / (sum(shares) / len(shares)) == pytest.approx(evaluated["eval/cr"])
    embedded = page.partition("id='metrics'>")[2].partition("</script>")[0]
    assert json.loads(embedded) == recorded


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_dms_is_evaluated_between_the_window_and_the_original(
    folder: Path, undisturbed: Path
) -> None:
    command = launch.module(
        "dms_train.cli.validate",
        str(undisturbed / "exports/final/hf"),
        f"--teacher={folder}/pretrain/exports/final/hf",
        f"--data={folder}/sheets/train",
        "--seq-length=96",
        "--samples=8",
        "--window-only",
        f"--output={folder}/evaluation",
    )
    launch.checked(command)
    found = json.loads((folder / "evaluation/metrics.json").read_text())
    assert found["kv_reads.window_only"] < found["kv_reads.student"] <= found["kv_reads.dense"]
    assert found["evicted_share.window_only"] == pytest.approx(1.0)
    assert 0 <= found["evicted_share.student"] < 1
    assert 1.0 <= found["cr_factor"] <= 96 / 17
    assert found["kl_nats_per_token.window_only"] > 0


@pytest.fixture(scope="module")
def logs(folder: Path) -> list[str]:
    """Logs of the same retrofit with a branch that holds CR 2, killed four times.

    In zero_neuron, before CR 2, in the branch, between its first checkpoint and its end, and after
    CR 3.
    """
    words = [*retrofit(folder, "killed"), *TO_4, "stage.hold.branch_ratios=[2]"]
    starts = [killed(folder / f"killed-{step}", step, words) for step in (4, 8, 13, 18)]
    return [*starts, train(1, *words)]


@pytest.fixture(scope="module")
def resumed(folder: Path, logs: list[str]) -> Path:
    """The run folder of these starts."""
    return folder / "killed"


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_a_killed_run_resumes_with_the_same_losses_and_weights(
    undisturbed: Path, resumed: Path, logs: list[str]
) -> None:
    """Its branch, which the undisturbed run does not take, leaves them as they are."""
    assert "resuming from" in logs[3]
    assert "step_00000012" in logs[3]  # inside the branch, which left after step 11
    assert rows(resumed) == rows(undisturbed)
    for name in ("final", "cr3", "cr2"):
        weights = [run / f"exports/{name}/hf/model.safetensors" for run in (undisturbed, resumed)]
        same = weights[0].read_bytes() == weights[1].read_bytes()
        assert same == (name != "cr2")
    verified = launch.module("dms_train.checkpoints_tools.verify", str(resumed / "exports/cr2/hf"))
    assert "PASS" in launch.checked(verified)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_a_killed_run_of_adapters_resumes_and_exports_the_same(folder: Path) -> None:
    words = {
        name: [
            *retrofit(folder, name),
            "parallel=single",
            "method.train=lora",
            "lora.rank=2",
            "stage.zero_neuron.steps=2",
            "stage.retrofit.target_cr=2",
            "run.save_interval=2",
        ]
        for name in ("lora", "lora_killed")
    }
    train(1, *words["lora"])
    killed(folder / "lora_pauses", 5, words["lora_killed"])
    train(1, *words["lora_killed"])
    assert rows(folder / "lora_killed") == rows(folder / "lora")
    files = [folder / name / "exports/final/hf/model.safetensors" for name in words]
    assert files[0].read_bytes() == files[1].read_bytes()
    original = load_file(folder / "pretrain/exports/final/hf/model.safetensors")
    trained = load_file(files[0])
    assert original.keys() == trained.keys()
    changed = {name.split(".")[-2] for name in trained if (trained[name] != original[name]).any()}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}
    newest = max((folder / "lora_killed" / "checkpoints").glob("step_????????"))
    out = folder / "lora_adapter"
    arguments = [str(newest), str(out), "--format", "peft"]
    launch.checked(launch.module("dms_train.checkpoints_tools.megatron_to_hf", *arguments))
    adapter = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(folder / "pretrain/exports/final/hf")


def killed(pauses: Path, step: int, words: list[str]) -> str:
    """Start a run and kill it before a step; its log."""
    pauses.mkdir()
    log = pauses / "log"
    ranks = Ranks.start(paused_run.train_with_pause, 1, step, pauses, *words, log=log)
    paused_run.wait_for_pause(pauses, 1, ranks.running)
    ranks.kill()
    return ranks.output(0)


def has_optimizer(checkpoint: Path) -> bool:
    """Return whether the index of a Megatron checkpoint names optimizer state."""
    return b"exp_avg" in (checkpoint / ".metadata").read_bytes()


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_only_the_newest_checkpoints_have_optimizer_state(folder: Path, resumed: Path) -> None:
    """The weights at CR 2 start another run."""
    run = resumed
    kept = sorted(path.name for path in (run / "checkpoints").glob("step_????????"))
    assert kept == ["step_00000024", "step_00000025"]
    assert all(has_optimizer(run / "checkpoints" / name) for name in kept)
    ratios = [run / f"exports/cr{ratio}/megatron" for ratio in (2, 3, 4)]
    assert not any(has_optimizer(path) for path in [run / "weights/zero_neuron", *ratios])
    held = [*retrofit(folder, "held_at_2"), "parallel=single", f"run.load={ratios[0]}"]
    train(1, *held, "stage.run=[hold,export]", "stage.hold.steps=2")
    assert [row["train/target_cr"] for row in rows(folder / "held_at_2")] == [2, 2]


def test_a_run_folder_stands_for_its_newest_whole_checkpoint(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "pretrain" / "checkpoints", run / "checkpoints")
    (whole,) = (run / "checkpoints").glob("step_????????")
    damaged = whole.with_name("step_99999999")
    shutil.copytree(whole, damaged)
    next(damaged.glob("*.distcp")).write_bytes(b"")
    config = compose(["model=scratch", "data.paths=[x]", "experiment=tiny_pretrain", *TINY])
    assert with_student(find_start(config), run, ALL_WEIGHTS).student == whole
    shutil.rmtree(whole)
    with pytest.raises(ConfigError, match=r"run: this run has no whole checkpoint \(.*; load anot"):
        with_student(find_start(config), run, ALL_WEIGHTS)
