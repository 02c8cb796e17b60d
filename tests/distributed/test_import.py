"""Ranks that share an import write the checkpoint of one process."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dms_train.app.conversion import import_model, open_engine
from dms_train.checkpoints_tools.hf_to_megatron import main
from dms_train.hf.config_json import to_hf_config
from dms_train.hf.directory import read_architecture
from dms_train.hf.experts import Experts
from dms_train.hf.json_files import write_json
from dms_train.hf.stored import stored_shapes
from dms_train.hf.weight_reader import WeightReader
from dms_train.hf.weight_writer import WeightWriter
from dms_train.mcore import groups
from dms_train.mcore.options import ParallelOptions
from dms_train.method.spec import PRESETS
from tests.support import tiny
from tests.support.ranks import values_of_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
PROCESSES = 2
# two MXFP4 blocks of inputs to `down_proj`, one for each rank
BLOCKS_OF_EXPERTS = Experts(count=4, topk=2, ffn_hidden_size=64, normalize=True)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("qwen2", {}),
    "tied_with_one_kv_head": ("llama", {"num_query_groups": 1}),
    "experts": ("qwen3_moe", {}),
    # files with joined projections, permuted channels, norms under other names
    "phi3": ("phi3", {}),
    "glm4": ("glm4", {}),
    "olmo3": ("olmo3", {}),
    "stacked_experts": ("gpt_oss", {}),
    "mxfp4": ("gpt_oss", {"experts": BLOCKS_OF_EXPERTS, "ffn_hidden_size": 64}),
}
SIZES = {name: (1, 2) if name == "tied_with_one_kv_head" else (2, 1) for name in MODELS}  # TP, PP

# Tensors that both ranks may hold: not divided, or the output layer of a tied model too.
ON_EACH = (
    *("norm.weight", "mlp.gate.weight", "embed_tokens.weight"),
    *("mlp.gate.bias", "o_proj.bias", "down_proj.bias"),
)


def write_model(folder: Path, name: str) -> None:
    """Random bf16 weights in several files."""
    family, changes = MODELS[name]
    architecture = tiny.architecture(family, **changes)
    folder.mkdir()
    write_json(folder / "config.json", to_hf_config(architecture))
    generator = torch.Generator().manual_seed(3)
    with WeightWriter(folder, 20_000) as writer:
        for tensor, shape in stored_shapes(architecture).items():
            if name == "mxfp4" and tensor.endswith(("gate_up_proj", "down_proj")):
                for suffix, values in random_mxfp4(shape, generator).items():
                    writer.add(tensor + suffix, values)
                continue
            writer.add(tensor, torch.randn(shape, generator=generator).bfloat16())


def random_mxfp4(shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    """Blocks and scales of experts [experts, inputs, rows]."""
    experts, inputs, rows = shape
    groups = experts, rows, inputs // 32
    blocks = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, groups, generator=generator, dtype=torch.uint8)
    return {"_blocks": blocks, "_scales": scales}


def stored_bytes(reader: WeightReader, model: str, name: str) -> int:
    """Bytes of a tensor in the files."""
    size = reader.get(name).nbytes
    if model == "mxfp4" and ".experts." in name and name.endswith("weight"):
        return size * 17 // 64  # a block of 32 numbers has 16 bytes and a scale
    return size


def import_counting(folder: Path) -> dict[str, int]:
    """Import all models with the command; return the bytes that this rank read of each."""
    read, inner = dict.fromkeys(MODELS, 0), WeightReader._read

    def count(reader: WeightReader, *arguments: Any) -> Tensor:
        tensor = inner(reader, *arguments)
        read[reader.directory.name] += tensor.nbytes
        return tensor

    WeightReader._read = count  # type: ignore[method-assign]
    # one launch has one process group
    leave, groups.stop = groups.stop, functools.partial(groups.stop, keep_process_group=True)
    for name in MODELS:
        assert main([str(folder / name), str(folder / f"{name}-shared")]) == 0
    leave()
    return read


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, int]]]:
    """All models, imported by one launch of ranks, and the bytes that each rank read."""
    folder = tmp_path_factory.mktemp("imports")
    for name in MODELS:
        write_model(folder / name, name)
    return folder, values_of_ranks(import_counting, PROCESSES, folder)


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
def test_ranks_read_their_parts_and_write_equal_weights(
    imported: tuple[Path, list[dict[str, int]]], tmp_path: Path, name: str
) -> None:
    folder, counts = imported
    model, alone, shared = folder / name, tmp_path / "alone", folder / f"{name}-shared"
    import_model(str(model), alone, dtype=None, revision=None, download=False)
    read = [sizes[name] for sizes in counts]

    reader, expected, got = WeightReader(model), loaded(model, alone), loaded(model, shared)
    assert got.keys() == expected.keys() == set(reader.names())
    for tensor, value in expected.items():
        assert torch.equal(got[tensor], value), tensor
        assert torch.equal(reader.get(tensor), value), tensor
    assert comparable(shared) == comparable(alone)
    tp, pp = SIZES[name]
    layout = json.loads((shared / "run_state.json").read_text())["layout"]
    assert layout == {"tp": tp, "pp": pp, "cp": 1, "dp": 1}

    sizes = {tensor: stored_bytes(reader, name, tensor) for tensor in reader.names()}
    on_each = sum(size for tensor, size in sizes.items() if tensor.endswith(ON_EACH))
    assert max(read) <= sum(sizes.values()) / 2 + on_each
    assert sum(read) >= sum(sizes.values())
