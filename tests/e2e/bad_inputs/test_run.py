"""Bad input: runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from dms_train.mcore.checkpoints import checksums
from dms_train.mcore.checkpoints import state as checkpoint_state
from tests.e2e.bad_inputs.cases import (
    Case,
    check,
    cut,
    damaged,
    edit_weights,
    file_in_place_of_run,
    flip,
)
from tests.support import launch, refusals
from tests.support.commands import forked_python
from tests.support.fork_server import Started
from tests.support.ranks import Ranks, dms_train
from tests.support.refusals import Outcome, Workspace, run_here

# What a run that had begun to train may have written besides checkpoints and exports.
_BEGUN = (
    "run",
    "run/config.yaml",
    "run/metrics.jsonl",
    "run/summary.json",
    "run/data_cache",
    "run/data_cache/*",
    "run/state",
    "run/state/*",
)


def _qwen3(workspace: Workspace) -> None:
    shutil.rmtree(workspace.model)
    refusals.write_model(workspace.model, workspace.data.parent / "tokenizer", family="qwen3")


def _other_depth(workspace: Workspace) -> None:
    shutil.rmtree(workspace.model)
    refusals.write_model(workspace.model, workspace.data.parent / "tokenizer", num_layers=4)


class _Malicious:
    """Unpickles by calling a function of the system."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


def _reseal(checkpoint: Path, name: str) -> None:
    """Let the recorded size and checksum of a file be its present ones."""
    state = json.loads((checkpoint / "run_state.json").read_text())
    present = checksums.records([checkpoint / name])
    checkpoint_state.seal(checkpoint, state, state["files"] | present)


def _malicious_metadata(workspace: Workspace) -> None:
    (workspace.checkpoint(4) / ".metadata").write_bytes(pickle.dumps(_Malicious()))
    _reseal(workspace.checkpoint(4), ".metadata")


def _malicious_common(workspace: Workspace) -> None:
    torch.save(_Malicious(), workspace.checkpoint(4) / "common.pt")
    _reseal(workspace.checkpoint(4), "common.pt")


def _malicious_shard(workspace: Workspace) -> None:
    """Replace the first object in a shard; its place in the file stays the same."""
    file = workspace.checkpoint(4) / "__0_0.distcp"
    with (workspace.checkpoint(4) / ".metadata").open("rb") as stream:
        places = pickle.load(stream).storage_data
    first = min(
        (p for p in places.values() if p.relative_path == file.name), key=lambda p: p.offset
    )
    pickled = pickle.dumps(_Malicious(), protocol=2)  # as torch.save writes
    content = file.read_bytes()
    file.write_bytes(pickled.ljust(first.length, b"\0") + content[first.length :])
    _reseal(workspace.checkpoint(4), file.name)


def _flip_a_bit(workspace: Workspace, step: int = 4) -> None:
    """One bit in the middle of a checkpoint's first shard."""
    file = workspace.checkpoint(step) / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)


def _flipped_part_of_the_run(workspace: Workspace) -> list[str]:
    workspace.finish_run(last_step=3)
    _flip_a_bit(workspace, 3)
    return workspace.train()


def _cut_all_checkpoints(workspace: Workspace) -> None:
    for step in range(1, sum(refusals.STEPS) + 1):
        cut(workspace.checkpoint(step) / "__0_0.distcp")


def _foreign_export(workspace: Workspace) -> None:
    folder = workspace.run / "exports" / "final" / "hf"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")


def _part_of_the_run(workspace: Workspace) -> list[str]:
    """A run of one checkpoint on a disk that has no room for a second one."""
    workspace.small_disk(workspace.run, 640)
    shutil.copytree(workspace.assets.run / "checkpoints" / "step_00000001", workspace.checkpoint(1))
    return workspace.train(f"data.cache_dir={workspace.folder / 'cache'}")


def _overflowing(workspace: Workspace) -> list[str]:
    """A model whose logits overflow."""
    edit_weights(workspace, lambda tensors: tensors["model.norm.weight"].fill_(3e38))
    return workspace.train("run.max_skipped_steps=2")


def _to_unsaved_steps(workspace: Workspace) -> list[str]:
    """Continue after step 1 with a learning rate that no step survives."""
    return workspace.train("optim.lr=1e30", "run.save_interval=2", "stage.zero_neuron.steps=20")


def _long_run(workspace: Workspace, *overrides: str) -> list[str]:
    return workspace.train("stage.zero_neuron.steps=60", "run.keep_checkpoints=2", *overrides)


def _wait_for(
    path: Path, process: Started | subprocess.Popen[str] | subprocess.Popen[bytes]
) -> None:
    while not path.exists():
        assert process.poll() is None, f"the run ended before {path} appeared"
        time.sleep(0.05)


def _run_dir(words: list[str]) -> Path:
    return Path(next(word for word in words if word.startswith("run.dir=")).partition("=")[2])


def _with_a_dead_rank(words: list[str]) -> Outcome:
    """Two ranks, the second killed in the middle of training; the output of the first one."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks.start(dms_train, 2, *words[1:], log=Path(folder) / "log")
        try:
            _wait_for(_run_dir(words) / "checkpoints" / "step_00000002", ranks.processes[0])
            ranks.signal(1, signal.SIGKILL)
            ranks.wait(100)
        finally:
            ranks.kill()
        return Outcome(code=ranks.codes[0], stderr=ranks.output(0))


def _resumes(workspace: Workspace) -> None:
    """The same run, continued in one process."""
    resumed = run_here(_long_run(workspace, "run.save_interval=0"))
    assert resumed.code == 0, resumed.stderr
    assert "resuming from" in resumed.stderr
    assert (workspace.export / "hf" / "model.safetensors").is_file()


CASES = {
    "load-missing": Case(
        done="`run.load` of a folder that is not there",
        arrange=damaged(lambda workspace: None, "run.load={workspace.folder}/absent"),
        kind="config error",
        facts=("run.load=FOLDER/absent",),
    ),
    "load-not-a-checkpoint": Case(
        done="`run.load` of some other folder",
        arrange=damaged(lambda workspace: None, "run.load={workspace.folder}/data"),
        kind="config error",
        facts=("run.load=FOLDER/data",),
    ),
    "load-cut": Case(
        done="`run.load` of a checkpoint with a cut-off file",
        arrange=damaged(
            lambda workspace: cut(workspace.checkpoint(4) / "__0_0.distcp"),
            "run.load={workspace.run}/checkpoints/step_00000004",
            "run.dir={workspace.out}",
            finished=True,
        ),
        kind="error",
        facts=("step_00000004", "__0_0.distcp", "use"),
    ),
    "load-state-broken": Case(
        done="`run.load` of a checkpoint with a cut-off `run_state.json`",
        arrange=damaged(
            lambda workspace: cut(workspace.checkpoint(4) / "run_state.json"),
            "run.load={workspace.run}/checkpoints/step_00000004",
            "run.dir={workspace.out}",
            finished=True,
        ),
        kind="error",
        facts=("step_00000004", "run_state.json", "use"),
    ),
    "load-malicious-metadata": Case(
        done="`run.load` of a checkpoint whose metadata would run a command",
        arrange=damaged(
            _malicious_metadata,
            "run.load={workspace.run}/checkpoints/step_00000004",
            "run.dir={workspace.out}",
            finished=True,
        ),
        kind="error",
        facts=("posix.system", "do not load"),
    ),
    "load-malicious-common": Case(
        done="`run.load` of a checkpoint whose `common.pt` would run a command",
        arrange=damaged(
            _malicious_common,
            "run.load={workspace.run}/checkpoints/step_00000004",
            "run.dir={workspace.out}",
            finished=True,
        ),
        kind="error",
        facts=("common.pt", "do not load"),
    ),
    "load-malicious-shard": Case(
        done="`run.load` of a checkpoint with an object in a shard that would run a command",
        arrange=damaged(
            _malicious_shard,
            "run.load={workspace.run}/checkpoints/step_00000004",
            "run.dir={workspace.out}",
            finished=True,
        ),
        kind="error",
        facts=("__0_0.distcp", "do not load"),
    ),
    "load-other-constants": Case(
        done="`run.load` of a checkpoint trained with another window",
        arrange=damaged(
            lambda workspace: None,
            "run.load={workspace.run}/checkpoints/step_00000004",
            "run.dir={workspace.out}",
            "method.window=8",
            finished=True,
        ),
        kind="config error",
        facts=("method.window=4", "add"),
    ),
    "load-borrowed": Case(
        done="`run.load` of a retrofitted checkpoint, and `zero_neuron` again",
        arrange=damaged(
            lambda workspace: None,
            "run.load={workspace.run}/checkpoints/step_00000004",
            "run.dir={workspace.out}",
            finished=True,
        ),
        kind="config error",
        facts=("zero_neuron", "stage.run", "leave"),
    ),
    "load-other-model": Case(
        done="`run.load` of a checkpoint of another model",
        arrange=damaged(
            _other_depth,
            "run.load={workspace.run}/checkpoints/step_00000004",
            "run.dir={workspace.out}",
            finished=True,
        ),
        kind="config error",
        facts=("step_00000004", "model.path"),
    ),
    "resume-other-lr": Case(
        done="resumed with another learning rate",
        arrange=damaged(lambda workspace: None, "optim.lr=1e-3", finished=True),
        kind="config error",
        facts=("optim.lr", "05", "0.001", "restore"),
    ),
    "resume-never": Case(
        done="`run.resume=never` on a used folder",
        arrange=damaged(lambda workspace: None, "run.resume=never", finished=True),
        kind="config error",
        facts=("RUN", "step_00000004", "run.resume=never", "choose"),
    ),
    "resume-past-a-cut-one": Case(
        done="resumed with a cut-off newest checkpoint: continues from the one before",
        arrange=damaged(
            lambda workspace: cut(workspace.checkpoint(4) / "__0_0.distcp"), finished=True
        ),
        kind="warning",
        facts=("RUN/checkpoints/step_00000004", "__0_0.distcp", "use"),
        code=0,
        changes=(*_BEGUN, "run/checkpoints/step_00000004*", "run/exports/*"),
        starts=True,
    ),
    "resume-past-a-flipped-bit": Case(
        done="resumed with a flipped bit in the newest checkpoint: continues from the one before",
        arrange=_flipped_part_of_the_run,
        kind="warning",
        facts=("RUN/checkpoints/step_00000003", "__0_0", "use"),
        code=0,
        changes=(*_BEGUN, "run/checkpoints/step_0000000[234]*", "run/weights*", "run/exports*"),
        starts=True,
    ),
    "load-flipped-bit": Case(
        done="`run.load` of a checkpoint with a flipped bit",
        arrange=damaged(
            _flip_a_bit,
            "run.load={workspace.run}/checkpoints/step_00000004",
            "run.dir={workspace.out}",
            "stage.run=[retrofit,export]",
            finished=True,
        ),
        kind="error",
        facts=("__0_0.distcp", "use"),
        changes=("out", "out/*"),
        starts=True,
    ),
    "resume-all-cut": Case(
        done="resumed with cut-off checkpoints only",
        arrange=damaged(_cut_all_checkpoints, finished=True),
        kind="config error",
        facts=("run.dir=RUN", "4", "choose"),
    ),
    "resume-malicious-metadata": Case(
        done="resumed with checkpoint metadata that would run a command",
        arrange=damaged(_malicious_metadata, finished=True),
        kind="error",
        facts=("posix.system", "do not load"),
    ),
    "run-dir-unwritable": Case(
        done="`run.dir` is a file",
        arrange=damaged(file_in_place_of_run),
        kind="config error",
        facts=("run.dir=RUN", "choose"),
    ),
    "nvidia-of-dms": Case(
        done="`stage.export.format=nvidia` for weights trained with the `dms` preset",
        arrange=damaged(_qwen3, "stage.export.format=nvidia"),
        kind="error",
        facts=("NVIDIA", "DMS", "method.channel=0"),
    ),
    "nvidia-window": Case(
        done="NVIDIA's preset with a window not above the cache page",
        arrange=damaged(_qwen3, "method=dms_nvidia"),
        kind="error",
        facts=("method.window=4", "256"),
    ),
    "foreign-export": Case(
        done="the export folder holds somebody's files",
        arrange=damaged(_foreign_export),
        kind="error",
        facts=("RUN/exports/final/hf", "choose"),
    ),
    "full-disk": Case(
        done="the disk is full when a checkpoint is saved",
        arrange=_part_of_the_run,
        kind="error",
        facts=("RUN/checkpoints/step_00000002",),
        changes=(*_BEGUN, "cache", "cache/*"),
        starts=True,
    ),
    "loss-not-finite": Case(
        done="`optim.lr=1e30`",
        arrange=_to_unsaved_steps,
        kind="error",
        facts=("3", "RUN/skipped", "run.load"),
        lines=3,
        changes=(*_BEGUN, "run/checkpoints*", "run/skipped*"),
        starts=True,
    ),
    "weights-not-finite": Case(
        done="the loss is NaN because a weight of the teacher is",
        arrange=_overflowing,
        kind="error",
        facts=("2", "run.load"),
        lines=2,
        changes=(*_BEGUN, "run/skipped*", "run/checkpoints*"),
        starts=True,
    ),
    "dead-rank": Case(
        done="one of 2 processes is killed; the same command resumes",
        arrange=_long_run,
        kind="error",
        facts=("0",),
        runner=_with_a_dead_rank,
        changes=(*_BEGUN, "run/checkpoints*"),
        after=_resumes,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input_is_refused(case: Case, workspace: Workspace) -> None:
    check(case, workspace)


def test_a_rank_killed_under_torchrun_ends_the_run(workspace: Workspace, tmp_path: Path) -> None:
    words = _long_run(workspace)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    process = subprocess.Popen(
        [sys.executable, *launcher, refusals.module(words[0]), *words[1:]],
        env=launch.environment(PYTHON_EXEC=forked_python(tmp_path)),
        cwd=launch.ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_for(workspace.checkpoint(2), process)
        ranks = psutil.Process(process.pid).children()
        next(rank for rank in ranks if rank.environ().get("RANK") == "1").kill()
        stderr = process.communicate()[1]
    finally:
        process.terminate()
        process.wait()
    assert process.returncode != 0
    assert "Signal 9 (SIGKILL)" in stderr
    assert stderr.count("Traceback") == 1, "a rank printed a traceback, beside that of torchrun"
    _resumes(workspace)
