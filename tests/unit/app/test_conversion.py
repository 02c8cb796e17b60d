"""Imports choose a dtype by that of their source, say what they round, and need no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dms_train.app.conversion import (
    export_checkpoint,
    import_layout,
    import_model,
    open_engine,
)
from dms_train.checkpoints_tools.hf_to_megatron import main
from dms_train.export.writer import write_export
from dms_train.hf.config_json import to_hf_config
from dms_train.hf.directory import read_architecture
from dms_train.hf.formats import read_provenance
from dms_train.hf.json_files import write_json
from dms_train.hf.safetensors_files import SINGLE_FILE
from dms_train.hf.tensors import expected_shapes
from dms_train.hf.weight_reader import WeightReader
from dms_train.launch import stage
from dms_train.mcore.errors import ModelError
from dms_train.mcore.options import ParallelOptions
from dms_train.method.spec import PRESETS
from dms_train.training.options import ExportOptions
from tests.support import configs, piece_tokenizer, tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Directory of a tiny Qwen2, every weight random."""
    architecture, folder = tiny.architecture("qwen2"), tmp_path / "model"
    folder.mkdir()
    write_json(folder / "config.json", to_hf_config(architecture))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator)
        for name, shape in expected_shapes(architecture).items()
    }
    save_file(weights, folder / SINGLE_FILE, {"format": "pt"})
    return folder


def store(model: Path, dtype: torch.dtype, *, wide: str = "") -> dict[str, Tensor]:
    """Store the weights in `dtype`, and those whose name contains `wide` in float32."""
    weights = load_file(model / SINGLE_FILE)
    stored = {n: t if wide and wide in n else t.to(dtype) for n, t in weights.items()}
    save_file(stored, model / SINGLE_FILE, {"format": "pt"})
    return stored


def imported(model: Path, checkpoint: Path, dtype: str) -> dict[str, Tensor]:
    parallel = ParallelOptions(params_dtype=dtype)
    with open_engine(read_architecture(model), PRESETS["dms"].spec, parallel, None) as engine:
        engine.load(checkpoint, with_optimizer=False)
        return dict(engine.hf_tensors())


@pytest.mark.parametrize(
    ("stored", "wide", "written"),
    [
        (torch.float32, "", "fp32"),
        (torch.bfloat16, "", "bf16"),
        (torch.float16, "", "bf16"),
        (torch.bfloat16, "norm", "bf16"),
        (torch.bfloat16, "down_proj", "fp32"),
    ],
)
def test_a_checkpoint_is_as_wide_as_the_matrices_of_its_source(
    model: Path, stored: torch.dtype, wide: str, written: str
) -> None:
    weights = store(model, stored, wide=wide)
    out = model.parent / "checkpoint"
    options = {"revision": None, "download": False}
    assert import_model(str(model), out, dtype=None, **options) == written
    rounded = torch.float32 if written == "fp32" else torch.bfloat16
    for dtype in ("fp32", "bf16"):  # of the training that loads it
        got = imported(model, out, dtype)
        assert got.keys() == weights.keys()
        for name, tensor in weights.items():
            assert torch.equal(got[name], tensor.to(rounded).to(got[name].dtype)), name


@pytest.mark.parametrize(
    ("stored", "dtype", "rounds"),
    [
        (torch.float16, None, True),
        (torch.float16, "fp32", False),
        (torch.bfloat16, None, False),
    ],
)
def test_rounded_weights_are_announced(
    model: Path,
    stored: torch.dtype,
    dtype: str | None,
    rounds: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store(model, stored)
    with caplog.at_level("WARNING"):
        import_model(str(model), model.parent / "out", dtype=dtype, revision=None, download=False)
    assert ("float16 weights are rounded to bf16" in caplog.text) == rounds


def test_an_export_keeps_its_origin_through_a_checkpoint(model: Path, tmp_path: Path) -> None:
    """Weights, tokenizer and record, although the original model is gone."""
    base = tmp_path / "Base-1B"
    model.rename(base)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    tokenizer = piece_tokenizer.write_tokenizer(tmp_path / "tokenizer")
    origin = {"source": "books", "license": "CC0", "model": None, "sha256": "a" * 64, "share": 1.0}
    recorded = {"model": str(base), "gguf": {"file": "x"}, "step": 12, "training_data": [[origin]]}
    first, second = tmp_path / "first", tmp_path / "second"
    write_export(
        first,
        architecture=read_architecture(base),
        spec=PRESETS["dms"].override(window=5).spec,
        cr_factor=2.0,
        target_cr=3.0,
        dtype=torch.bfloat16,
        export_format="dms",
        weights=load_file(base / SINGLE_FILE).items(),
        source_dir=tokenizer,
        selftest=None,
        provenance=recorded,
    )
    options = {"revision": None, "download": False}
    import_model(str(first), tmp_path / "checkpoint", dtype=None, **options)
    export_checkpoint(
        tmp_path / "checkpoint",
        second,
        ExportOptions(dtype="bf16"),
        tokenizer_from=None,
        selftest_tokens=20,
    )
    for name in (SINGLE_FILE, "tokenizer.json"):
        assert (second / name).read_bytes() == (first / name).read_bytes()
    assert read_provenance(second).items() >= recorded.items()
    before, after = ((folder / "README.md").read_text() for folder in (first, second))
    measured = "on the text of the self-test"
    changed = set(before.splitlines()) ^ set(after.splitlines())
    assert all(measured in line for line in changed)
    assert "license: apache-2.0" in after
    assert "| training step | 12 |" in after


def test_the_command_names_the_dtype_and_asks_for_no_gpu(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    store(model, torch.bfloat16)
    out = model.parent / "checkpoint"
    assert main([str(model), str(out)]) == 0
    assert capsys.readouterr().out == f"{model}: weights written as bf16\nwrote {out}\n"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_the_job_of_a_chain_asks_for_no_gpu(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    store(model, torch.bfloat16)
    stage.import_model(configs.config(model__path=str(model), run__dir=str(tmp_path / "run")))
    assert (tmp_path / "run" / "start" / "run_state.json").is_file()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_one_shard_at_a_time_takes_memory(model: Path) -> None:
    architecture = read_architecture(model)
    source, parallel = WeightReader(model), ParallelOptions()
    with open_engine(architecture, PRESETS["dms"].spec, parallel, source) as engine:
        shards: list[dict[str, Tensor]] = []
        for _, tensors in engine.hf_shards(torch.float32, 4096):
            assert tensors
            assert not any(shards)
            shards.append(tensors)
    assert len(shards) > 2


@pytest.mark.parametrize(
    ("family", "ranks", "changes", "sizes"),
    [
        ("qwen2", 1, {}, (1, 1)),
        ("qwen2", 8, {}, (4, 2)),
        ("qwen2", 4, {"num_query_groups": 1}, (1, 4)),
        ("qwen2", 6, {"num_layers": 12}, (2, 3)),
        ("qwen3_moe", 4, {}, (4, 1)),
    ],
)
def test_ranks_of_an_import_divide_the_heads_and_then_the_layers(
    family: str, ranks: int, changes: dict[str, int], sizes: tuple[int, int]
) -> None:
    layout = import_layout(tiny.architecture(family, **changes), ranks, "bf16")
    assert (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size) == sizes
    assert layout.params_dtype == "bf16"


def test_ranks_that_divide_nothing_are_refused() -> None:
    with pytest.raises(ModelError, match=r"^12 ranks: 4 .* leave 3 .* 4 layers; start 4 ranks$"):
        import_layout(tiny.architecture("qwen2"), 12, "fp32")
