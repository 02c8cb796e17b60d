"""Runs commands on damaged inputs and reports their messages and the files they changed."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from dms_train.export.writer import write_export
from dms_train.hf.architecture import Architecture
from dms_train.hf.tensors import expected_shapes
from dms_train.mcore import groups
from dms_train.mcore.model.weights import RandomWeights
from tests.support import launch
from tests.support.disks import small_disk

COMMANDS = {
    "train": "dms_train.cli.train",
    "data": "dms_train.data_prep.prepare",
    "validate": "dms_train.cli.validate",
    "verify": "dms_train.checkpoints_tools.verify",
    "inspect": "dms_train.checkpoints_tools.inspect_folder",
    "report": "dms_train.cli.report",
    "eval": "dms_train.cli.evaluate",
    "export": "dms_train.checkpoints_tools.megatron_to_hf",
    "gqa": "dms_train.checkpoints_tools.pool_kv_heads",
    "import": "dms_train.checkpoints_tools.hf_to_megatron",
    "serve": "dms_train.cli.serve",
    "submit": "dms_train.launch.submit",
    "preflight": "dms_train.launch.preflight",
}
_LOG_LINE = re.compile(r"\d\d:\d\d:\d\d (\[rank \d+\] )?")
STEPS = (2, 2)  # of zero_neuron and retrofit in the finished run


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Exit code and output of a command."""

    code: int
    stderr: str
    started: bool = False  # whether process groups were made; known for `run_here` only

    @property
    def messages(self) -> list[str]:
        """The lines on stderr that are no progress messages; warnings are messages."""
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        messages = [line for line in lines if not _LOG_LINE.match(line) or " warning: " in line]
        return [_LOG_LINE.sub("", line) for line in messages]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets:
    """Sound inputs, made once and copied into every workspace.

    Attributes:
        model: A random two-layer Llama with its tokenizer.
        data: Folder of the shard `train`, made with that tokenizer.
        run: A finished run on both.
    """

    model: Path
    data: Path
    run: Path


def architecture(**changes: object) -> Architecture:
    """Two layers, 4 query and 2 KV heads, the 50 tokens of the exam tokenizer."""
    values: dict[str, object] = {
        "family": "llama",
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "vocab_size": 50,
        "max_position_embeddings": 128,
        "rotary_base": 10000.0,
        "layernorm_epsilon": 1e-6,
        "tie_word_embeddings": True,
    }
    return Architecture(**{**values, **changes})


def write_model(path: Path, tokenizer: Path, seed: int = 0, **changes: object) -> None:
    """A dense model directory with random weights."""
    a = architecture(**changes)
    source = RandomWeights(a, seed, 0.05)
    write_export(
        path,
        architecture=a,
        spec=None,
        cr_factor=None,
        target_cr=1.0,
        dtype=torch.float32,
        export_format="dms",
        weights=((name, source.get(name)) for name in expected_shapes(a)),
        source_dir=tokenizer,
        selftest=None,
        provenance={},
    )


@dataclass(frozen=True, slots=True)
class Workspace:
    """A folder with copies of the assets, to be damaged; `closing` is undone when it is left."""

    folder: Path
    assets: Assets
    closing: contextlib.ExitStack

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def data(self) -> Path:
        """Prefix of the shard."""
        return self.folder / "data" / "train"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def export(self) -> Path:
        """Export of the finished run."""
        return self.run / "exports" / "final"

    def checkpoint(self, step: int) -> Path:
        """Checkpoint folder of the finished run."""
        return self.run / "checkpoints" / f"step_{step:08d}"

    def finish_run(self, last_step: int | None = None) -> None:
        """Put the finished run in its place, or the part of it that ends with a step."""
        shutil.copytree(self.assets.run, self.run, symlinks=True)
        file = self.run / "config.yaml"
        text = file.read_text().replace(str(self.assets.model), str(self.model))
        text = text.replace(str(self.assets.data), str(self.data.parent))
        file.write_text(text.replace(str(self.assets.run), str(self.run)))
        if last_step is not None:
            shutil.rmtree(self.run / "exports")
            for step in range(last_step + 1, sum(STEPS) + 1):
                shutil.rmtree(self.checkpoint(step))

    def small_disk(self, path: Path, kibibytes: int) -> None:
        """Put an empty file system of that size at `path`; CannotArrange without permission."""
        self.closing.enter_context(small_disk(path, kibibytes))

    def stand_in(self, **programs: str) -> None:
        """Nothing but these programs on PATH, each a shell script."""
        folder = self.folder / "bin"
        folder.mkdir()
        for name, text in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        path = {"PATH": str(folder)}
        self.closing.enter_context(mock.patch.dict(os.environ, path))

    def train(self, *overrides: str) -> list[str]:
        """A small run on this folder's inputs; the latest override of a key counts."""
        return ["train", *_overrides(self.model, self.data, self.run, overrides)]

    def named(self, text: str) -> str:
        """A message with this folder's paths replaced by names."""
        names = {self.data: "DATA", self.model: "MODEL", self.run: "RUN", self.out: "OUT"}
        for path, name in names.items():
            text = text.replace(str(path), name)
        return text.replace(str(self.folder), "FOLDER")


def _overrides(model: Path, data: Path, run: Path, changes: tuple[str, ...]) -> list[str]:
    words = [
        f"model.path={model}",
        f"data.paths=[{data}]",
        "data.seq_length=32",
        "data.micro_batch_size=1",
        "data.global_batch_size=2",
        "method.window=4",
        f"stage.zero_neuron.steps={STEPS[0]}",
        "stage.retrofit.target_cr=2",
        f"stage.retrofit.steps_per_cr={STEPS[1]}",
        f"run.dir={run}",
        "run.save_interval=1",
        "run.keep_checkpoints=9",
        "run.check_teacher=false",  # random weights
        "run.eval_samples=2",
        "observe=quiet",
        "observe.progress=false",
    ]
    replaced = {word.partition("=")[0] for word in changes}
    return [word for word in words if word.partition("=")[0] not in replaced] + list(changes)


def make_assets(folder: Path) -> Assets:
    """Model, data and run, made by the commands themselves."""
    data, model, run = folder / "data", folder / "model", folder / "run"
    made = run_here(["data", "exam-sheets", "--out", str(data), "--sheets", "60"])
    assert made.code == 0, made.stderr
    write_model(model, data / "tokenizer")
    # a case names the channel in its message
    words = _overrides(model, data / "train", run, ("method.channel=0",))
    trained = run_here(["train", *words])
    assert trained.code == 0, trained.stderr
    return Assets(model=model, data=data, run=run)


@contextlib.contextmanager
def open_workspace(folder: Path, assets: Assets) -> Iterator[Workspace]:
    """Copies of model and data; a case that needs the finished run asks for it."""
    shutil.copytree(assets.model, folder / "model")
    shutil.copytree(assets.data, folder / "data")
    with contextlib.ExitStack() as closing:
        yield Workspace(folder, assets, closing)


Runner = Callable[[list[str]], Outcome]


def run_here(words: list[str]) -> Outcome:
    """Call the command in this process; a bug surfaces as its own exception."""
    command, *arguments = words
    main = importlib.import_module(COMMANDS[command]).main
    stderr = io.StringIO()
    with (
        contextlib.redirect_stderr(stderr),
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.object(sys, "argv", [command, *arguments]),
        mock.patch.object(groups, "start", wraps=groups.start) as start,
    ):
        try:
            code = main()
        except SystemExit as end:
            code = end.code
        finally:
            if dist.is_initialized():
                groups.stop()
    return Outcome(code=int(code or 0), stderr=stderr.getvalue(), started=start.called)


def run_as(world_size: int) -> Runner:
    """As rank 0 of that many processes; for refusals that come before processes meet."""

    def run(words: list[str]) -> Outcome:
        with mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": str(world_size)}):
            return run_here(words)

    return run


def run_alone(words: list[str]) -> Outcome:
    """A process of its own."""
    done = launch.module(module(words[0]), *words[1:])
    return Outcome(code=done.returncode, stderr=done.stderr)


def module(command: str) -> str:
    """Return the module that `python -m` starts."""
    return "dms_train" if command == "train" else COMMANDS[command]


Listing = dict[str, str]


def listing(folder: Path) -> Listing:
    """Every path below a folder with what is there, to compare later."""
    return {
        str(path.relative_to(folder)): _content(path)
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"


def touched(before: Listing, after: Listing, allowed: tuple[str, ...]) -> list[str]:
    """Paths that differ although no pattern allows it."""
    differing = [p for p in before.keys() | after.keys() if before.get(p) != after.get(p)]
    return sorted(p for p in differing if not any(fnmatch(p, pattern) for pattern in allowed))
