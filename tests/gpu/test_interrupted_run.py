"""A whole run on GPUs whose checkpoints are written in the background, killed during one."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support import metrics_file, refusals
from tests.support.ranks import Ranks, dms_train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(400),
]
STEPS = 24
SIZES = {
    "num_layers": 6,
    "hidden_size": 512,
    "ffn_hidden_size": 1536,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 64,
}
_PATIENCE = 200.0
# A rank without a heartbeat for half of this counts as stalled.
TIMEOUT_MINUTES = 2.0


def words(folder: Path) -> list[str]:
    """A run of two stages, with a random teacher that is written to `folder`."""
    data, model = folder / "data", folder / "model"
    made = refusals.run_here(["data", "exam-sheets", "--out", str(data), "--sheets", "120"])
    assert made.code == 0, made.stderr
    refusals.write_model(model, data / "tokenizer", **SIZES)
    return [
        f"model.path={model}",
        f"data.paths=[{data / 'train'}]",
        f"data.cache_dir={folder / 'cache'}",
        "data.seq_length=128",  # one tile of keys: no order of additions is left to chance
        "data.micro_batch_size=1",
        "data.global_batch_size=4",
        "method.window=16",
        "optim.lr=1e-4",
        "stage.zero_neuron.steps=8",
        "stage.retrofit.target_cr=2",
        "stage.retrofit.steps_per_cr=16",
        "parallel.params_dtype=bf16",
        f"parallel.distributed_timeout_minutes={TIMEOUT_MINUTES}",
        "run.save_interval=4",
        "run.check_teacher=false",  # random weights
        "run.eval_samples=4",
        "observe=quiet",
        "observe.progress=false",
    ]


@dataclass(frozen=True)
class Run:
    """A run folder and the ranks that fill it."""

    folder: Path
    ranks: Ranks

    @classmethod
    def start(cls, folder: Path, processes: int, words: list[str]) -> Run:
        words = [*words, f"run.dir={folder}"]
        return cls(
            folder, Ranks.start(dms_train, processes, *words, log=folder.with_suffix(".log"))
        )

    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("step_????????"))

    def unfinished(self) -> list[str]:
        """Names of checkpoints that are being written."""
        found = (self.folder / "checkpoints").glob("step_*.partial")
        return [path.name for path in found if ".old." not in path.name]

    def exit_codes(self, seconds: float) -> list[int]:
        """Exit codes of the ranks, none of which runs any more."""
        self.ranks.wait(seconds)
        self.ranks.kill()
        return [self.ranks.codes[rank] for rank in range(len(self.ranks.processes))]


def finish(run: Run) -> dict[int, float]:
    """The loss of every step of a run that comes to its end."""
    codes = run.exit_codes(_PATIENCE)
    assert not any(codes), run.ranks.output(0) + run.ranks.output(len(codes) - 1)
    assert (run.folder / "state" / "DONE").is_file()
    return metrics_file.losses(run.folder)


def killed_in_save(run: Run) -> None:
    """Kill the last rank while a checkpoint is written, not the first one."""

    end = time.monotonic() + _PATIENCE
    while not (run.checkpoints() and run.unfinished()):
        assert run.ranks.running(), run.ranks.output(0)[-4000:]
        assert time.monotonic() < end
        time.sleep(0.002)
    run.ranks.signal(len(run.ranks.processes) - 1, signal.SIGKILL)
    begin, step = time.monotonic(), max(row["step"] for row in metrics_file.rows(run.folder))
    codes = run.exit_codes(30.0 * TIMEOUT_MINUTES)  # sooner: its process is gone
    print(f"killed after step {step} while {run.unfinished()} was written, beside")
    print(f"{[path.name for path in run.checkpoints()]}; codes {codes}, the last")
    print(f"{time.monotonic() - begin:.1f} s later: {run.ranks.output(0)[-600:]}")
    assert all(codes)
    assert run.unfinished()
    if len(codes) > 1:
        assert re.search(r"error: rank 1 \(.*, after step \d+\) has ended", run.ranks.output(0))


@pytest.mark.parametrize(
    ("processes", "tensor_parallel"),
    [
        pytest.param(1, 1, id="one"),
        *(
            pytest.param(
                2,
                size,
                id=name,
                marks=[
                    pytest.mark.multi_gpu,
                    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
                ],
            )
            for name, size in (("tp2", 2), ("dp2", 1))
        ),
    ],
)
def test_a_run_killed_while_it_saves_resumes(
    tmp_path: Path, processes: int, tensor_parallel: int
) -> None:
    common = [*words(tmp_path), f"parallel.tensor_model_parallel_size={tensor_parallel}"]
    waits = Run.start(tmp_path / "waits", processes, [*common, "run.async_save=false"])
    expected = finish(waits)
    assert sorted(expected) == list(range(1, STEPS + 1))
    common.append("run.async_save=true")
    killed = Run.start(tmp_path / "killed", processes, common)
    killed_in_save(killed)
    newest = int(killed.checkpoints()[-1].name[5:])
    again = Run.start(killed.folder, processes, common)
    assert finish(again) == expected
    taken = [row["step"] for row in metrics_file.rows(again.folder) if "train/loss" in row]
    assert all(taken.count(step) == 1 for step in range(1, newest + 1))


def test_a_hold_branch_leaves_losses_and_weights_as_they_are(tmp_path: Path) -> None:
    """The branch and the steps after it capture their own CUDA graphs."""
    common = [
        *words(tmp_path),
        "stage.run=[zero_neuron,retrofit,hold,export]",
        "stage.retrofit.target_cr=3",
        "stage.retrofit.steps_per_cr=8",
        "stage.hold.steps=6",
    ]
    plain = Run.start(tmp_path / "plain", 1, common)
    expected = finish(plain)
    branched = Run.start(tmp_path / "branched", 1, [*common, "stage.hold.branch_ratios=[2]"])
    assert finish(branched) == expected
    files = [run.folder / "exports/final/hf/model.safetensors" for run in (plain, branched)]
    assert files[0].read_bytes() == files[1].read_bytes()
