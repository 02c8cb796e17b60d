"""Ranks that share an import write the checkpoint of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dms_train.app.conversion import import_model, open_engine
from dms_train.checkpoints_tools.hf_to_megatron import main
from dms_train.hf.architecture import to_hf_config
from dms_train.hf.directory import WeightReader, WeightWriter, read_architecture
from dms_train.hf.json_files import write_json
from dms_train.hf.tensors import expected_shapes
from dms_train.mcore.options import ParallelOptions
from dms_train.method.spec import PRESETS
from tests.support import tiny
from tests.support.ranks import values_of_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
PROCESSES = 2
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "untied": ("qwen2", {}),
    "tied_with_one_kv_head": ("llama", {"num_query_groups": 1}),
    "experts": ("qwen3_moe", {}),
}
SIZES = {"untied": (2, 1), "tied_with_one_kv_head": (1, 2), "experts": (2, 1)}  # TP, PP

# Tensors that both ranks may hold: not divided, or the output layer of a tied model too.
ON_EACH = ("norm.weight", "mlp.gate.weight", "embed_tokens.weight")


def write_model(folder: Path, name: str) -> None:
    """Random bf16 weights in several files."""
    family, changes = MODELS[name]
    architecture = tiny.architecture(family, **changes)
    folder.mkdir()
    write_json(folder / "config.json", to_hf_config(architecture))
    generator = torch.Generator().manual_seed(3)
    with WeightWriter(folder, 20_000) as writer:
        for tensor, shape in expected_shapes(architecture).items():
            writer.add(tensor, torch.randn(shape, generator=generator).bfloat16())


def import_counting(model: Path, out: Path) -> list[int]:
    """Import a model with the command; return the bytes that this rank read."""
    read, inner = 0, WeightReader._read

    def count(reader: WeightReader, *arguments: Any) -> Tensor:
        nonlocal read
        tensor = inner(reader, *arguments)
        read += tensor.nbytes
        return tensor

    WeightReader._read = count  # type: ignore[method-assign]
    assert main([str(model), str(out)]) == 0
    return [read]


def loaded(model: Path, checkpoint: Path) -> dict[str, Tensor]:
    parallel, spec = ParallelOptions(params_dtype="bf16"), PRESETS["dms"].spec
    with open_engine(read_architecture(model), spec, parallel, None) as engine:
        engine.load(checkpoint, with_optimizer=False)
        return dict(engine.hf_tensors())


def comparable(checkpoint: Path) -> dict[str, Any]:
    """JSON state without what depends on the layout."""
    state = json.loads((checkpoint / "run_state.json").read_text())
    return {key: state[key] for key in state if key not in ("layout", "files", "checksum")}


@pytest.mark.parametrize("name", MODELS)
def test_ranks_read_their_parts_and_write_equal_weights(tmp_path: Path, name: str) -> None:
    model, alone, shared = tmp_path / name, tmp_path / "alone", tmp_path / "shared"
    write_model(model, name)
    import_model(str(model), alone, dtype=None, revision=None, download=False)
    read = [size for (size,) in values_of_ranks(import_counting, PROCESSES, model, shared)]

    reader, expected, got = WeightReader(model), loaded(model, alone), loaded(model, shared)
    assert got.keys() == expected.keys() == set(reader.names())
    for tensor, value in expected.items():
        assert torch.equal(got[tensor], value), tensor
        assert torch.equal(reader.get(tensor), value), tensor
    assert comparable(shared) == comparable(alone)
    tp, pp = SIZES[name]
    layout = json.loads((shared / "run_state.json").read_text())["layout"]
    assert layout == {"tp": tp, "pp": pp, "cp": 1, "dp": 1}

    sizes = {tensor: reader.get(tensor).nbytes for tensor in reader.names()}
    on_each = sum(size for tensor, size in sizes.items() if tensor.endswith(ON_EACH))
    assert max(read) <= sum(sizes.values()) / 2 + on_each
    assert sum(read) >= sum(sizes.values())
