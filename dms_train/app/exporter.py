"""Writes the engine's current model: a Megatron and a Hugging Face checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dms_train.app.weight_files import write_adapter, write_weights
from dms_train.export.card import EARLY_STOP
from dms_train.export.writer import check_replaceable, partial_directory, write_export
from dms_train.hf import durable, formats
from dms_train.hf.architecture import Architecture
from dms_train.hf.formats.peft import FORMAT as PEFT
from dms_train.hf.gguf_directory import read_gguf_record
from dms_train.hf.selftest import SelfTest
from dms_train.hf.tensor_values import dtype_name
from dms_train.mcore.checkpoints import state as checkpoint_state
from dms_train.mcore.engine import McoreEngine
from dms_train.method.accounting import cr_factor
from dms_train.method.base import MethodSpec
from dms_train.method.plan import StepPlan
from dms_train.observe.log import logger
from dms_train.training.options import ExportOptions, StageOptions

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INFERENCE_PLAN = StepPlan(channel_scale=0.0, eviction="hard")


def export_format(options: ExportOptions, spec: MethodSpec) -> str:
    """Return the format of an export; by default the one of the method's preset."""
    return options.format or formats.default_format(spec)


def export_dtype(options: ExportOptions, spec: MethodSpec | None, params_dtype: str) -> torch.dtype:
    """Return the dtype of exported weights: the interop format's, else the training dtype."""
    if options.dtype is None and spec is not None:
        required = formats.find_format(export_format(options, spec)).dtype
        if required is not None:
            return getattr(torch, required)
    return _DTYPES[options.dtype or params_dtype]


def check_format(
    options: ExportOptions,
    spec: MethodSpec,
    architecture: Architecture,
    params_dtype: str,
    target_cr: float,
    adapter_base: formats.AdapterBase | None,
) -> None:
    """Refuse an export that its consumer would misread, before any weights exist.

    Args:
        options: Format and dtype.
        spec: Specification of the training.
        architecture: The model.
        params_dtype: Precision of the training, `fp32` or `bf16`.
        target_cr: Compression ratio asked for in training.
        adapter_base: Base model, if adapters of it are all that was trained.

    Raises:
        ExportRefused: As `formats.check_export`.
    """
    model = formats.ExportedModel(
        architecture=architecture,
        spec=spec,
        dtype=dtype_name(export_dtype(options, spec, params_dtype)),
        target_cr=target_cr,
        block_size=options.paged_attention_block_size,
        adapter_base=adapter_base,
    )
    formats.check_export(export_format(options, spec), model)


def check_folder(exports: Path, stage: StageOptions, target_cr: float) -> None:
    """Refuse to replace a folder that is not an export of this project, before anything is written.

    Raises:
        FileExistsError: A folder that a run will write holds something else.
    """
    every = range(1, int(target_cr) + 1) if stage.export.every_integer_cr else ()
    ratios = {*every, *(stage.hold.branch_ratios or ())}
    for name in ("final", *(f"cr{ratio}" for ratio in ratios)):
        check_replaceable(exports / name / "hf")
        checkpoint_state.check_replaceable(exports / name / "megatron")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelExporter:
    """Writer of exports: `NAME/megatron`, except beside an adapter, and `NAME/hf` below `folder`.

    Attributes:
        tokens: int64 [T], the text of the self-test.
        source_dir: Model directory whose tokenizer files are carried over.
        params_dtype: Precision of the training, `fp32` or `bf16`.
        adapter_base: Base model, if adapters of it are all that was trained.
    """

    engine: McoreEngine
    options: ExportOptions
    folder: Path
    tokens: torch.Tensor
    source_dir: Path | None
    params_dtype: str
    provenance: dict[str, Any]
    adapter_base: formats.AdapterBase | None = None

    def export(self, name: str, state: dict[str, Any]) -> Path:
        """Write a checkpoint, except beside an adapter, and the export; every rank calls it."""
        path = self.folder / name
        if self.engine.view.rank == 0 and path.is_symlink():
            path.unlink()  # an alias of an earlier run; its target must stay unchanged
        dist.barrier()
        if self._base(state) is None:
            described = {**state, **self.provenance}
            self.engine.save_weights(path / "megatron", described)
        self.write_hf(path / "hf", state)
        return path

    def alias(self, name: str, target: str) -> None:
        """Make a relative link, so that the folder can be moved."""
        if self.engine.view.rank == 0:
            link = self.folder / name
            if link.is_dir() and not link.is_symlink():
                shutil.rmtree(link)  # an earlier export: `check_folder` refused anything else
            link.unlink(missing_ok=True)
            link.symlink_to(target, target_is_directory=True)
            durable.sync_folder(self.folder)
        dist.barrier()

    def write_hf(self, path: Path, state: dict[str, Any]) -> None:
        """Write the Hugging Face directory with its self-test; every rank calls it."""
        engine = self.engine
        compressed = bool(state["eviction_enabled"])
        spec = engine.spec if compressed else None
        dtype = export_dtype(self.options, spec, self.params_dtype)
        selftest, measured = self._selftest() if compressed else (None, None)
        base = self._base(state)

        def weights(directory: Path) -> None:
            if base is None:
                write_weights(engine, directory, dtype)
            else:
                write_adapter(engine, directory, base)

        if engine.view.rank == 0:
            advice = write_export(
                path,
                architecture=engine.architecture,
                spec=spec,
                cr_factor=measured,
                target_cr=float(state["target_cr"]),
                dtype=dtype,
                export_format=export_format(self.options, engine.spec),
                weights=weights,
                source_dir=self.source_dir,
                selftest=selftest,
                block_size=self.options.paged_attention_block_size,
                provenance=_provenance(state, self.provenance),
                adapter_base=base,
            )
            for line in advice:
                logger().warning(line)
        else:
            weights(partial_directory(path))
        dist.barrier()

    def _base(self, state: dict[str, Any]) -> formats.AdapterBase | None:
        """Return the base model of an export that is an adapter; None for another one."""
        is_adapter = export_format(self.options, self.engine.spec) == PEFT.name
        return self.adapter_base if is_adapter and state["eviction_enabled"] else None

    def _selftest(self) -> tuple[SelfTest | None, float | None]:
        recording = self.engine.record(INFERENCE_PLAN, self.tokens)
        if recording is None:
            return None, None
        hard = recording.decision_logits > 0
        selftest = SelfTest(
            input_ids=recording.input_ids,
            decision_logits=recording.decision_logits,
            logits=recording.logits,
            dtype="float32" if self.params_dtype == "fp32" else "bfloat16",
        )
        return selftest, cr_factor(hard, self.engine.spec)


def _provenance(state: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    kept = ("step", "consumed_samples", "target_cr", EARLY_STOP)
    return {**{key: state[key] for key in kept if state.get(key) is not None}, **run}


def run_provenance(
    architecture: Architecture, model: str | None, directory: Path | None
) -> dict[str, Any]:
    """Return what every checkpoint and export of a run records about its origin.

    Args:
        architecture: Of the base model.
        model: The base model, as the user named it.
        directory: Its directory.
    """
    converted = None if directory is None else read_gguf_record(directory)
    return {
        "architecture": asdict(architecture),
        "model": model,
        "versions": {name: _version(name) for name in ("dms-train", "megatron-core", "torch")},
        **({} if converted is None else {"gguf": converted}),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree
        return "not installed"
