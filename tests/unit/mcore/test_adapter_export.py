"""Exports in PEFT's format: base and adapter together are the merged export."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dms_train.app.conversion import export_checkpoint
from dms_train.app.exporter import ModelExporter, check_format
from dms_train.app.frozen_base import described_base, frozen_base, stored_base
from dms_train.app.start_point import find_start, with_student
from dms_train.app.verification import verify
from dms_train.cli.config_source import compose
from dms_train.export.writer import write_export
from dms_train.families import LayerAttention
from dms_train.hf import formats
from dms_train.hf.architecture import Architecture
from dms_train.hf.errors import HFError
from dms_train.hf.formats import AdapterBase
from dms_train.hf.json_files import read_json, write_json
from dms_train.hf.tensor_values import dtype_name
from dms_train.hf.tensors import expected_shapes
from dms_train.hf.weight_reader import WeightReader
from dms_train.inference.models.loader import load_model
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers import adapters
from dms_train.mcore.options import (
    ALL_WEIGHTS,
    LoraOptions,
    OptimOptions,
    ParallelOptions,
    Trainable,
)
from dms_train.method.spec import PRESETS
from dms_train.planning.trained import peft_parameters
from dms_train.training.options import ExportOptions
from dms_train.training.state import TrainState
from tests.support import launch, tiny
from tests.unit.export.test_transformers_versions import path_of

GUIDE = launch.ROOT / "docs" / "guides" / "load_export.md"

METHOD = PRESETS["dms"].override(window=4, alpha_offset=0.5)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FULL = LayerAttention(rotary_base=1e4)
# biases; q/k norms; one layer with a window, which has no eviction channel
CASES = {
    "biases": ("qwen2", {}, "lora", ("q", "k", "v", "o"), "fp32"),
    "norms in bf16": ("qwen3", {}, "lora", ("q", "v"), "bf16"),
    "output alone, a window": (
        "qwen2",
        {"layers": (FULL, LayerAttention(rotary_base=1e4, window=7))},
        "lora",
        ("o",),
        "fp32",
    ),
    "channel alone": ("qwen2", {}, "channel", (), "bf16"),
}
LOAD = """
import sys
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils import is_peft_available

result, *folders = sys.argv[1:]
assert is_peft_available()
found = {"version": transformers.__version__}
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        found[folder] = type(model).__name__, model(torch.arange(1, 31)[None]).logits
torch.save(found, result)
"""


class Exports:
    """A base model, and an engine with random adapters of it."""

    def __init__(self, folder: Path, view: ParallelView, case: str) -> None:
        family, sizes, train, targets, self.dtype = CASES[case]
        self.folder = folder
        self.architecture = tiny.architecture(family, num_layers=2, **sizes)
        source = tiny.SmallEvictionChannels(self.architecture, 1, METHOD.channel)
        self.base = self.dense("base", source.get)
        lora = LoraOptions(rank=2, alpha=3.0, targets=targets or ("q",))
        self.trainable = Trainable(weights=train, lora=lora)
        self.engine = self.new_engine(view, self.dtype, WeightReader(self.base))
        generator = torch.Generator().manual_seed(3)
        for name, parameter in self.engine._models[0].named_parameters():
            if adapters.is_adapter(name):
                values = 0.2 * torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(values * (0.1 if "channel" in name else 1.0))

    def new_engine(
        self, view: ParallelView, dtype: str, source: WeightReader | None
    ) -> McoreEngine:
        options = TrainEngineOptions(
            parallel=ParallelOptions(params_dtype=dtype),
            optim=OptimOptions(lr=0.0),
            seed=7,
            trains=False,
            trainable=self.trainable,
        )
        return McoreEngine(self.architecture, METHOD, view, options, source)

    def dense(self, name: str, get: Callable[[str], Tensor]) -> Path:
        """Write a dense model in float32 whose numbers the training's dtype may not hold."""
        write_export(
            self.folder / name,
            architecture=self.architecture,
            spec=None,
            cr_factor=None,
            target_cr=1.0,
            dtype=torch.float32,
            export_format="dms",
            weights=[(n, get(n)) for n in expected_shapes(self.architecture)],
            source_dir=None,
            selftest=None,
            provenance={},
        )
        return self.folder / name

    def write(self, name: str, base: AdapterBase | None = None) -> Path:
        exporter = ModelExporter(
            engine=self.engine,
            options=ExportOptions(format=name),
            folder=self.folder,
            tokens=tiny.batch(0).tokens[0],
            source_dir=None,
            params_dtype=self.dtype,
            provenance={"model": str(self.base)},
            adapter_base=base or AdapterBase(str(self.base)),
        )
        exporter.write_hf(self.folder / name, {"eviction_enabled": True, "target_cr": 4.0})
        return self.folder / name


@pytest.fixture(params=CASES)
def exports(request: Any, tmp_path: Path, view: ParallelView) -> Exports:
    return Exports(tmp_path, view, request.param)


def close(found: Tensor, expected: Tensor) -> bool:
    """One rounding to bfloat16, or the rounding of a sum in float32."""
    relative = 2.0**-8 if expected.dtype == torch.bfloat16 else 1e-6
    error = (found.double() - expected.double()).abs()
    return bool((error <= relative * expected.double().abs() + 1e-6).all())


def test_base_and_adapter_are_the_merged_export(exports: Exports) -> None:
    merged, adapter = exports.write("dms"), exports.write("peft")
    whole, read = WeightReader(merged), WeightReader(adapter)
    dtype = DTYPES[exports.dtype]
    differing = []
    for name in whole.names():
        expected, found = whole.get(name), read.get(name)
        if not torch.equal(found.to(dtype), expected):
            differing.append(name)
        assert close(found.to(dtype), expected), name
        assert torch.equal(read.part(name, 0, 1, 3), found[1:3])
    assert all(".self_attn." in name for name in differing)
    stated: Any = [formats.read_stated(path) for path in (adapter, merged)]
    assert [name for name, _ in stated] == ["peft", "dms"]
    assert stated[0][1] == stated[1][1]
    assert not (adapter / "model.safetensors").exists()
    stored = load_file(adapter / "adapter/adapter_model.safetensors")
    size = sum(t.numel() for name, t in stored.items() if not name.endswith("bias"))
    assert size == peft_parameters(exports.architecture, exports.trainable, METHOD.spec)
    # the engine loads both, and computes the same
    ours, theirs = (load_model(path).decoder.state_dict() for path in (adapter, merged))
    assert all(close(ours[name], theirs[name]) for name in theirs)
    # the code for transformers merges in the same way; the self-test is that of the training
    assert verify(adapter).passed
    replayed = [verify(path, dtype=dtype_name(dtype)) for path in (adapter, merged)]
    assert replayed[0].passed
    assert replayed[0].kl_per_token <= replayed[1].kl_per_token + 1e-6


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT reads it
def test_peft_computes_the_merged_export(exports: Exports) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed")
    from transformers import AutoModelForCausalLM

    merged, adapter = exports.write("dms"), exports.write("peft")
    expected = AutoModelForCausalLM.from_pretrained(merged, trust_remote_code=True).float()
    variables: Any = {"adapter": str(adapter), "base_directory": str(exports.base)}
    snippet = re.findall(r"```py\n(from peft .*?)```", GUIDE.read_text(), re.DOTALL)[0]
    exec(snippet.rpartition("model = ")[0], variables)  # the last line merges
    model = variables["model"]
    tokens = tiny.batch(0).tokens
    relative = 2e-2 if exports.dtype == "bf16" else 1e-5
    wanted = expected(tokens).logits
    torch.testing.assert_close(model(tokens).logits, wanted, rtol=relative, atol=relative)
    model = model.merge_and_unload()
    torch.testing.assert_close(model(tokens).logits, wanted, rtol=relative, atol=relative)
    state = expected.state_dict()
    for name, tensor in model.state_dict().items():
        assert close(tensor.to(DTYPES[exports.dtype]), state[name].to(DTYPES[exports.dtype])), name


@pytest.mark.parametrize(
    "which",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("installed", "transformers 4")),
        "newest",
    ],
)
def test_auto_model_with_peft_reads_a_folder_and_a_hub_id(
    tmp_path: Path, view: ParallelView, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    if not find_spec("peft"):
        pytest.skip("PEFT is absent; make setup installs it")
    path = path_of(which)
    exports = Exports(tmp_path, view, "biases")
    merged, adapter = exports.write("dms"), exports.write("peft", AdapterBase("one/base", "v2"))
    for name, folder, revision in (("base", exports.base, "v2"), ("adapter", adapter, "main")):
        repository = tmp_path / "hub" / f"models--one--{name}"
        shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
        (repository / "refs").mkdir()
        (repository / "refs" / revision).write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert set(WeightReader(adapter).names()) == set(WeightReader(merged).names())
    result, folders = tmp_path / "result.pt", (str(merged), str(adapter), "one/adapter")
    launch.checked(
        launch.python(
            "-c",
            LOAD,
            str(result),
            *folders,
            PYTHONPATH=path,
            HF_MODULES_CACHE=str(tmp_path / "modules"),
            HF_HUB_CACHE=str(tmp_path / "hub"),
            HF_HUB_OFFLINE="1",
        )
    )
    found = torch.load(result)
    assert found.pop("version").startswith("4.") == (which == "transformers 4")
    for folder in folders:
        assert found[folder][0] == "Qwen2ForCausalLMDMS"
        torch.testing.assert_close(found[folder][1], found[str(merged)][1], rtol=1e-5, atol=1e-5)


def test_a_wrong_or_missing_base_is_refused_in_one_line(tmp_path: Path, view: ParallelView) -> None:
    from transformers import AutoModelForCausalLM

    exports = Exports(tmp_path, view, "biases")
    adapter = exports.write("peft")
    config = read_json(adapter / "adapter/adapter_config.json")
    other = tiny.SmallEvictionChannels(exports.architecture, 2, METHOD.channel)
    for base, message in (
        (str(exports.dense("other", other.get)), "other weights than th.* of the training"),
        (str(tmp_path / "gone"), "adapter_config.json: base_model_name_or_path: .*no such direct"),
        ("", "name the base model"),
    ):
        write_json(
            adapter / "adapter/adapter_config.json", {**config, "base_model_name_or_path": base}
        )
        with pytest.raises((HFError, FileNotFoundError), match=message) as refusal:
            WeightReader(adapter)
        if "other weights" in message:
            with pytest.raises(ValueError, match=message):
                AutoModelForCausalLM.from_pretrained(adapter, trust_remote_code=True)
        assert "\n" not in str(refusal.value)
    write_json(adapter / "adapter/adapter_config.json", config)
    weights = (adapter / "adapter/adapter_model.safetensors").read_bytes()
    (adapter / "adapter/adapter_model.safetensors").write_bytes(weights[:-9])
    with pytest.raises(HFError, match="copy the file again"):
        WeightReader(adapter)


def test_an_adapter_needs_a_frozen_base(tmp_path: Path) -> None:
    a: Architecture = tiny.architecture("llama")
    with pytest.raises(formats.ExportRefused, match=r"train with method\.train=lora or"):
        check_format(ExportOptions(format="peft"), METHOD.spec, a, "fp32", 4.0, None)
    for base, refused in (("base", False), ("base.gguf", True)):
        with pytest.raises(formats.ExportRefused, match="dms-import") if refused else nullcontext():
            check_format(
                ExportOptions(format="peft"), METHOD.spec, a, "fp32", 4.0, AdapterBase(base)
            )


def test_a_checkpoint_names_the_model_of_its_frozen_weights(
    tmp_path: Path, view: ParallelView
) -> None:
    """The weights come from a Hugging Face directory as `run.load`, then from this checkpoint."""
    exports = Exports(tmp_path, view, "biases")
    other = tiny.SmallEvictionChannels(exports.architecture, 2, METHOD.channel)
    words = ["stage=pretrain", "data.paths=[none]", "method.train=lora", "model.revision=v2"]
    config = compose([*words, f"model.path={exports.dense('other', other.get)}"])
    start = find_start(config)
    assert start.adapter_base == AdapterBase(str(tmp_path / "other"))
    continued = with_student(start, exports.base, exports.trainable)
    described = {"architecture": asdict(exports.architecture), "model": config.model.path}
    for name, begun in (("loaded", continued), ("continued", start)):
        state = TrainState(eviction_enabled=True, target_cr=4.0).to_dict()
        base = described_base(begun.adapter_base, "fp32")
        exports.engine.save(tmp_path / name, {**state, **described, **base})
        student = with_student(start, tmp_path / name, exports.trainable)
        assert student.adapter_base == begun.adapter_base
    assert continued.adapter_base is None
    with pytest.raises(formats.ExportRefused, match="no base model is recorded"):
        export_checkpoint(
            tmp_path / "loaded",
            tmp_path / "out",
            ExportOptions(format="peft", dtype="fp32"),
            tokenizer_from=None,
            selftest_tokens=None,
        )
    lora = exports.trainable
    assert frozen_base(lora, "one/base", "v2") == AdapterBase("one/base", "v2")
    assert frozen_base(ALL_WEIGHTS, "one/base", "v2") is None


def test_an_adapter_in_float32_of_a_run_in_bf16_has_the_rounded_base(
    tmp_path: Path, view: ParallelView
) -> None:
    """dms-export reads every checkpoint in float32 unless it is told another dtype."""
    exports = Exports(tmp_path, view, "norms in bf16")
    base = described_base(AdapterBase(str(exports.base)), exports.dtype)
    exports.engine.save(tmp_path / "checkpoint", base)
    exports.dtype, exports.engine = "fp32", exports.new_engine(view, "fp32", None)
    state = exports.engine.load(tmp_path / "checkpoint", with_optimizer=False)
    whole = WeightReader(exports.write("dms"))
    read = WeightReader(exports.write("peft", stored_base(state)))
    changed = [name for name in whole.names() if "q_proj" in name or "v_proj" in name]
    assert changed
    assert all(close(read.get(name), whole.get(name)) for name in changed)
