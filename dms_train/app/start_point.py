"""Start of a run: the original model, and possibly a further trained student."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dms_train.app import launcher
from dms_train.app.frozen_base import frozen_base, stored_base
from dms_train.config.build import ConfigError, build_dataclass
from dms_train.config.schema import RunConfig
from dms_train.hf import formats
from dms_train.hf.architecture import Architecture
from dms_train.hf.directory import read_architecture, resolve
from dms_train.hf.formats import AdapterBase
from dms_train.hf.weight_reader import WeightReader
from dms_train.limits import AUTO
from dms_train.mcore.checkpoints import reading as checkpoint
from dms_train.mcore.checkpoints.state import STATE_FILE, require_adapters
from dms_train.mcore.engine import McoreEngine
from dms_train.mcore.errors import CheckpointError
from dms_train.mcore.options import Trainable
from dms_train.method.base import MethodOptions, MethodSpec
from dms_train.method.spec import NewerSpecError, spec_from_dict
from dms_train.observe import log
from dms_train.training.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """Start of a run: its models and its position.

    Attributes:
        architecture: Architecture of student and teacher.
        model_dir: Original Hugging Face weights; None when training from scratch.
        tokenizer_dir: Folder of the tokenizer files; None if unknown.
        student: Checkpoint folder or export the student continues from; None for the original.
        spec: Constants that the student was trained with, also for a checkpoint of this run; None
            for the original and for a student without an eviction channel.
        state: Position of the run.
        resumes: True if `student` is a checkpoint of this run, with optimizer state.
        adapter_base: Base model, if adapters train and the frozen weights are its own.
    """

    architecture: Architecture
    model_dir: Path | None
    tokenizer_dir: Path | None
    student: Path | None = None
    spec: MethodSpec | None = None
    state: TrainState
    resumes: bool = False
    adapter_base: AdapterBase | None = None

    def require(self, spec: MethodSpec) -> None:
        """Refuse to continue a student with other constants than it was trained with."""
        if self.spec is None:
            return
        ours, theirs = spec.to_dict(), self.spec.to_dict()
        if spec.kind != self.spec.kind:
            raise ConfigError(
                f"run.load={self.student}: it was trained with method={self.spec.preset}; add that"
            )
        differing = [key for key in spec.inference_fields if ours[key] != theirs[key]]
        if differing:
            wanted = " ".join(f"method.{key}={as_override(theirs[key])}" for key in differing)
            raise ConfigError(
                f"run.load={self.student}: it was trained with other constants; add {wanted}"
            )


def with_known_channel(method: MethodOptions, trained: MethodSpec | None) -> MethodOptions:
    """Replace the channel `auto` by that of the student, if it has one."""
    if method.channel != AUTO or trained is None:
        return method
    return method.override(channel=trained.channel)


def as_override(value: Any) -> str:
    """Format a value as an override writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def find_start(config: RunConfig) -> StartPoint:
    """Check the original model without loading weights."""
    model = config.model
    if model.path is None:
        if model.architecture is None:
            raise ConfigError("model: give model.path, or model.architecture to train from scratch")
        tokenizer = None if model.tokenizer is None else Path(model.tokenizer)
        return StartPoint(
            architecture=model.with_context(model.architecture),
            model_dir=None,
            tokenizer_dir=tokenizer,
            state=TrainState(),
        )
    if model.tokenizer is not None:
        raise ConfigError(
            f"model.tokenizer={model.tokenizer}: the tokenizer is that of model.path; leave it out"
        )
    start = _original(
        resolve(model.path, revision=model.revision, local_files_only=model.local_files_only)
    )
    return replace(
        start,
        architecture=model.with_context(start.architecture),
        adapter_base=frozen_base(config.trainable, model.path, model.revision),
    )


def _original(directory: Path) -> StartPoint:
    spec = formats.read_spec(directory)
    if spec is not None:
        raise ConfigError(
            f"model.path={directory}: this is a {spec.label} export; give the original model as "
            "model.path (it is the teacher) and this folder as run.load"
        )
    return StartPoint(
        architecture=_whole_model(directory),
        model_dir=directory,
        tokenizer_dir=directory,
        state=TrainState(),
    )


def _whole_model(directory: Path) -> Architecture:
    """Refuse missing, truncated and unsuitable weights before any process group exists."""
    architecture = read_architecture(directory)
    leftovers = WeightReader(directory).require(architecture)
    if leftovers is not None and launcher.rank() == 0:
        log.logger().warning(leftovers)
    return architecture


def with_student(start: StartPoint, student: Path, trainable: Trainable) -> StartPoint:
    """Replace the weights of `start` by those of `run.load`.

    A run folder stands for its newest whole checkpoint.

    Args:
        start: Start of the run without a student.
        student: Run folder, checkpoint folder or Hugging Face directory.
        trainable: Weights that the run trains; a checkpoint must have its adapters.

    Raises:
        ConfigError: There is no model of this architecture, or its retrofit was not finished.
        CheckpointError: The checkpoint was not written by this program, is damaged, or has other
            adapters.
    """
    if (student / "checkpoints").is_dir():
        student = _newest_checkpoint(student)
    if (student / STATE_FILE).is_file():
        stored = checkpoint.check(student)
        require_adapters(student, stored, trainable)
        position = TrainState.from_dict(stored)
        _require_whole_eviction_channel(student, position)
        architecture, trained = described_model(student, stored)
        spec = trained if position.eviction_enabled else None
        ratio, base = float(position.target_cr), stored_base(stored)
    elif (student / "config.json").is_file():
        architecture, spec = _whole_model(student), formats.read_spec(student)
        ratio, base = formats.read_target_cr(student), None  # the original is not recorded
    else:
        raise ConfigError(
            f"run.load={student}: neither a checkpoint folder ({STATE_FILE}) nor a "
            "Hugging Face directory (config.json); correct the path"
        )
    context = start.architecture.max_position_embeddings  # of this run, not of the student
    architecture = replace(architecture, max_position_embeddings=context)
    if asdict(architecture) != asdict(start.architecture):
        raise ConfigError(f"run.load={student}: its architecture is not that of model.path")
    state = TrainState(eviction_enabled=spec is not None, loaded_cr=ratio, target_cr=ratio)
    return replace(start, student=student, spec=spec, state=state, adapter_base=base)


def _newest_checkpoint(run: Path) -> Path:
    newest, passed = checkpoint.newest(run / "checkpoints")
    if newest is None:
        why = f" ({passed[0].rpartition('; ')[0]})" if passed else ""
        raise ConfigError(f"run.load={run}: this run has no whole checkpoint{why}; load another")
    return newest


def described_model(path: Path, state: dict[str, Any]) -> tuple[Architecture, MethodSpec]:
    """Return the model that a checkpoint's state describes; CheckpointError if there is none."""
    try:
        architecture = build_dataclass(Architecture, state["architecture"], "architecture")
        return architecture, spec_from_dict(state["spec"])
    except NewerSpecError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path}: {STATE_FILE} does not describe its model ({error}); "
            "use another checkpoint"
        ) from error


def _require_whole_eviction_channel(student: Path, position: TrainState) -> None:
    scale = position.channel_scale
    if not position.eviction_enabled and scale != 1.0:
        raise ConfigError(
            f"run.load={student}: its eviction channel was being zeroed (factor {scale:.3f}); "
            "finish that run, or load a checkpoint from the end of a stage"
        )


def load_start(engine: McoreEngine, start: StartPoint) -> None:
    """Load the student's weights, and the optimizer's state when the run resumes.

    The checksums of a checkpoint were compared before (`run_folder.verified`).
    """
    if start.student is None:
        return
    if (start.student / STATE_FILE).is_file():
        engine.load(start.student, with_optimizer=start.resumes, verified=True)
    else:
        engine.load_hf(WeightReader(start.student))
