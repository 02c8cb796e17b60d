"""Conversion between Hugging Face directories and Megatron checkpoints.

Several ranks may share an import; an export takes one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import gcd
from pathlib import Path
from typing import Any

import torch

from dms_train.app import launcher
from dms_train.app.exporter import ModelExporter, check_format, run_provenance
from dms_train.app.frozen_base import stored_base
from dms_train.app.start_point import described_model
from dms_train.export.card import EARLY_STOP, TRAINING_DATA
from dms_train.export.writer import check_replaceable
from dms_train.hf import formats
from dms_train.hf.architecture import Architecture
from dms_train.hf.directory import read_architecture, resolve
from dms_train.hf.typed import typed
from dms_train.hf.weight_reader import WeightReader
from dms_train.mcore import groups
from dms_train.mcore.checkpoints import reading as checkpoint
from dms_train.mcore.checkpoints.state import ADAPTERS
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.errors import ModelError
from dms_train.mcore.model.weights import WeightSource
from dms_train.mcore.options import (
    ALL_WEIGHTS,
    VOCABULARY_MULTIPLE,
    OptimOptions,
    ParallelOptions,
    Trainable,
)
from dms_train.method.base import MethodSpec
from dms_train.method.spec import DEFAULT_METHOD, PRESETS, options_from
from dms_train.observe.log import logger
from dms_train.training.options import ExportOptions
from dms_train.training.state import TrainState

_SELFTEST_TOKENS = 128  # beyond the window, so that evictions show
_IMPORTED_FROM = "imported_from"
# What an export says of its origin, and of the end of its training; an import keeps both.
_ORIGIN = ("model", "gguf", TRAINING_DATA)
_POSITION = ("step", "consumed_samples", EARLY_STOP)


@contextmanager
def open_engine(
    architecture: Architecture,
    spec: MethodSpec,
    parallel: ParallelOptions,
    source: WeightSource | None,
    trainable: Trainable = ALL_WEIGHTS,
) -> Iterator[McoreEngine]:
    """Yield an engine without optimizer; the parallel groups exist inside the block.

    Args:
        architecture: Architecture of the model.
        spec: Constants of the method.
        parallel: Layout and dtype.
        source: Initial weights; None when they are loaded inside the block.
        trainable: Adapters of the checkpoint that is loaded inside the block.
    """
    view = groups.start(parallel, seed=0)
    try:
        options = TrainEngineOptions(
            parallel=parallel, optim=OptimOptions(lr=0.0), seed=0, trains=False, trainable=trainable
        )
        yield McoreEngine(architecture, options_from(spec), view, options, source)
    finally:
        groups.stop()


def import_layout(architecture: Architecture, ranks: int, dtype: str) -> ParallelOptions:
    """Divide the weights of a model among all ranks of an import, as evenly as possible.

    The tensor-parallel size is the largest possible, because it divides every matrix.

    Args:
        architecture: Architecture of the model.
        ranks: Number of processes.
        dtype: `fp32` or `bf16`.

    Raises:
        ModelError: The other factor of `ranks`, the pipeline, does not divide the layers.
    """
    a = architecture
    experts = []
    if a.experts is not None:
        experts = [a.experts.ffn_hidden_size, a.experts.shared_ffn_hidden_size]
    key_heads = [] if a.linear is None else [a.linear.key_heads]
    sizes = (a.num_query_groups, a.ffn_hidden_size, VOCABULARY_MULTIPLE, *experts, *key_heads)
    tp = gcd(ranks, *sizes)
    if a.num_layers % (ranks // tp):
        possible = tp * gcd(a.num_layers, ranks // tp)
        raise ModelError(
            f"{ranks} ranks: {tp} tensor-parallel ranks leave {ranks // tp} pipeline stages, which "
            f"do not divide {a.num_layers} layers; start {possible} ranks"
        )
    return ParallelOptions(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=ranks // tp,
        sequence_parallel=tp > 1,
        params_dtype=dtype,
    )


@typed
def import_model(
    model: str, out: Path, *, dtype: str | None, revision: str | None, download: bool
) -> str:
    """Write a Hugging Face model, dense or a retrofitted export, as a Megatron checkpoint.

    Every rank of the launch reads, holds and writes its own part of the weights.

    Args:
        model: Directory, GGUF file or hub id.
        out: Folder to write; must not exist.
        dtype: `fp32` or `bf16`; None takes `WeightReader.training_dtype`.
        revision: Hub revision; ignored for directories.
        download: True if the hub may be accessed over the network.

    Returns:
        The dtype that was written.

    Raises:
        FileExistsError: `out` exists.
        ValueError: The model is absent, damaged or not supported, or the ranks cannot divide it.
    """
    if out.exists():
        raise FileExistsError(17, "exists; choose another folder", str(out))
    directory = resolve(model, revision=revision, local_files_only=not download)
    architecture = read_architecture(directory)
    spec = formats.read_spec(directory)
    recorded = {} if spec is None else formats.read_provenance(directory)
    state = TrainState(
        eviction_enabled=spec is not None,
        target_cr=formats.read_target_cr(directory),
        **{key: recorded[key] for key in _POSITION if key in recorded},
    )
    source = WeightReader(directory)
    leftovers = source.require(architecture)
    reports = launcher.rank() == 0
    if leftovers is not None and reports:
        logger().warning(leftovers)
    dtype = dtype or source.training_dtype()
    if dtype == "bf16" and source.has_float16() and reports:
        logger().warning("float16 weights are rounded to bf16; --dtype fp32 keeps every value")
    parallel = import_layout(architecture, launcher.world_size(), dtype)
    spec = spec or PRESETS[DEFAULT_METHOD].spec
    with open_engine(architecture, spec, parallel, source) as engine:
        origin = {
            **run_provenance(architecture, model, directory),
            **{key: recorded[key] for key in _ORIGIN if key in recorded},
            _IMPORTED_FROM: str(directory.resolve()),
        }
        engine.save_weights(out, {**state.to_dict(), **origin})
    return dtype


@typed
def export_checkpoint(
    path: Path,
    out: Path,
    options: ExportOptions,
    *,
    tokenizer_from: str | None,
    selftest_tokens: int | None,
) -> None:
    """Write a Megatron checkpoint of any layout as a Hugging Face directory.

    Args:
        path: The checkpoint, a folder with run_state.json.
        out: Directory to write; replaces an earlier export only.
        options: Format and dtype; `options.dtype` must be set.
        tokenizer_from: Model directory or hub id whose tokenizer files are carried over; None
            takes the imported directory or the model the run started from, if it still exists.
        selftest_tokens: Length of the self-test; None takes the window and 128 more.

    Raises:
        CheckpointError: The checkpoint is damaged or does not describe its model.
        FileExistsError: `out` exists and is not an export.
        ExportRefused: The format's consumer would misread the model.
    """
    state = checkpoint.check(path)
    architecture, spec = described_model(path, state)
    check_replaceable(out)
    tokenizer = _tokenizer_dir(tokenizer_from, state)
    dtype = options.dtype or "fp32"
    trainable = Trainable.of(state.get(ADAPTERS))
    base = stored_base(state)
    if state["eviction_enabled"]:
        check_format(options, spec, architecture, dtype, float(state["target_cr"]), base)
    parallel = ParallelOptions(params_dtype=dtype)
    with open_engine(architecture, spec, parallel, None, trainable) as engine:
        engine.load(path, with_optimizer=False)
        exporter = ModelExporter(
            engine=engine,
            options=options,
            folder=out.parent,
            tokens=_random_tokens(engine, selftest_tokens),
            source_dir=tokenizer,
            params_dtype=dtype,
            provenance={key: state[key] for key in (*_ORIGIN, "versions") if key in state},
            adapter_base=base,
        )
        exporter.write_hf(out, state)


def _random_tokens(engine: McoreEngine, wanted: int | None) -> torch.Tensor:
    """Return random ids that cover every embedding row; a checkpoint alone has no text."""
    longest = engine.architecture.max_position_embeddings
    length = min(wanted or engine.spec.window + _SELFTEST_TOKENS, longest)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, engine.architecture.vocab_size, (length,), generator=generator)


def _tokenizer_dir(wanted: str | None, state: Mapping[str, Any]) -> Path | None:
    if wanted is not None:
        return resolve(wanted)
    for model in (state.get(_IMPORTED_FROM), state.get("model")):
        if model is not None and Path(model).exists():
            return resolve(model)
    return None
