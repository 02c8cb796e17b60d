"""Checks of a run before any process group exists."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from dms_train.app import inputs, launcher, run_folder, teacher_logits
from dms_train.app.export_evaluation import check_evaluation
from dms_train.app.exporter import check_folder, check_format
from dms_train.app.start_point import StartPoint, find_start, with_known_channel, with_student
from dms_train.app.task_evaluation import check_tasks
from dms_train.config.build import ConfigError
from dms_train.config.schema import RunConfig
from dms_train.data.index_file import read_index
from dms_train.data.manifest import file_sha256
from dms_train.data.tokens import check_files
from dms_train.hf.architecture import Architecture
from dms_train.hf.tokenizer_files import TOKENIZER_FILE
from dms_train.mcore.model.configuration import rope_arguments
from dms_train.method.base import MethodSpec
from dms_train.observe import log
from dms_train.planning.check import check
from dms_train.training.options import EVICTING_STAGES
from dms_train.training.stages import Action, Stage, build_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked configuration and what it starts from."""

    config: RunConfig
    architecture: Architecture
    spec: MethodSpec
    start: StartPoint
    stages: list[Stage | Action]
    folder: Path
    since: float

    @property
    def steps(self) -> int:
        """Optimizer steps of all stages."""
        return sum(stage.steps for stage in self.stages if isinstance(stage, Stage))


def prepare(config: RunConfig) -> Prepared:
    """Check everything a run needs without allocating anything.

    Raises:
        ConfigError: One line for each problem.
        ValueError: A package refused its input.
    """
    since = time.monotonic()
    original = find_start(config)
    check(
        config,
        world_size=launcher.world_size(),
        architecture=original.architecture,
        processes_per_host=launcher.processes_per_host(),
    )
    rope_arguments(
        original.architecture.rope_scaling
    )  # refuses RoPE scaling that megatron-core lacks
    start = run_folder.resume_point(config, original)
    if start is None:
        load, trainable = config.run.load, config.trainable
        start = original if load is None else with_student(original, Path(load), trainable)
        start.require(with_known_channel(config.method, start.spec).spec)
        _check_eviction_channel(config, start)
        if start.student is not None and launcher.rank() == 0:
            ratio = start.state.loaded_cr
            log.logger().info("run.load=%s: its compression ratio is %g", start.student, ratio)
    spec = with_known_channel(config.method, start.spec).spec
    stages = build_stages(
        config.stage,
        config.optim.lr_warmup_steps,
        start.state.loaded_cr,
        start.architecture.method_layers,
    )
    _check_data(config, start)
    _check_export(config, spec, start, stages)
    prepared = Prepared(
        config=config,
        architecture=start.architecture,
        spec=spec,
        start=start,
        stages=stages,
        folder=Path(config.run.dir),
        since=since,
    )
    teacher_logits.check(config, prepared.architecture, prepared.steps)
    return prepared


def _check_eviction_channel(config: RunConfig, start: StartPoint) -> None:
    """Refuse stages that do not fit the eviction channel the student starts with."""
    run, evicts = config.stage.run, start.state.eviction_enabled
    if evicts and {"zero_neuron", "pretrain"} & set(run):
        raise ConfigError(
            f"run.load={start.student}: its eviction channel is already in use; leave "
            "zero_neuron and pretrain out of stage.run"
        )
    loaded, retrofit = start.state.loaded_cr, config.stage.retrofit
    if "retrofit" in run and retrofit.start_cr is None and retrofit.target_cr < loaded:
        raise ConfigError(
            f"run.load={start.student}: its compression ratio {loaded:g} is above "
            f"stage.retrofit.target_cr={retrofit.target_cr:g}; anneal upwards"
        )
    if not evicts and "hold" in run and "retrofit" not in run:
        raise ConfigError("stage.run: hold needs a retrofitted student; give one as run.load")
    if not evicts and "retrofit" in run and "zero_neuron" not in run and launcher.rank() == 0:
        log.logger().warning(
            "retrofit without zero_neuron: the eviction channel is cleared at once"
        )


def _check_data(config: RunConfig, start: StartPoint) -> None:
    """Refuse another tokenizer or vocabulary, and data other than that of the first start."""
    sha256 = _tokenizer_hash(config, start)
    vocab_size = start.architecture.vocab_size
    check_files(
        config.data,
        vocab_size=vocab_size,
        tokenizer_sha256=sha256,
        validates=config.run.eval_samples > 0,
    )
    if config.data.packing:
        _check_packing(config)
    inputs.require_same_data(config.data.paths, start)


def _tokenizer_hash(config: RunConfig, start: StartPoint) -> str | None:
    """Return the hash of the model's `tokenizer.json`; warn if there is none."""
    directory, named = start.tokenizer_dir, config.model.tokenizer
    file = None if directory is None else directory / TOKENIZER_FILE
    if file is not None and file.is_file():
        return file_sha256(file)
    if named is not None:
        raise ConfigError(f"model.tokenizer={named}: no {TOKENIZER_FILE}; correct the path")
    if launcher.rank() == 0:
        log.logger().warning(
            "no tokenizer (%s): the data's tokenizer is not checked, and exports take and return "
            "token ids only",
            "model.tokenizer is not set" if directory is None else f"{file} does not exist",
        )
    return None


def _check_packing(config: RunConfig) -> None:
    """Refuse documents that are too short for evictions, and log how many are cut."""
    length, window = config.data.seq_length, config.method.window
    positions = [read_index(prefix).lengths - 1 for prefix in config.data.paths]
    longest = max(int(own.max()) for own in positions)
    if set(EVICTING_STAGES) & set(config.stage.run) and window >= longest:
        raise ConfigError(
            f"method.window={window}: the longest document of data.paths has {longest} positions, "
            "so with data.packing=true nothing could be evicted; use a smaller window or longer "
            "documents"
        )
    cut = sum(int((own > length).sum()) for own in positions)
    if cut and launcher.rank() == 0:
        log.logger().warning(
            "data.packing: %d of %d documents do not fit into data.seq_length=%d and are cut",
            *(cut, sum(map(len, positions)), length),
        )


def _check_export(
    config: RunConfig, spec: MethodSpec, start: StartPoint, stages: list[Stage | Action]
) -> None:
    """Refuse, before the training, an export that would be misread or replace other files."""
    if "export" not in config.stage.run:
        return
    options = config.stage.export
    target_cr = max(start.state.target_cr, config.stage.retrofit.target_cr)
    check_folder(Path(config.run.dir) / "exports", config.stage, target_cr)
    trained = [stage for stage in stages if isinstance(stage, Stage)]
    borrows = any(stage.requires_eviction or stage.enables_eviction for stage in trained)
    compresses = borrows or start.state.eviction_enabled
    check_evaluation(config, start, compresses=compresses)
    check_tasks(config, start)
    if compresses:
        params_dtype = config.parallel.params_dtype
        base = start.adapter_base
        check_format(options, spec, start.architecture, params_dtype, target_cr, base)
