"""All ranks write the weight files of an export, which do not depend on the layout."""

from __future__ import annotations

import errno
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dms_train import app
from dms_train.app import weight_files
from dms_train.app.exporter import ModelExporter
from dms_train.export.writer import partial_directory
from dms_train.hf.errors import HFError
from dms_train.hf.safetensors_files import INDEX_FILE
from dms_train.hf.tensors import expected_shapes
from dms_train.hf.weight_reader import WeightReader
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.spec import PRESETS
from dms_train.training.options import ExportOptions
from tests.support import tiny
from tests.support.matrix import combinations
from tests.support.ranks import run_ranks, values_of_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
PROCESSES = 4
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "tp2_dp2": {TP: 2},
    "pp2_dp2": {PP: 2},
    "tp2_pp2": {TP: 2, PP: 2},
    "tp4": {TP: 4},
    "vp2_dp2": {PP: 2, "virtual_pipeline_model_parallel_size": 2},
}
FAMILIES = ("qwen2", "llama")  # untied and tied
# the others are compared with dp4
CASES = sorted({*combinations(LAYOUTS, FAMILIES), ("dp4", "llama"), ("tp2_pp2", "qwen2")})
SHARD_BYTES = 12_000
STATE = {"eviction_enabled": False, "target_cr": 1.0}


def build(family: str, parallel: ParallelOptions, view: ParallelView) -> McoreEngine:
    architecture = tiny.architecture(family)
    options = TrainEngineOptions(
        parallel=parallel, optim=OptimOptions(lr=1e-3), seed=1, trains=False
    )
    source = RandomWeights(architecture, 7, 0.2)
    return McoreEngine(architecture, PRESETS["dms"], view, options, source)


def exporter(engine: McoreEngine, folder: Path) -> ModelExporter:
    return ModelExporter(
        engine=engine,
        options=ExportOptions(dtype="bf16"),
        folder=folder,
        tokens=torch.arange(8),
        source_dir=None,
        params_dtype="fp32",
        provenance={},
    )


def write_all(out: Path) -> dict[str, list[int]]:
    """Write every family in every layout; return the shards of this rank."""
    own = {}
    for layout, sizes in LAYOUTS.items():
        parallel = ParallelOptions(**sizes)
        view = groups.start(parallel, seed=1)
        for family in [family for name, family in CASES if name == layout]:
            engine = build(family, parallel, view)
            folder = out / f"{family}-{layout}"
            if view.rank == 0:
                folder.mkdir()
            weight_files.write_weights(engine, folder, torch.bfloat16, SHARD_BYTES)
            shards = engine.hf_shards(torch.bfloat16, SHARD_BYTES)
            own[folder.name] = [number for number, _ in shards]
            exporter(engine, out).write_hf(out / f"{folder.name}-whole", STATE)
        groups.stop(keep_process_group=True)
    groups.stop()
    return own


def export(out: Path, fault: str) -> str | None:
    """Write one export of several shards with a fault; return what was refused."""
    parallel = ParallelOptions(**LAYOUTS["tp2_pp2"])
    view = groups.start(parallel, seed=1)
    engine = build("qwen2", parallel, view)
    app.exporter.write_weights = partial(weight_files.write_weights, shard_bytes=SHARD_BYTES)
    if fault == "nan" and view.is_last_stage:
        engine._models[0].decoder.final_layernorm.weight.data[3] = torch.nan
    elif fault in _FAULTS and view.rank == PROCESSES - 1:
        weight_files.write_shard = _FAULTS[fault]
    message = None
    try:
        exporter(engine, out.parent).write_hf(out, STATE)
    except (HFError, OSError) as error:
        message = str(error)
    groups.stop()
    return message


def _full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "shard")


def _killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_FAULTS = {"full": _full, "killed": _killed}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[int]]]]:
    out = tmp_path_factory.mktemp("written")
    return out, values_of_ranks(write_all, PROCESSES, out)


def truth(family: str) -> dict[str, Tensor]:
    architecture = tiny.architecture(family)
    source = RandomWeights(architecture, 7, 0.2)
    return {name: source.get(name).bfloat16() for name in expected_shapes(architecture)}


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_every_layout_writes_the_same_files(
    written: tuple[Path, Any], family: str, layout: str
) -> None:
    folder, first = written[0] / f"{family}-{layout}", written[0] / f"{family}-dp4"
    names = sorted(file.name for file in folder.iterdir())
    assert names == sorted(file.name for file in first.iterdir())
    assert INDEX_FILE in names
    assert all((folder / name).read_bytes() == (first / name).read_bytes() for name in names)
    reader, expected = WeightReader(folder), truth(family)
    assert reader.require(tiny.architecture(family)) is None
    assert reader.names() == sorted(expected)
    assert all(torch.equal(reader.get(name), tensor) for name, tensor in expected.items())
    sizes = [sum(t.nbytes for t in load_file(file).values()) for file in reader.files]
    assert max(sizes) <= SHARD_BYTES


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_all_ranks_write(written: tuple[Path, Any], family: str, layout: str) -> None:
    own = [rank[f"{family}-{layout}"] for rank in written[1]]
    count = len(WeightReader(written[0] / f"{family}-{layout}").files)
    assert sorted(number for numbers in own for number in numbers) == list(range(count))
    assert all(own)


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_a_small_export_is_one_file(written: tuple[Path, Any], family: str, layout: str) -> None:
    reader = WeightReader(written[0] / f"{family}-{layout}-whole")
    (file,) = reader.files
    stored, expected = load_file(file), truth(family)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("fault", "message"),
    [("full", "No space left on device: 'shard'"), ("nan", "model.norm.weight: holds NaN")],
)
def test_a_refusal_of_one_rank_reaches_all_and_leaves_nothing(
    tmp_path: Path, fault: str, message: str
) -> None:
    refusals = values_of_ranks(export, PROCESSES, tmp_path / "hf", fault)
    assert all(message in refusal for refusal in refusals)
    assert len(set(refusals)) == 1
    assert not list(tmp_path.iterdir())


def test_a_killed_rank_leaves_no_export_and_the_next_run_writes_it(tmp_path: Path) -> None:
    out = tmp_path / "hf"
    assert run_ranks(export, PROCESSES, out, "killed").returncode == 128 + signal.SIGKILL
    left = partial_directory(out)  # rank 0 removes it, unless it was stopped before
    assert list(tmp_path.iterdir()) in ([], [left])
    with pytest.raises(FileNotFoundError):
        WeightReader(left)
    assert values_of_ranks(export, PROCESSES, out, "none") == [None] * PROCESSES
    assert list(tmp_path.iterdir()) == [out]
    reader = WeightReader(out)
    assert all(torch.equal(reader.get(name), tensor) for name, tensor in truth("qwen2").items())
