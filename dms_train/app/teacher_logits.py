"""The stage `teacher_logits`, and runs that read what it stored instead of running the teacher."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dms_train.app import launcher
from dms_train.app.inputs import DATA, MODEL, data_hashes
from dms_train.config.build import ConfigError
from dms_train.config.schema import RunConfig
from dms_train.data.batches import BatchSource
from dms_train.data.manifest import read_manifest
from dms_train.data.teacher_logits import StoredTeacher, stored_samples, write_part
from dms_train.hf.architecture import Architecture
from dms_train.hf.json_files import read_json, write_json
from dms_train.hf.rope import RopeScaling
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine
from dms_train.mcore.groups import ParallelView
from dms_train.observe import log
from dms_train.training.engine import Watch
from dms_train.training.options import TEACHER_LOGITS

TRAIN, VALID = "train", "valid"
RECORD = "teacher.json"
_VERSION = 1
_ARCHITECTURE = "model.architecture"
_SAMPLES, _COMPLETE = "samples", "complete"
_LOG_LINES = 10


def record(
    config: RunConfig, architecture: Architecture, contents: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the stored distributions depend on, by key of the configuration.

    Args:
        config: Configuration of the run.
        architecture: That of the original.
        contents: Record of the inputs of the run (`inputs.record`).
    """
    data = config.data
    return {
        "version": _VERSION,
        "data.seq_length": data.seq_length,
        "data.packing": data.packing,
        "data.split": data.split,
        "data.weights": data.weights and list(data.weights),
        "run.seed": config.run.seed,
        "run.eval_samples": config.run.eval_samples,
        "loss.kl_temperature": config.loss.kl_temperature,
        "tokenizer_sha256": [read_manifest(path).tokenizer_sha256 for path in data.paths],
        DATA: data_hashes(data.paths),
        MODEL: contents.get(MODEL),
        _ARCHITECTURE: _as_json(architecture),
    }


def _as_json(architecture: Architecture) -> dict[str, Any]:
    """Return the fields on which logits depend, as `teacher.json` holds them."""
    fields = {k: v for k, v in asdict(architecture).items() if k != "max_position_embeddings"}
    return dict(json.loads(json.dumps(fields)))


def stored_counts(config: RunConfig) -> dict[str, int] | None:
    """Return the numbers of stored samples by split; None if the run does not read any.

    The order of samples depends on their number, so the run builds its data with these numbers.

    Raises:
        ConfigError: `teacher.logits` has no such files.
    """
    if config.teacher.logits is None:
        return None
    return dict(_read_record(config)[_SAMPLES])


def check(
    config: RunConfig,
    architecture: Architecture,
    steps: int,
    contents: Mapping[str, Any] | None = None,
) -> None:
    """Refuse stored distributions that are not those of this run's teacher and samples.

    Args:
        config: Configuration of the run.
        architecture: That of the original.
        steps: Optimizer steps of the run.
        contents: Record of the inputs of the run; None compares everything except the model.

    Raises:
        ConfigError: The first difference.
    """
    counts = stored_counts(config)
    if counts is None:
        return
    where, made = f"teacher.logits={config.teacher.logits}", _read_record(config)
    if not made[_COMPLETE]:
        raise ConfigError(f"{where}: its stage teacher_logits is not finished; run it to its end")
    for key, value in record(config, architecture, contents or {}).items():
        if made.get(key) != value and (key != MODEL or contents is not None):
            raise ConfigError(f"{where}: {_difference(key, made.get(key), value)}")
    needed = steps * config.data.global_batch_size
    if needed > counts[TRAIN]:
        raise ConfigError(
            f"{where}: holds {counts[TRAIN]} samples and this run takes {needed}; store more with "
            f"stage.teacher_logits.samples={needed}, or take fewer steps"
        )
    one_pass = samples_of_a_pass(config, launcher.world_size() // config.parallel.ranks_per_copy)
    if 0 < counts[VALID] < one_pass:
        raise ConfigError(
            f"{where}: stores {counts[VALID]} validation samples, and one pass of all ranks takes "
            f"{one_pass}; store them with run.eval_samples={one_pass}, or lower "
            "data.micro_batch_size"
        )


def samples_of_a_pass(config: RunConfig, copies: int) -> int:
    """Return the samples of the shortest evaluation by `copies` data-parallel ranks."""
    parallel = config.parallel
    stages = parallel.pipeline_model_parallel_size
    microbatches = stages if parallel.virtual_pipeline_model_parallel_size else 1
    return config.data.micro_batch_size * copies * microbatches


def _difference(key: str, made: Any, now: Any) -> str:
    what = {
        DATA: "other data",
        MODEL: "another model",
        _ARCHITECTURE: "another config.json of the model",
        "tokenizer_sha256": "another tokenizer",
    }
    if key in what:
        return f"was stored with {what[key]}; run the stage teacher_logits again in a new folder"
    return f"was stored with {key}={made} and this run has {now}; use {made}, or store it again"


def _folder(run: Path) -> Path:
    return run / TEACHER_LOGITS


def _read(path: Path) -> dict[str, Any]:
    """Read a record; those of earlier versions lack keys of RoPE scaling and linear attention."""
    found = read_json(path)
    architecture = found.get(_ARCHITECTURE)
    if isinstance(architecture, dict):
        architecture["rope_scaling"] = RopeScaling.completed(architecture.get("rope_scaling"))
        layers = [{"linear": False, **layer} for layer in architecture.get("layers", [])]
        found[_ARCHITECTURE] = {"linear": None, **architecture, "layers": layers}
        experts = architecture.get("experts")
        if experts is not None:
            found[_ARCHITECTURE]["experts"] = {"shared_ffn_hidden_size": 0, **experts}
    return found


def _read_record(config: RunConfig) -> dict[str, Any]:
    assert config.teacher.logits is not None
    try:
        return _read(_folder(Path(config.teacher.logits)) / RECORD)
    except FileNotFoundError as error:
        raise ConfigError(
            f"teacher.logits={config.teacher.logits}: {error}; name the run folder of a finished "
            "stage teacher_logits"
        ) from None


def stored_teacher(config: RunConfig, view: ParallelView, split: str) -> StoredTeacher | None:
    """Open the stored distributions of a split; None if this rank computes no loss with them.

    Raises:
        DataError: Samples are missing, or a file is damaged.
    """
    counts = stored_counts(config)
    if counts is None or not view.is_last_stage:
        return None
    assert config.teacher.logits is not None
    return StoredTeacher(_folder(Path(config.teacher.logits)) / split, counts[split])


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPass:
    """The stage `teacher_logits`: a pass of the original over the samples of later runs.

    Attributes:
        engine: The original as the student, without a teacher.
        sources: Batches of each split.
        samples: Number of samples of each split.
        made_with: Result of `record`.
        folder: Run folder.
        top_k: Stored tokens of a position.
        view: This rank's position in the layout.
    """

    engine: McoreEngine
    sources: Mapping[str, BatchSource]
    samples: Mapping[str, int]
    made_with: Mapping[str, Any]
    folder: Path
    top_k: int
    view: ParallelView

    def store(self, watch: Watch) -> bool:
        """Store what is missing; return False if the run must stop before that.

        Raises:
            ConfigError: The folder holds distributions of another run, or damaged files; on every
                rank.
            DataError: A sample cannot be read, or a file cannot be written.
        """
        starts, problem = groups.of_rank_0(self._begin)
        if problem is not None:
            raise ConfigError(problem)
        log.logger().info("teacher_logits: stores %d tokens of each position", self.top_k)
        for count, (split, first) in enumerate(starts):
            if count % max(len(starts) // _LOG_LINES, 1) == 0:
                log.logger().info("teacher_logits: batch %d of %d", count + 1, len(starts))
            self._store(split, first, watch)
            watch.beat(0)
            if watch.must_stop():
                return False
        if self.view.rank == 0:  # every file is complete, because `must_stop` waits for all ranks
            self._write_record(complete=True)
        return True

    def _store(self, split: str, first: int, watch: Watch) -> None:
        """Store this rank's part of the global batch from sample `first` on."""
        with watch.phase("data"):
            batches = self.sources[split].microbatches(first)
        with watch.phase("step"):
            stored = self.engine.top_logits(batches, self.top_k)
        if stored:
            name = f"{first:09d}-{self.view.dp_rank}of{self.view.dp_size}"
            write_part(_folder(self.folder) / split, name, batches, stored)

    def _begin(self) -> tuple[list[tuple[str, int]], str | None]:
        """Return split and first sample of what is missing, and the problem if there is one."""
        path = _folder(self.folder) / RECORD
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._write_record(complete=False)
            before, now = _read(path), self._record()
            for key in now:
                if before.get(key) != now[key]:
                    return [], (
                        f"run.dir={self.folder}: its teacher_logits were begun with {key}="
                        f"{before.get(key)} and this run has {now[key]}; choose another folder"
                    )
            return list(self._missing()), None
        except (OSError, ValueError) as error:  # the other ranks wait for the result
            return [], f"run.dir={self.folder}: {error}"

    def _record(self) -> dict[str, Any]:
        return {**self.made_with, "top_k": self.top_k, _SAMPLES: dict(self.samples)}

    def _write_record(self, *, complete: bool) -> None:
        write_json(_folder(self.folder) / RECORD, {**self._record(), _COMPLETE: complete})

    def _missing(self) -> Iterator[tuple[str, int]]:
        """Yield split and first sample of each global batch that is not stored whole."""
        for split, source in self.sources.items():
            present = stored_samples(_folder(self.folder) / split)
            size = source.global_batch_size
            for first in range(0, self.samples[split], size):
                if any(number not in present for number in range(first, first + size)):
                    yield split, first
