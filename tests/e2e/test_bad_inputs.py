"""Bad input gets one clear line, a non-zero exit code, and loses nothing.

Every case spoils one thing in a folder of sound inputs and runs the real command. The table in
docs/errors.md is what these runs said: python -m tests.e2e.test_bad_inputs --write-docs
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from dms_train.mcore import checkpoint_state, checksums
from tests.support import launch, refusals
from tests.support.disks import CannotArrange
from tests.support.refusals import Outcome, Room, Runner, run_alone, run_as, run_here

DOCS = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of bad input.

    Attributes:
        done: What the user did, for the documentation.
        arrange: Spoils a room and returns the command.
        says: Regular expression that a line on stderr matches; the table shows that line.
        code: Exit code.
        lines: Lines on stderr that are no progress.
        runner: How the command is started.
        changes: Patterns of the paths that the command may change; nothing else may differ.
        starts: Whether the problem shows only after processes have met.
        after: Further checks.
    """

    done: str
    arrange: Callable[[Room], list[str]]
    says: str
    code: int = 2
    lines: int = 1
    runner: Runner = run_here
    changes: tuple[str, ...] = ()
    starts: bool = False
    after: Callable[[Room], None] | None = None


def _train(*overrides: str) -> Callable[[Room], list[str]]:
    return lambda room: room.train(*overrides)


def _spoilt(
    spoil: Callable[[Room], object], *overrides: str, finished: bool = False
) -> Callable[[Room], list[str]]:
    """Spoil something, then train; overrides may name `{room.model}` and the like."""

    def arrange(room: Room) -> list[str]:
        if finished:
            room.finish_run()
        spoil(room)
        return room.train(*(text.format(room=room) for text in overrides))

    return arrange


def _command(
    *words: str, spoil: Callable[[Room], object] | None = None, finished: bool = False
) -> Callable[[Room], list[str]]:
    """Spoil something, then run another command."""

    def arrange(room: Room) -> list[str]:
        if finished:
            room.finish_run()
        if spoil is not None:
            spoil(room)
        return [word.format(room=room) for word in words]

    return arrange


def _edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def _edit_weights(room: Room, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = room.model / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file, {"format": "pt"})


def _lose_a_shard(room: Room) -> None:
    names = list(load_file(room.model / "model.safetensors"))
    (room.model / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (room.model / "model.safetensors.index.json").write_text(json.dumps(index))


def _only_pickle(room: Room) -> None:
    (room.model / "model.safetensors").rename(room.model / "pytorch_model.bin")


def _other_tokenizer(room: Room) -> None:
    _edit_json(room.model / "tokenizer.json", padding=None, version="1.1")


def _smaller_vocabulary(room: Room) -> None:
    shutil.rmtree(room.model)
    refusals.write_model(room.model, room.folder, vocab_size=40)


def _short_data(room: Room) -> None:
    words = ["data", "tokenize", str(_text(room, "short.txt", b"1 + 2")), "--overwrite"]
    assert run_here([*words, "--output", str(room.data), "--tokenizer", str(room.model)]).code == 0


def _qwen3(room: Room) -> None:
    shutil.rmtree(room.model)
    refusals.write_model(room.model, room.data.parent / "tokenizer", family="qwen3")


def _other_depth(room: Room) -> None:
    shutil.rmtree(room.model)
    refusals.write_model(room.model, room.data.parent / "tokenizer", num_layers=4)


class _Malicious:
    """Unpickles by calling a function of the system."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


def _reseal(checkpoint: Path, name: str) -> None:
    """Let the recorded size and checksum of a file be its present ones."""
    state = json.loads((checkpoint / "run_state.json").read_text())
    present = checksums.records([checkpoint / name])
    checkpoint_state.seal(checkpoint, state, state["files"] | present)


def _malicious_metadata(room: Room) -> None:
    (room.checkpoint(4) / ".metadata").write_bytes(pickle.dumps(_Malicious()))
    _reseal(room.checkpoint(4), ".metadata")


def _malicious_common(room: Room) -> None:
    torch.save(_Malicious(), room.checkpoint(4) / "common.pt")
    _reseal(room.checkpoint(4), "common.pt")


def _malicious_shard(room: Room) -> None:
    """Replace the first object in a shard; its place in the file stays the same."""
    file = room.checkpoint(4) / "__0_0.distcp"
    with (room.checkpoint(4) / ".metadata").open("rb") as stream:
        places = pickle.load(stream).storage_data
    first = min(
        (p for p in places.values() if p.relative_path == file.name), key=lambda p: p.offset
    )
    pickled = pickle.dumps(_Malicious())
    content = file.read_bytes()
    file.write_bytes(pickled.ljust(first.length, b"\0") + content[first.length :])
    _reseal(room.checkpoint(4), file.name)


def _flip_a_bit(room: Room, step: int = 4) -> None:
    """One bit in the middle of a checkpoint's first shard."""
    file = room.checkpoint(step) / "__0_0.distcp"
    _flip(file, file.stat().st_size // 2)


def _flipped_part_of_the_run(room: Room) -> list[str]:
    room.finish_run(last_step=3)
    _flip_a_bit(room, 3)
    return room.train()


def _cut_all_checkpoints(room: Room) -> None:
    for step in range(1, sum(refusals.STEPS) + 1):
        _cut(room.checkpoint(step) / "__0_0.distcp")


def _foreign_export(room: Room) -> None:
    folder = room.run / "exports" / "final" / "hf"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")


def _foreign_out(room: Room) -> None:
    room.out.mkdir()
    (room.out / "notes.txt").write_text("mine")


_JUDGED = ("stage.run=[zero_neuron,retrofit,export,validate]", "stage.validate.samples=2")


def _problems(room: Room, *lines: str) -> None:
    (room.folder / "problems.jsonl").write_text("".join(f"{line}\n" for line in lines))


def _without_tokenizer(room: Room) -> None:
    _problems(room, '{"prompt": "So 1", "answers": ["1"]}')
    (room.model / "tokenizer.json").unlink()


def _other_reference(room: Room) -> None:
    """Another model's logits in the self-test."""
    file = room.export / "hf" / "dms_selftest" / "reference.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors["logits"] = 9 * tensors["logits"].flip(0)
    save_file(tensors, file)


def _submit(*words: str, **programs: str) -> Callable[[Room], list[str]]:
    """Submit the small run; SLURM's commands are stand-ins, of which none is reached."""

    def arrange(room: Room) -> list[str]:
        room.stand_in(**(programs or {"sbatch": ""}))
        return ["submit", *room.train("cluster=default")[1:], *words]

    return arrange


def _resubmit(room: Room) -> list[str]:
    room.finish_run()
    return _submit("optim.lr=1e-3")(room)


def _submit_twice(room: Room) -> list[str]:
    (room.run / "launch").mkdir(parents=True)
    (room.run / "launch" / "submitting").write_text("ada on login2, process 71\n")
    return _submit()(room)


def _submit_into_a_file(room: Room) -> list[str]:
    _file_in_place_of_run(room)
    return _submit()(room)


def _not_submitted(room: Room) -> list[str]:
    room.finish_run()
    return ["submit", "status", str(room.run)]


def _has_no_jobs(room: Room) -> None:
    assert not (room.run / "launch" / "jobs.json").exists()


def _on_a_node(*words: str, nvidia_smi: str) -> Callable[[Room], list[str]]:
    def arrange(room: Room) -> list[str]:
        room.run.mkdir()
        room.stand_in(**({"nvidia-smi": nvidia_smi} if nvidia_smi else {}))
        return ["preflight", "--node", "a1", *words, str(room.run)]

    return arrange


def _is_reported(room: Room) -> None:
    assert json.loads((room.out / "metrics.json").read_text())["selftest.kl"] > 0.02
    assert "FAILED" in (room.out / "report.md").read_text()


def _validate(*words: str) -> tuple[str, ...]:
    return ("validate", "{room.export}/hf", "--teacher={room.model}", "--output={room.out}", *words)


def _file_in_place_of_run(room: Room) -> None:
    room.run.write_text("a file")


def _part_of_the_run(room: Room) -> list[str]:
    """A run of one checkpoint on a disk that has no room for a second one."""
    room.small_disk(room.run, 640)
    shutil.copytree(room.assets.run / "checkpoints" / "step_00000001", room.checkpoint(1))
    return room.train(f"data.cache_dir={room.folder / 'cache'}")


def _export_to_a_small_disk(room: Room) -> list[str]:
    room.finish_run()
    room.small_disk(room.folder / "disk", 48)
    return ["export", str(room.export / "megatron"), str(room.folder / "disk" / "model")]


def _not_a_number(room: Room) -> list[str]:
    """Resume with a checkpoint worth keeping."""
    room.finish_run(last_step=1)
    _edit_weights(room, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    return room.train("run.max_skipped_steps=2")


def _to_unsaved_steps(room: Room) -> list[str]:
    """Continue after step 1 with a learning rate that no step survives."""
    return room.train("optim.lr=1e30", "run.save_interval=2", "stage.zero_neuron.steps=20")


def _text(room: Room, name: str, content: bytes) -> Path:
    path = room.folder / name
    path.write_bytes(content)
    return path


def _tokenize(
    name: str, content: bytes | None, *flags: str, spoil: Callable[[Room], object] | None = None
) -> Callable[[Room], list[str]]:
    def arrange(room: Room) -> list[str]:
        if content is not None:
            _text(room, name, content)
        if spoil is not None:
            spoil(room)
        words = ["data", "tokenize", str(room.folder / name), "--output", str(room.out)]
        words += ["--tokenizer", str(room.model), *flags]
        return [word.format(room=room) for word in words]

    return arrange


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _long_run(room: Room, *overrides: str) -> list[str]:
    return room.train("stage.zero_neuron.steps=60", "run.keep_checkpoints=2", *overrides)


def _wait_for(path: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.05)


def _run_dir(words: list[str]) -> Path:
    return Path(next(word for word in words if word.startswith("run.dir=")).partition("=")[2])


def _with_a_dead_rank(words: list[str]) -> Outcome:
    """Two ranks, the second killed in the middle of training; what the first one says."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = refusals.start_ranks(words, _free_port(), Path(folder) / "stderr")
        try:
            _wait_for(_run_dir(words) / "checkpoints" / "step_00000002")
            ranks[1].kill()
            ranks[0].wait(timeout=60)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return Outcome(code=ranks[0].returncode, stderr=(Path(folder) / "stderr.0").read_text())


def _resumes(room: Room) -> None:
    """The same run, continued in one process."""
    resumed = run_here(_long_run(room, "run.save_interval=0"))
    assert resumed.code == 0, resumed.stderr
    assert "resuming from" in resumed.stderr
    assert (room.export / "hf" / "model.safetensors").is_file()


CONFIG = {
    "unknown-key": Case(
        done="`optim.lrr=1e-4`",
        arrange=_train("optim.lrr=1e-4"),
        says=r"config error: optim\.lrr: unknown key; did you mean optim\.lr\?",
    ),
    "unknown-key-elsewhere": Case(
        done="`seq_length=64` without its block",
        arrange=_train("seq_length=64"),
        says=r"seq_length: unknown key; did you mean data\.seq_length\?",
    ),
    "plus-unknown-key": Case(
        done="`+optim.momentum=0.9`",
        arrange=_train("+optim.momentum=0.9"),
        says=r"optim\.momentum: unknown key; valid here: lr, ",
    ),
    "plus-group": Case(
        done="`+parallel=tp2`",
        arrange=_train("+parallel=tp2"),
        says=r"\+parallel: every run already chooses its parallel; write parallel=",
    ),
    "plus-known-key": Case(
        done="`+optim.lr=1e-4`",
        arrange=_train("+optim.lr=1e-4"),
        says=r"\+optim\.lr: every run has this key; write optim\.lr=... without the \+",
    ),
    "not-an-override": Case(
        done="`'optim.lr 1e-4'`",
        arrange=_train("optim.lr 1e-4"),
        says=r"not an override; write key=value",
    ),
    "unknown-option": Case(
        done="`method=dmz`",
        arrange=_train("method=dmz"),
        says=r"method=dmz: no such option; did you mean method=dms\? options: ",
    ),
    "unknown-experiment": Case(
        done="`experiment=huge`",
        arrange=_train("experiment=huge"),
        says=r"experiment=huge: no such option; .*options: .*stories260k",
    ),
    "wrong-type": Case(
        done="`optim.lr=fast`",
        arrange=_train("optim.lr=fast"),
        says=r"optim\.lr='fast': expected a number",
    ),
    "wrong-type-whole-number": Case(
        done="`data.global_batch_size=2.5`",
        arrange=_train("data.global_batch_size=2.5"),
        says=r"data\.global_batch_size=2\.5: expected a whole number",
    ),
    "wrong-type-list": Case(
        done="`data.paths=corpus`",
        arrange=_train("data.paths=corpus"),
        says=r"data\.paths='corpus': expected a list",
    ),
    "missing-values": Case(
        done="neither `model.path` nor `data.paths` given",
        arrange=lambda room: ["train", f"run.dir={room.run}"],
        says=r"model\.path: missing; set model\.path=",
        lines=2,
    ),
    "config-dir-missing": Case(
        done="`--config-dir` of a folder that is not there",
        arrange=lambda room: [*room.train(), f"--config-dir={room.folder / 'absent'}"],
        says=r"--config-dir=.*absent: no such folder",
    ),
    "tensor-parallel": Case(
        done="tensor parallelism over 4 processes, the model has 2 KV heads",
        arrange=_train("parallel=tp4", "data.global_batch_size=4"),
        says=r"tensor_model_parallel_size=4: does not divide the model's num_query_groups=2",
        runner=run_as(4),
    ),
    "world-size": Case(
        done="`parallel=tp2` on 1 process",
        arrange=_train("parallel=tp2"),
        says=r"tensor x pipeline size is 2, which does not divide the 1 process",
    ),
    "pipeline-layers": Case(
        done="3 pipeline stages for 2 layers",
        arrange=_train("parallel.pipeline_model_parallel_size=3"),
        says=r"pipeline_model_parallel_size=3: the model's 2 layers do not divide",
        runner=run_as(3),
    ),
    "virtual-pipeline": Case(
        done="virtual pipeline stages without a pipeline",
        arrange=_train("parallel.virtual_pipeline_model_parallel_size=2"),
        says=r"virtual_pipeline_model_parallel_size=2: needs .*; use null without a pipeline",
    ),
    "sequence-parallel": Case(
        done="sequence parallelism without tensor parallelism",
        arrange=_train("parallel.sequence_parallel=true"),
        says=r"sequence_parallel=true: needs parallel\.tensor_model_parallel_size above 1",
    ),
    "global-batch": Case(
        done="a global batch of 3 in microbatches of 2",
        arrange=_train("data.global_batch_size=3", "data.micro_batch_size=2"),
        says=r"data\.global_batch_size=3: not a multiple of .* use a multiple of 2",
    ),
    "gpu-unknown": Case(
        done="`cluster.gpu=h300`",
        arrange=_train("cluster.gpu=h300"),
        says=r"cluster\.gpu=h300: choose one of null, a100_40gb",
    ),
    "gpu-memory": Case(
        done="a microbatch of a million samples on a GPU of 80 GB",
        arrange=_train(
            "data.global_batch_size=1048576", "data.micro_batch_size=1048576", "cluster.gpu=h100"
        ),
        says=r"pipeline stage 1 of 1 \(rank 0\) needs .* GiB more than .* H100 SXM 80 GB",
    ),
    "window": Case(
        done="a window as long as the samples",
        arrange=_train("method.window=32"),
        says=r"method\.window=32: not below data\.seq_length=32",
    ),
    "positions": Case(
        done="samples longer than the model's positions",
        arrange=_train("data.seq_length=256"),
        says=r"data\.seq_length=256: the model reads at most 128 positions",
    ),
    "target-cr": Case(
        done="`stage.retrofit.target_cr=2 stage.retrofit.start_cr=3`",
        arrange=_train("stage.retrofit.start_cr=3"),
        says=r"target_cr=2\.0: below stage\.retrofit\.start_cr=3\.0; anneal upwards",
    ),
    "unknown-preset": Case(
        done="`method.preset=dmz`",
        arrange=_train("method.preset=dmz"),
        says=r"method\.preset='dmz': choose one of dms, ",
    ),
    "kl-temperature": Case(
        done="`method.kl_temperature=0`",
        arrange=_train("method.kl_temperature=0"),
        says=r"method\.kl_temperature=0\.0: use a positive temperature",
    ),
    "unknown-stage": Case(
        done="`stage.run=[zero_neuron,retrofti]`",
        arrange=_train("stage.run=[zero_neuron,retrofti]"),
        says=r"unknown stage 'retrofti'; did you mean retrofit\?",
    ),
    "stage-order": Case(
        done="`stage.run=[retrofit,zero_neuron]`",
        arrange=_train("stage.run=[retrofit,zero_neuron]"),
        says=r"run each stage once, as \[zero_neuron, retrofit\]",
    ),
    "hold-alone": Case(
        done="`stage=hold` without a retrofitted checkpoint",
        arrange=_train("stage=hold"),
        says=r"hold needs retrofit before it, or run\.load",
    ),
    "validate-alone": Case(
        done="`stage.run=[retrofit,validate]`",
        arrange=_train("stage.run=[retrofit,validate]", "stage.validate.samples=2"),
        says=r"stage\.run: validate judges what export wrote; put export before it",
    ),
    "validate-samples": Case(
        done="`stage.validate.samples=64` with fewer validation samples",
        arrange=_train(_JUDGED[0]),
        says=r"stage\.validate\.samples=64: run\.eval_samples=2 are the validation samples there",
    ),
    "validate-pattern": Case(
        done="`stage.validate.answer_pattern` without a group",
        arrange=_train("stage.validate.answer_pattern=answer"),
        says=r"stage\.validate\.answer_pattern=answer: 0 groups; use one, for the answer",
    ),
    "unknown-loss": Case(
        done="`stage.retrofit.loss=mse`",
        arrange=_train("stage.retrofit.loss=mse"),
        says=r"stage\.retrofit\.loss=mse: choose one of distill, lm",
    ),
    "unknown-dtype": Case(
        done="`parallel.params_dtype=fp8`",
        arrange=_train("parallel.params_dtype=fp8"),
        says=r"parallel\.params_dtype=fp8: choose one of fp32, bf16",
    ),
    "unknown-kernels": Case(
        done="`kernels=cuda`",
        arrange=_train("kernels=cuda"),
        says=r"kernels=cuda: choose one of auto, triton, flex, blockwise, reference",
    ),
    "triton-on-cpu": Case(
        done="`kernels=triton` without a GPU",
        arrange=_train("kernels=triton"),
        says=r"kernels=triton: training runs on the CPU and its kernels need a GPU; use",
    ),
    "flex-on-cpu": Case(
        done="`kernels=flex` without a GPU",
        arrange=_train("kernels=flex"),
        says=r"kernels=flex: training runs on the CPU and FlexAttention has no backward pass",
    ),
    "unknown-layers": Case(
        done="`parallel.layers=te`",
        arrange=_train("parallel.layers=te"),
        says=r"parallel\.layers=te: choose one of auto, local, transformer_engine",
    ),
    "transformer-engine-on-cpu": Case(
        done="`parallel.layers=transformer_engine` without a GPU",
        arrange=_train("parallel.layers=transformer_engine"),
        says=r"parallel\.layers=transformer_engine: Transformer Engine needs a GPU and training",
    ),
    "several-problems": Case(
        done="`optim.lr=0 run.log_interval=0`: a line for each problem",
        arrange=_train("optim.lr=0", "run.log_interval=0"),
        says=r"optim\.lr=0\.0: use a number above 0",
        lines=2,
    ),
    "one-line-of-two-ranks": Case(
        done="a wrong value under torchrun with 2 processes: said once",
        arrange=_train("method.window=32"),
        says=r"^config error: method\.window=32: not below",
        code=1,
        runner=lambda words: _under_torchrun(words),
    ),
}

MODEL = {
    "no-teacher": Case(
        done="a new model with the distillation loss",
        arrange=_spoilt(
            lambda room: None,
            "model=scratch",
            "model.path=null",
            "run.load={room.run}/checkpoints/step_00000004",
            "run.dir={room.out}",
            finished=True,
        ),
        says=r"^config error: model\.path: distilling needs the original as teacher; set it",
    ),
    "no-teacher-to-validate": Case(
        done="`validate` without the original",
        arrange=_spoilt(
            lambda room: None,
            "model=scratch",
            "model.path=null",
            "run.load={room.run}/checkpoints/step_00000004",
            "stage.run=[hold,export,validate]",
            "stage.hold.loss=lm",
            "stage.validate.samples=2",
            "run.dir={room.out}",
            finished=True,
        ),
        says=r"^config error: model\.path: validate needs the original as teacher; set it",
    ),
    "nothing-to-validate": Case(
        done="`validate` of an export that was never retrofitted",
        arrange=_train("stage.run=[export,validate]", "stage.validate.samples=2"),
        says=r"^config error: stage\.run: validate needs a student that evicts",
    ),
    "model-missing": Case(
        done="`model.path` of a folder that is not there",
        arrange=_spoilt(lambda room: None, "model.path={room.folder}/absent"),
        says=r"FOLDER/absent: no such directory",
    ),
    "hub-id-not-cached": Case(
        done="`model.path=nobody/nothing`, not in the local hub cache",
        arrange=_train("model.path=nobody/nothing"),
        says=r"nobody/nothing: neither a directory nor in the local hub cache .*; give a directory",
    ),
    "config-missing": Case(
        done="`config.json` deleted",
        arrange=_spoilt(lambda room: (room.model / "config.json").unlink()),
        says=r"MODEL/config\.json: no such file",
    ),
    "config-broken": Case(
        done="`config.json` cut off",
        arrange=_spoilt(lambda room: _cut(room.model / "config.json")),
        says=r"MODEL/config\.json: not valid JSON",
    ),
    "model-type": Case(
        done="a model of another family",
        arrange=_spoilt(lambda room: _edit_json(room.model / "config.json", model_type="gpt2")),
        says=r"MODEL: config\.json: model_type='gpt2' is not supported; use one of llama, ",
    ),
    "config-value": Case(
        done="`hidden_size` is text in `config.json`",
        arrange=_spoilt(lambda room: _edit_json(room.model / "config.json", hidden_size="32")),
        says=r"MODEL: config\.json: hidden_size='32' is not supported; state a whole number",
    ),
    "config-key": Case(
        done="`vocab_size` is null in `config.json`",
        arrange=_spoilt(lambda room: _edit_json(room.model / "config.json", vocab_size=None)),
        says=r"MODEL: config\.json: missing keys vocab_size",
    ),
    "rope": Case(
        done="a model with YaRN RoPE",
        arrange=_spoilt(
            lambda room: _edit_json(
                room.model / "config.json",
                rope_parameters=None,
                rope_scaling={"rope_type": "yarn", "factor": 4.0},
            )
        ),
        says=r"MODEL: config\.json: rope_type='yarn' is not supported; use a model with default",
    ),
    "rope-llama3": Case(
        done="Llama 3 RoPE scaling with other frequencies than Llama 3's",
        arrange=_spoilt(
            lambda room: _edit_json(
                room.model / "config.json",
                rope_parameters=None,
                rope_scaling={
                    "rope_type": "llama3",
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 8.0,
                    "original_max_position_embeddings": 64,
                },
            )
        ),
        says=r"llama3 RoPE scaling .* megatron-core supports",
    ),
    "weights-cut": Case(
        done="`model.safetensors` cut off",
        arrange=_spoilt(lambda room: _cut(room.model / "model.safetensors")),
        says=r"MODEL/model\.safetensors: .* bytes, its header promises .*; copy the file again",
    ),
    "shard-missing": Case(
        done="a shard that the index names is missing",
        arrange=_spoilt(_lose_a_shard),
        says=r"model-00001-of-00002\.safetensors: weight file is missing",
    ),
    "pickle-only": Case(
        done="`pytorch_model.bin` only",
        arrange=_spoilt(_only_pickle),
        says=r"has only pytorch_model\.bin, which is not read \(pickle runs code\)",
    ),
    "no-weights": Case(
        done="no weights at all",
        arrange=_spoilt(lambda room: (room.model / "model.safetensors").unlink()),
        says=r"MODEL: no model\.safetensors and no ",
    ),
    "weights-shape": Case(
        done="weights of another size than `config.json` says",
        arrange=_spoilt(lambda room: _edit_json(room.model / "config.json", intermediate_size=64)),
        says=r"MODEL: .* has shape .*, config\.json promises .*do not belong together",
    ),
    "weights-missing": Case(
        done="a tensor is missing",
        arrange=_spoilt(lambda room: _edit_weights(room, lambda t: t.pop("model.norm.weight"))),
        says=r"MODEL: no tensor model\.norm\.weight, which config\.json promises",
    ),
    "model-is-an-export": Case(
        done="`model.path` of a DMS export",
        arrange=_spoilt(lambda room: None, "model.path={room.export}/hf", finished=True),
        says=r"this is a DMS export; give the original model as model\.path",
    ),
}

DATA = {
    "manifest-missing": Case(
        done="`PREFIX.manifest.json` deleted",
        arrange=_spoilt(lambda room: Path(f"{room.data}.manifest.json").unlink()),
        says=r"DATA\.manifest\.json: missing; make the files with dms-data tokenize",
    ),
    "data-with-extension": Case(
        done="`data.paths=[PREFIX.bin]`",
        arrange=_spoilt(lambda room: None, "data.paths=[{room.data}.bin]"),
        says=r"name the files by their common prefix, without an extension",
    ),
    "manifest-broken": Case(
        done="`PREFIX.manifest.json` cut off",
        arrange=_spoilt(lambda room: _cut(Path(f"{room.data}.manifest.json"))),
        says=r"DATA\.manifest\.json: not valid JSON",
    ),
    "bin-cut": Case(
        done="`PREFIX.bin` cut off",
        arrange=_spoilt(lambda room: _cut(Path(f"{room.data}.bin"))),
        says=r"DATA\.bin: .* bytes, the manifest says .*truncated or damaged",
    ),
    "idx-damaged": Case(
        done="one bit of `PREFIX.idx` flipped",
        arrange=_spoilt(lambda room: _flip(Path(f"{room.data}.idx"), 40)),
        says=r"DATA\.idx: SHA-256 .*, the manifest says .*; the file is damaged",
    ),
    "other-tokenizer": Case(
        done="data made with another tokenizer than the model's",
        arrange=_spoilt(_other_tokenizer),
        says=r"made with tokenizer .*, the model has .*; tokenise with the model's own tokenizer",
    ),
    "token-ids": Case(
        done="token ids outside the model's vocabulary",
        arrange=_spoilt(_smaller_vocabulary),
        says=r"token id 49 is outside the model's vocabulary of 40",
    ),
    "data-too-small": Case(
        done="less data than one sample",
        arrange=_spoilt(_short_data),
        says=r"DATA: its train split has 5 tokens in 1 of 1 documents, one sample needs 33; use",
    ),
    "no-validation-share": Case(
        done="`data.split='100,0,0'`",
        arrange=_train("data.split='100,0,0'"),
        says=r"its valid split has 0 tokens",
    ),
    "json-line": Case(
        done="a malformed line in a `.jsonl` file",
        arrange=_tokenize("rows.jsonl", b'{"text": "1"}\n{"text": \n'),
        says=r"dms-data: FOLDER/rows\.jsonl:2: not valid JSON",
    ),
    "json-field": Case(
        done="a `.jsonl` line without the text field",
        arrange=_tokenize("rows.jsonl", b'{"body": "1"}\n'),
        says=r'rows\.jsonl:1: has no field "text"; name another with --text-key',
    ),
    "not-utf8": Case(
        done="a text file that is not UTF-8",
        arrange=_tokenize("page.txt", b"1\n\xff\n"),
        says=r"page\.txt:2: not UTF-8",
    ),
    "empty-input": Case(
        done="an empty input file",
        arrange=_tokenize("page.txt", b""),
        says=r"dms-data: page\.txt: no documents; nothing was written",
    ),
    "input-missing": Case(
        done="an input file that is not there",
        arrange=_tokenize("page.txt", None),
        says=r"FOLDER/page\.txt: No such file or directory",
    ),
    "input-type": Case(
        done="an input of unknown type",
        arrange=_tokenize("page.pdf", b"1"),
        says=r"page\.pdf: unknown file type; give \.txt or \.jsonl files",
    ),
    "tokenizer-missing": Case(
        done="`--tokenizer` of a folder without `tokenizer.json`",
        arrange=_tokenize(
            "page.txt", b"1", spoil=lambda room: (room.model / "tokenizer.json").unlink()
        ),
        says=r"MODEL: no tokenizer\.json; give a local tokenizer directory",
    ),
    "output-exists": Case(
        done="`--output` of a shard that exists",
        arrange=_tokenize("page.txt", b"1", "--output", "{room.data}"),
        says=r"DATA: exists already; pass --overwrite to replace it",
    ),
    "output-unwritable": Case(
        done="`--output` below a file",
        arrange=_tokenize("page.txt", b"1", "--output", "{room.data}.bin/shard"),
        says=r"DATA\.bin/shard: cannot be written \(.*\)",
        runner=run_alone,
    ),
    "bin-damaged": Case(
        done="`dms-data check` of a shard with a flipped bit",
        arrange=_command(
            "data", "check", "{room.data}", spoil=lambda room: _flip(Path(f"{room.data}.bin"), 99)
        ),
        says=r"DATA\.bin: SHA-256 .*, the manifest says .*; the file is damaged",
    ),
    "problems-missing": Case(
        done="`stage.validate.problems` of a file that is not there",
        arrange=_spoilt(
            lambda room: None, *_JUDGED, "stage.validate.problems={room.folder}/problems.jsonl"
        ),
        says=r"FOLDER/problems\.jsonl: No such file",
    ),
    "problems-broken": Case(
        done="a malformed line in `stage.validate.problems`",
        arrange=_spoilt(
            lambda room: _problems(room, '{"prompt": "So 1", "answers": ["1"]}', "{"),
            *_JUDGED,
            "stage.validate.problems={room.folder}/problems.jsonl",
        ),
        says=r"FOLDER/problems\.jsonl:2: not valid JSON",
    ),
    "problems-answers": Case(
        done="a line of `stage.validate.problems` whose answers are numbers",
        arrange=_spoilt(
            lambda room: _problems(room, '{"prompt": "So 1", "answers": [1]}'),
            *_JUDGED,
            "stage.validate.problems={room.folder}/problems.jsonl",
        ),
        says=r"FOLDER/problems\.jsonl:1: needs .answers., a list of texts",
    ),
    "problems-long": Case(
        done="a problem longer than the model's positions",
        arrange=_spoilt(
            lambda room: _problems(room, json.dumps({"prompt": "1" * 128, "answers": ["1"]})),
            *_JUDGED,
            "stage.validate.problems={room.folder}/problems.jsonl",
        ),
        says=r"a prompt of 128 tokens: the model takes 128; shorten the problems",
    ),
    "problems-tokenizer": Case(
        done="problems for a model without a tokenizer",
        arrange=_spoilt(
            _without_tokenizer, *_JUDGED, "stage.validate.problems={room.folder}/problems.jsonl"
        ),
        says=r"MODEL: problems need a tokenizer\.json beside the model",
    ),
}

RUN = {
    "load-missing": Case(
        done="`run.load` of a folder that is not there",
        arrange=_spoilt(lambda room: None, "run.load={room.folder}/absent"),
        says=r"run\.load=FOLDER/absent: neither a checkpoint folder .* correct the path",
    ),
    "load-not-a-checkpoint": Case(
        done="`run.load` of some other folder",
        arrange=_spoilt(lambda room: None, "run.load={room.folder}/data"),
        says=r"run\.load=FOLDER/data: neither a checkpoint folder",
    ),
    "load-cut": Case(
        done="`run.load` of a checkpoint with a cut-off file",
        arrange=_spoilt(
            lambda room: _cut(room.checkpoint(4) / "__0_0.distcp"),
            "run.load={room.run}/checkpoints/step_00000004",
            "run.dir={room.out}",
            finished=True,
        ),
        says=r"step_00000004: __0_0\.distcp has .* bytes instead of .*; use an older checkpoint",
    ),
    "load-state-broken": Case(
        done="`run.load` of a checkpoint with a cut-off `run_state.json`",
        arrange=_spoilt(
            lambda room: _cut(room.checkpoint(4) / "run_state.json"),
            "run.load={room.run}/checkpoints/step_00000004",
            "run.dir={room.out}",
            finished=True,
        ),
        says=r"step_00000004: run_state\.json is damaged",
    ),
    "load-malicious-metadata": Case(
        done="`run.load` of a checkpoint whose metadata would run a command",
        arrange=_spoilt(
            _malicious_metadata,
            "run.load={room.run}/checkpoints/step_00000004",
            "run.dir={room.out}",
            finished=True,
        ),
        says=r"it names posix\.system\); do not load files from sources you do not trust",
    ),
    "load-malicious-common": Case(
        done="`run.load` of a checkpoint whose `common.pt` would run a command",
        arrange=_spoilt(
            _malicious_common,
            "run.load={room.run}/checkpoints/step_00000004",
            "run.dir={room.out}",
            finished=True,
        ),
        says=r"common\.pt holds more than tensors and plain values\); do not load files",
    ),
    "load-malicious-shard": Case(
        done="`run.load` of a checkpoint with an object in a shard that would run a command",
        arrange=_spoilt(
            _malicious_shard,
            "run.load={room.run}/checkpoints/step_00000004",
            "run.dir={room.out}",
            finished=True,
        ),
        says=r"__0_0\.distcp holds more than tensors and plain values\); do not load files",
    ),
    "load-other-constants": Case(
        done="`run.load` of a checkpoint trained with another window",
        arrange=_spoilt(
            lambda room: None,
            "run.load={room.run}/checkpoints/step_00000004",
            "run.dir={room.out}",
            "method.window=8",
            finished=True,
        ),
        says=r"it was trained with other constants; add method\.window=4",
    ),
    "load-borrowed": Case(
        done="`run.load` of a retrofitted checkpoint, and `zero_neuron` again",
        arrange=_spoilt(
            lambda room: None,
            "run.load={room.run}/checkpoints/step_00000004",
            "run.dir={room.out}",
            finished=True,
        ),
        says=r"its lane is already borrowed for decisions; leave zero_neuron and pretrain out",
    ),
    "load-other-model": Case(
        done="`run.load` of a checkpoint of another model",
        arrange=_spoilt(
            _other_depth,
            "run.load={room.run}/checkpoints/step_00000004",
            "run.dir={room.out}",
            finished=True,
        ),
        says=r"step_00000004: its architecture is not that of model\.path",
    ),
    "resume-other-lr": Case(
        done="resumed with another learning rate",
        arrange=_spoilt(lambda room: None, "optim.lr=1e-3", finished=True),
        says=r"started with other values \(optim\.lr: 1e-05 -> 0\.001\); restore them",
    ),
    "resume-never": Case(
        done="`run.resume=never` on a used folder",
        arrange=_spoilt(lambda room: None, "run.resume=never", finished=True),
        says=r"RUN: it holds step_00000004 and run\.resume=never; choose another folder",
    ),
    "resume-past-a-cut-one": Case(
        done="resumed with a cut-off newest checkpoint: continues from the one before",
        arrange=_spoilt(lambda room: _cut(room.checkpoint(4) / "__0_0.distcp"), finished=True),
        says=r"^warning: skipped: checkpoint RUN/checkpoints/step_00000004: __0_0\.distcp has",
        code=0,
        changes=(*_BEGUN, "run/checkpoints/step_00000004*", "run/exports/*"),
        starts=True,
    ),
    "resume-past-a-flipped-bit": Case(
        done="resumed with a flipped bit in the newest checkpoint: continues from the one before",
        arrange=_flipped_part_of_the_run,
        says=r"^warning: skipped: checkpoint RUN/checkpoints/step_00000003: the content of __0_0",
        code=0,
        changes=(*_BEGUN, "run/checkpoints/step_0000000[34]*", "run/exports", "run/exports/*"),
        starts=True,
    ),
    "load-flipped-bit": Case(
        done="`run.load` of a checkpoint with a flipped bit",
        arrange=_spoilt(
            _flip_a_bit,
            "run.load={room.run}/checkpoints/step_00000004",
            "run.dir={room.out}",
            "stage.run=[retrofit,export]",
            finished=True,
        ),
        says=r"__0_0\.distcp is not what was saved \(its checksum differs\); use an older check",
        changes=("out", "out/*"),
        starts=True,
    ),
    "resume-all-cut": Case(
        done="resumed with cut-off checkpoints only",
        arrange=_spoilt(_cut_all_checkpoints, finished=True),
        says=r"^config error: run\.dir=RUN: none of its 4 checkpoint\(s\) can be used \(.*; choose",
    ),
    "resume-malicious-metadata": Case(
        done="resumed with checkpoint metadata that would run a command",
        arrange=_spoilt(_malicious_metadata, finished=True),
        says=r"it names posix\.system\); do not load files from sources you do not trust",
    ),
    "run-dir-unwritable": Case(
        done="`run.dir` is a file",
        arrange=_spoilt(_file_in_place_of_run),
        says=r"run\.dir=RUN: cannot be written \(.*\); choose another folder",
    ),
    "nvidia-of-dms": Case(
        done="`stage.export.format=nvidia` for weights trained with the `dms` preset",
        arrange=_train("stage.export.format=nvidia"),
        says=r"export format nvidia \(NVIDIA's DMS code\): method\.channel=0: it reads the last",
    ),
    "nvidia-window": Case(
        done="NVIDIA's preset with a window not above the cache page",
        arrange=_spoilt(_qwen3, "method=dms_nvidia"),
        says=r"method\.window=4: it needs a window larger than the cache page of 256 tokens",
    ),
    "foreign-export": Case(
        done="the export folder holds somebody's files",
        arrange=_spoilt(_foreign_export),
        says=r"RUN/exports/final/hf: exists and is not an export; choose another directory",
    ),
    "full-disk": Case(
        done="the disk is full when a checkpoint is saved",
        arrange=_part_of_the_run,
        says=r"RUN/checkpoints/step_00000002: cannot be written \(No space left on device\)",
        changes=(*_BEGUN, "cache", "cache/*"),
        starts=True,
    ),
    "loss-not-finite": Case(
        done="`optim.lr=1e30`",
        arrange=_to_unsaved_steps,
        says=r"step 4: .* is (nan|inf), skipped step 3 in a row \(RUN/skipped names the samples\)",
        lines=3,
        changes=(*_BEGUN, "run/checkpoints*", "run/skipped*"),
        starts=True,
    ),
    "weights-not-finite": Case(
        done="the loss is NaN because a weight of the teacher is",
        arrange=_not_a_number,
        says=r"step 3: loss is nan, skipped step 2 in a row .* checkpoints are untouched\. Lower",
        lines=2,
        changes=(*_BEGUN, "run/skipped*", "run/checkpoints/step_00000002*"),
        starts=True,
    ),
    "dead-rank": Case(
        done="one of 2 processes is killed; the same command resumes",
        arrange=_long_run,
        says=r"rank 0: another rank ended or did not answer; .*Start the same command again",
        runner=_with_a_dead_rank,
        changes=(*_BEGUN, "run/checkpoints*"),
        after=_resumes,
    ),
}

TOOLS = {
    "verify-missing": Case(
        done="`dms-verify` of a folder that is not there",
        arrange=_command("verify", "{room.folder}/absent"),
        says=r"dms-verify: FOLDER/absent/config\.json: no such file",
    ),
    "verify-dense": Case(
        done="`dms-verify` of a dense model",
        arrange=_command("verify", "{room.model}"),
        says=r"dms-verify: MODEL: a dense model; there are no decisions to verify",
    ),
    "verify-no-selftest": Case(
        done="`dms-verify` of an export without self-test",
        arrange=_command(
            "verify",
            "{room.export}/hf",
            spoil=lambda room: shutil.rmtree(room.export / "hf" / "dms_selftest"),
            finished=True,
        ),
        says=r"reference\.safetensors: no self-test; export it again with one",
    ),
    "verify-damaged-selftest": Case(
        done="`dms-verify` of an export with a cut-off self-test",
        arrange=_command(
            "verify",
            "{room.export}/hf",
            spoil=lambda room: _cut(room.export / "hf" / "dms_selftest" / "reference.safetensors"),
            finished=True,
        ),
        says=r"reference\.safetensors: not a readable self-test",
    ),
    "inspect-missing": Case(
        done="`dms-inspect` of a folder that is not there",
        arrange=_command("inspect", "{room.folder}/absent"),
        says=r"dms-inspect: FOLDER/absent: no such directory",
    ),
    "inspect-unknown": Case(
        done="`dms-inspect` of some other folder",
        arrange=_command("inspect", "{room.folder}/data"),
        says=r"FOLDER/data: neither a model \(config\.json\), a checkpoint",
    ),
    "inspect-cut": Case(
        done="`dms-inspect` of a model with cut-off weights",
        arrange=_command(
            "inspect", "{room.model}", spoil=lambda room: _cut(room.model / "model.safetensors")
        ),
        says=r"dms-inspect: MODEL/model\.safetensors: .* bytes, its header promises",
    ),
    "report-missing": Case(
        done="`dms-report` of a folder that is no run",
        arrange=_command("report", "{room.folder}/absent"),
        says=r"error: FOLDER/absent: no rows in metrics\.jsonl",
    ),
    "export-missing": Case(
        done="`dms-export` of a checkpoint that is not there",
        arrange=_command("export", "{room.folder}/absent", "{room.out}"),
        says=r"checkpoint FOLDER/absent: no run_state\.json",
    ),
    "export-cut": Case(
        done="`dms-export` of a checkpoint with a cut-off file",
        arrange=_command(
            "export",
            "{room.run}/checkpoints/step_00000004",
            "{room.out}",
            spoil=lambda room: _cut(room.checkpoint(4) / "__0_0.distcp"),
            finished=True,
        ),
        says=r"__0_0\.distcp has .* bytes instead of",
    ),
    "validate-nothing": Case(
        done="`dms-validate` without `--data` and `--problems`",
        arrange=_command(*_validate(), finished=True),
        says=r"nothing to measure on; give --data, --problems or both",
    ),
    "validate-samples-of-none": Case(
        done="`dms-validate --samples 0`",
        arrange=_command(*_validate("--data={room.data}", "--samples=0"), finished=True),
        says=r"error: samples=0: use at least 1",
    ),
    "validate-dense": Case(
        done="`dms-validate` of a dense model",
        arrange=_command(
            "validate", "{room.model}", "--teacher={room.model}", "--output={room.out}", "--data=x"
        ),
        says=r"MODEL: not a DMS export; give the folder of an export",
    ),
    "validate-data": Case(
        done="`dms-validate --data` of files that are not there",
        arrange=_command(*_validate("--data={room.folder}/absent"), finished=True),
        says=r"FOLDER/absent\.manifest\.json: missing; make the files with dms-data tokenize",
    ),
    "validate-problems": Case(
        done="`dms-validate --problems` of a file that is not there",
        arrange=_command(*_validate("--problems={room.folder}/absent"), finished=True),
        says=r"FOLDER/absent: No such file",
    ),
    "validate-selftest": Case(
        done="`dms-validate` of an export that does not pass its self-test",
        arrange=_command(
            *_validate("--data={room.data}", "--seq-length=32", "--samples=1"),
            spoil=_other_reference,
            finished=True,
        ),
        says=r"RUN/exports/final/hf: self-test failed: KL .* at most 0\.02 passes; export it again",
        changes=("out", "out/*"),
        after=_is_reported,
    ),
    "export-foreign-folder": Case(
        done="`dms-export` into a folder that holds somebody's files",
        arrange=_command(
            "export", "{room.export}/megatron", "{room.out}", spoil=_foreign_out, finished=True
        ),
        says=r"OUT: exists and is not an export; choose another directory",
    ),
    "export-nvidia-of-dms": Case(
        done="`dms-export --format nvidia` of weights trained with the `dms` preset",
        arrange=_command(
            "export", "{room.export}/megatron", "{room.out}", "--format", "nvidia", finished=True
        ),
        says=r"export format nvidia .*: it reads the last channel .* or export in format dms",
    ),
    "export-full-disk": Case(
        done="the disk is full when an export is written",
        arrange=_export_to_a_small_disk,
        says=r"cannot be written \(.*No space left on device",
        starts=True,
    ),
    "import-missing": Case(
        done="`dms-import` of a folder that is not there",
        arrange=_command("import", "{room.folder}/absent", "{room.out}"),
        says=r"FOLDER/absent: no such directory",
    ),
    "import-exists": Case(
        done="`dms-import` into a folder that exists",
        arrange=_command("import", "{room.model}", "{room.data.parent}"),
        says=r"FOLDER/data: exists; choose another folder",
    ),
    "import-shape": Case(
        done="`dms-import` of weights of another size than `config.json` says",
        arrange=_command(
            "import",
            "{room.model}",
            "{room.out}",
            spoil=lambda room: _edit_json(room.model / "config.json", num_hidden_layers=3),
        ),
        says=r"MODEL: no tensor model\.layers\.2\..*, which config\.json promises",
    ),
}

_INVALID = "sbatch: error: Batch job submission failed: Invalid account or account/partition"

CLUSTER = {
    "submit-layout": Case(
        done="`dms-submit` of TP 2 on 1 process",
        arrange=_submit("parallel=tp2"),
        says=r"parallel: tensor x pipeline size is 2, which does not divide the 1 process",
    ),
    "submit-unknown-key": Case(
        done="`dms-submit cluster.node=2`",
        arrange=_submit("cluster.node=2"),
        says=r"cluster\.node: unknown key; did you mean cluster\.nodes\?",
    ),
    "submit-skip": Case(
        done="`dms-submit --skip pretrain` of a run without that stage",
        arrange=_submit("--skip", "pretrain"),
        says=r"--skip pretrain: no such stage; this run has prepare, hf_to_megatron, zero_neuron",
    ),
    "submit-no-image": Case(
        done="`dms-submit cluster=gpu_container` without an image",
        arrange=_submit("cluster=gpu_container"),
        says=r"cluster\.container_image: missing; set cluster\.container_image=",
    ),
    "submit-prepare": Case(
        done="`dms-submit --prepare` with a quote that is not closed",
        arrange=_submit("--prepare", "tokenize 'a"),
        says=r"--prepare tokenize 'a: No closing quotation; quote it as for a shell",
    ),
    "submit-no-time-to-save": Case(
        done="`dms-submit` with no less time to save than before the limit",
        arrange=_submit("cluster.save_seconds=300"),
        says=r"cluster\.save_seconds=300: not below cluster\.signal_seconds=300",
    ),
    "submit-without-slurm": Case(
        done="`dms-submit` where SLURM is not installed",
        arrange=_submit(true=""),
        says=r"error: sbatch: not found; submit where SLURM is installed",
    ),
    "submit-refused": Case(
        done="`dms-submit` of what SLURM refuses",
        arrange=_submit(
            "cluster.account=nobody", sbatch=f"echo '{_INVALID}' >&2; exit 1", squeue="", git=""
        ),
        says=r"error: sbatch: error: Batch job submission failed: Invalid account",
        changes=("run", "run/*"),
        after=_has_no_jobs,
    ),
    "submit-into-a-file": Case(
        done="`dms-submit` with a `run.dir` that is a file",
        arrange=_submit_into_a_file,
        says=r"config error: run\.dir=RUN: cannot be written \(Not a directory\)",
    ),
    "submit-twice": Case(
        done="two `dms-submit` of one run folder at once",
        arrange=_submit_twice,
        says=r"RUN: being submitted by ada on login2, process 71; wait, or remove RUN/launch/",
    ),
    "submit-changed": Case(
        done="`dms-submit` of a run that was started with another learning rate",
        arrange=_resubmit,
        says=r"run\.dir=RUN: its run was started with other values \(optim\.lr: ",
        changes=("run/launch",),
    ),
    "submit-status-nothing": Case(
        done="`dms-submit status` without a folder",
        arrange=_command("submit", "status"),
        says=r"dms-submit status: give one run folder",
    ),
    "submit-status-missing": Case(
        done="`dms-submit status` of a folder that is not there",
        arrange=_command("submit", "status", "{room.run}"),
        says=r"RUN/config\.yaml: cannot be read \(No such file or directory\); give the folder of",
    ),
    "submit-status-other": Case(
        done="`dms-submit status` of a run that was started by hand",
        arrange=_not_submitted,
        says=r"RUN: was not submitted by dms-submit",
    ),
    "node-gpus": Case(
        done="a job on a node that shows 1 of its 2 GPUs",
        arrange=_on_a_node("--gpus", "2", nvidia_smi="echo 'GPU 0: NVIDIA H200 (UUID: x)'"),
        says=r"error: node a1: 1 visible GPU\(s\), 2 are needed; have it repaired",
        changes=("run/errors", "run/errors/*"),
    ),
    "node-driver": Case(
        done="a job on a node whose driver does not answer",
        arrange=_on_a_node("--gpus", "2", nvidia_smi="echo 'No devices were found'; exit 6"),
        says=r"error: node a1: nvidia-smi does not answer \(No devices were found\)",
        changes=("run/errors", "run/errors/*"),
    ),
    "node-no-driver": Case(
        done="a job for GPUs on a node without a driver",
        arrange=_on_a_node("--gpus", "2", nvidia_smi=""),
        says=r"error: node a1: nvidia-smi does not answer \(No such file or directory\)",
        changes=("run/errors", "run/errors/*"),
    ),
    "node-disk": Case(
        done="a job whose run folder has no room for a checkpoint",
        arrange=_on_a_node("--free-bytes", str(2**60), nvidia_smi=""),
        says=r"error: node a1: .* free in RUN, .* are needed for a checkpoint; make room",
        changes=("run/errors", "run/errors/*"),
    ),
}

GROUPS = {
    "Configuration": CONFIG,
    "Model": MODEL,
    "Data": DATA,
    "Run": RUN,
    "Tools": TOOLS,
    "Cluster": CLUSTER,
}
CASES = {name: case for cases in GROUPS.values() for name, case in cases.items()}


def _under_torchrun(words: list[str]) -> Outcome:
    """Two ranks; torchrun's own report, which follows a failure, is left out.

    So is the second rank's echo, which is heard when rank 0 takes seconds to end.
    """
    done = launch.torchrun(2, "-m", refusals.module(words[0]), *words[1:], timeout=90)
    assert "[rank0]:" not in done.stderr, "a rank printed a traceback"
    lines = [line.removeprefix("[rank 1] ") for line in done.stderr.splitlines()]
    ours = dict.fromkeys(line for line in lines if line.startswith("config error:"))
    return Outcome(code=done.returncode, stderr="\n".join(ours))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one case gave: messages with named paths, and what it touched without permission."""

    messages: list[str]
    code: int
    touched: list[str]
    started: bool
    stderr: str


def answer(case: Case, room: Room) -> Answer:
    """Arrange a case and run its command."""
    words = case.arrange(room)
    before = refusals.listing(room.folder)
    outcome = case.runner(words)
    return Answer(
        messages=[room.named(line) for line in outcome.messages],
        code=outcome.code,
        touched=refusals.touched(before, refusals.listing(room.folder), case.changes),
        started=outcome.started,
        stderr=outcome.stderr,
    )


def told(case: Case, found: Answer) -> str:
    """The message that the case is about; empty when it was not said."""
    return next((line for line in found.messages if re.search(case.says, line)), "")


_VARYING = (
    (re.compile(r"(?<![0-9a-zA-Z])[0-9a-f]{12}(?![0-9a-zA-Z])"), "HASH"),
    (re.compile(r"\d+ bytes"), "N bytes"),
    (re.compile(r"(promises|says|instead of) \d+"), r"\1 N"),
    (re.compile(r"step \d+:"), "step N:"),
    (re.compile(r"KL \S+ nats"), "KL N nats"),
    (re.compile(r"\d+\.\d [GM]iB"), "N GiB"),
    (re.compile(r"80 GB: .* \(\S+ s a step\)"), "80 GB: OVERRIDES (N s a step)"),
    (re.compile(r"line \d+ column \d+ \(char \d+\)"), "line N"),
)


def row(case: Case, message: str, code: int) -> str:
    """A line of the table in the documentation; numbers that vary are left out."""
    for pattern, name in _VARYING:
        message = pattern.sub(name, message)
    return f"| {case.done} | `{message}` | {code} |".replace("\n", " ")


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> refusals.Assets:
    return refusals.make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture
def room(tmp_path: Path, assets: refusals.Assets) -> Iterator[Room]:
    with refusals.open_room(tmp_path, assets) as opened:
        yield opened


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input(case: Case, room: Room) -> None:
    try:
        found = answer(case, room)
    except CannotArrange as reason:
        pytest.skip(str(reason))
    assert told(case, found), found.stderr
    assert found.code == case.code, found.stderr
    assert len(found.messages) == case.lines, found.stderr
    assert "Traceback" not in found.stderr
    assert found.touched == []
    assert found.started == case.starts
    if case.after is not None:
        case.after(room)
    assert row(case, told(case, found), found.code) in DOCS.read_text().splitlines()


def test_a_rank_killed_under_torchrun_ends_the_run(room: Room) -> None:
    words = _long_run(room)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    process = subprocess.Popen(
        [sys.executable, *launcher, refusals.module(words[0]), *words[1:]],
        env=launch.environment(),
        cwd=launch.ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_for(room.checkpoint(2))
        ranks = psutil.Process(process.pid).children()
        next(rank for rank in ranks if rank.environ().get("RANK") == "1").kill()
        stderr = process.communicate(timeout=60)[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode != 0
    assert "Signal 9 (SIGKILL)" in stderr
    assert "[rank0]" not in stderr, "a rank printed a traceback"
    _resumes(room)


def test_docs_list_every_case_and_no_other() -> None:
    lines = DOCS.read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and line[2:5] not in ("Inp", "---")]
    done = [line.split(" | ")[0].removeprefix("| ") for line in rows]
    assert done == [case.done for case in CASES.values()]


_INTRODUCTION = """\
# What bad input is answered with

Every command refuses bad input with one line on stderr for each problem: what is wrong, where, and
how to fix it. The exit code is 2, nothing that existed is changed, and nothing half-written stays
behind. Refusals come before a process group is started wherever they can be known by then. A
traceback is a bug in the program.

Under torchrun the exit code is torchrun's own, 1, and its report follows the line.

In the messages `MODEL`, `DATA`, `RUN`, `OUT` and `FOLDER` stand for paths, `N` and `HASH` for
values that differ. The tables are what `tests/e2e/test_bad_inputs.py` saw, written by
`python -m tests.e2e.test_bad_inputs --write-docs`.
"""


def write_docs() -> None:
    """Run every case and write the tables."""
    text = [_INTRODUCTION]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "assets"
        made.mkdir()
        assets = refusals.make_assets(made)
        for title, cases in GROUPS.items():
            text += [f"## {title}\n", "| Input | Message | Exit code |", "| --- | --- | --- |"]
            text += [_row_of(name, case, Path(folder), assets) for name, case in cases.items()]
            text.append("")
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text("\n".join(text))


def _row_of(name: str, case: Case, folder: Path, assets: refusals.Assets) -> str:
    (folder / name).mkdir()
    begin = time.monotonic()
    with refusals.open_room(folder / name, assets) as room:
        found = answer(case, room)
    message = told(case, found)
    print(f"{time.monotonic() - begin:5.1f} s  {name}: {found.messages} {found.touched}")
    return row(case, message, found.code)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        if sys.argv[1:] != ["--write-docs"]:
            sys.exit("usage: python -m tests.e2e.test_bad_inputs --write-docs")
        write_docs()
