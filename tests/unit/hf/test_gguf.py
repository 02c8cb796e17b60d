"""GGUF files: the same weights, logits and ids as the model that was quantised."""

from __future__ import annotations

import importlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType
from gguf.quants import _type_traits, dequantize, quant_shape_to_byte_shape

from dms_train.app.conversion import _tokenizer_dir
from dms_train.app.exporter import run_provenance
from dms_train.app.inspection import describe
from dms_train.app.model import read_architecture as read_options
from dms_train.app.start_point import find_start
from dms_train.checkpoints_tools.hf_to_megatron import main as import_main
from dms_train.data_prep.prepare import main as data_main
from dms_train.export.card import CARD_FILE, read_base
from dms_train.hf import gguf_directory
from dms_train.hf.directory import read_architecture, resolve
from dms_train.hf.errors import HFError
from dms_train.hf.gguf_directory import (
    cached_gguf,
    convert_gguf,
    file_sha256,
    read_gguf_config,
)
from dms_train.hf.json_files import read_config, read_json
from dms_train.hf.options import ModelOptions
from dms_train.hf.weight_reader import WeightReader
from tests.support import configs, gguf_files

FAMILIES = ("gemma3_text", "llama", "qwen2")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "assets"
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(folder))
    return folder / "dms-train" / "gguf"


def stored_weights(directory):
    reader = WeightReader(directory)
    return {name: reader.get(name) for name in reader.names()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_are_those_that_were_written(tmp_path, family):
    a = gguf_files.architecture(family)
    line = convert_gguf(gguf_files.model_file(tmp_path / "m.gguf", family), tmp_path / "out")
    assert line.startswith("weights converted from GGUF (")
    expected, found = gguf_files.weights(a), stored_weights(tmp_path / "out")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert read_architecture(tmp_path / "out") == a


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_gguf_loading(tmp_path, family):
    from transformers import AutoModelForCausalLM

    a = gguf_files.architecture(family)
    stored = {
        name: (_bytes(rows.shape, "Q8_0"), GGMLQuantizationType.Q8_0) if rows.ndim == 2 else rows
        for name, rows in gguf_files.tensors(a, gguf_files.weights(a)).items()
    }
    gguf_files.write(tmp_path / "m.gguf", a, stored)
    line = convert_gguf(tmp_path / "m.gguf", tmp_path / "out", dtype="fp32")
    assert f"{7 * a.num_layers + 1} Q8_0" in line
    options = {"gguf_file": "m.gguf", "dtype": torch.float32, **_dequantising()}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.arange(64)[None] * 5
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-3, rtol=0)


def _dequantising():
    try:
        from transformers import GgufConfig
    except ImportError:  # transformers 4 always dequantises
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _bytes(shape, kind):
    """Random quantised rows; small bytes, so that every half-precision scale is finite."""
    size = quant_shape_to_byte_shape(shape, GGMLQuantizationType[kind])
    return np.random.default_rng(0).integers(0, 60, size, dtype=np.uint8)


@pytest.mark.parametrize("kind", [kind.name for kind in _type_traits])
def test_every_type_is_dequantised(tmp_path, kind):
    a = gguf_files.architecture(
        "qwen2", num_layers=1, hidden_size=256, ffn_hidden_size=256, kv_channels=64
    )
    stored = {
        name: (_bytes(rows.shape, kind), GGMLQuantizationType[kind]) if rows.ndim == 2 else rows
        for name, rows in gguf_files.tensors(a, gguf_files.weights(a)).items()
    }
    gguf_files.write(tmp_path / "m.gguf", a, stored)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", dtype="fp32")
    found = stored_weights(tmp_path / "out")
    for name, tensor in found.items():
        if tensor.ndim == 2:
            expected = _independent(kind, stored[gguf_files.gguf_name(name)][0])
            torch.testing.assert_close(tensor, expected, atol=0, rtol=1e-6)


def _independent(kind, rows):
    """Dequantise with transformers' torch code, where it knows the type."""
    number = GGMLQuantizationType[kind]
    try:
        theirs = importlib.import_module("transformers.integrations.gguf.dequant")
        function = theirs._DEQUANT[int(number)]
    except (ImportError, KeyError):
        return torch.from_numpy(np.array(dequantize(rows, number)))
    blocks = torch.from_numpy(rows).reshape(-1, theirs.GGML_BLOCK[int(number)][1])
    return function(blocks, torch.float32).reshape(len(rows), -1)


def test_gemma_3_has_linear_scaling_and_the_27b_its_own_softmax_scale(tmp_path):
    kept = {"gemma3__rope__scaling__type": "linear", "gemma3__rope__scaling__factor": 8.0}
    scaled = read_gguf_config(gguf_files.model_file(tmp_path / "s.gguf", "gemma3_text", **kept))
    assert scaled["rope_parameters"]["full_attention"]["factor"] == 8.0
    assert scaled["rope_parameters"]["sliding_attention"]["rope_type"] == "default"
    assert scaled["query_pre_attn_scalar"] == 256  # the head size
    changes = {"gemma3__block_count": 62, "gemma3__embedding_length": 168}
    large = read_gguf_config(gguf_files.model_file(tmp_path / "l.gguf", "gemma3_text", **changes))
    assert large["query_pre_attn_scalar"] == 42  # hidden size / heads
    refused = gguf_files.model_file(tmp_path / "w.gguf", llama__attention__sliding_window=16)
    with pytest.raises(HFError, match="sliding_window=16 is not supported"):
        read_gguf_config(refused)


@pytest.mark.parametrize("copies", [True, False])
def test_an_output_layer_is_dropped_only_if_it_is_the_embedding(tmp_path, copies):
    a = gguf_files.architecture()
    stored = gguf_files.tensors(a, gguf_files.weights(a))
    head = stored["token_embd.weight"].copy()
    head[3, 4] += 0 if copies else 1e-3
    gguf_files.write(tmp_path / "m.gguf", a, {**stored, "output.weight": head})
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    found = stored_weights(tmp_path / "out")
    assert read_architecture(tmp_path / "out").tie_word_embeddings is copies
    assert ("lm_head.weight" in found) is not copies
    if not copies:
        assert torch.equal(found["lm_head.weight"], torch.from_numpy(head))


def test_llama_3_scaling_is_found_by_its_factors(tmp_path):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rule = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    a = gguf_files.architecture(rotary_base=500000.0)
    config = LlamaConfig(
        head_dim=16, hidden_size=64, num_attention_heads=4, max_position_embeddings=131072,
        rope_theta=500000.0, rope_scaling=dict(rule),
    )  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    stored = gguf_files.tensors(a, gguf_files.weights(a))
    factors = (plain / scaled).numpy().astype(np.float32)
    gguf_files.write(tmp_path / "m.gguf", a, {**stored, "rope_freqs.weight": factors})
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    written = read_config(tmp_path / "out")["rope_scaling"]
    assert written == pytest.approx(rule)
    factors[0] *= 1.5
    gguf_files.write(tmp_path / "n.gguf", a, {**stored, "rope_freqs.weight": factors})
    with pytest.raises(HFError, match=r"rope_freqs.weight is not the RoPE scaling of Llama 3.1"):
        convert_gguf(tmp_path / "n.gguf", tmp_path / "again")


REFUSED = {
    "architecture": ({"general__architecture": "phi3"}, "general.architecture='phi3'"),
    "experts": ({"llama__expert_count": 8}, "llama.expert_count=8"),
    "yarn": ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type='yarn'"),
    "rotary": ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count=8"),
    "parts": ({"split__count": 2}, "split.count=2"),
    "layers": ({"llama__block_count": 3}, "no tensor for model.layers.2"),
    "fewer layers": ({"llama__block_count": 1}, "9 tensors are not part of a llama model"),
    "no size": ({"llama__embedding_length": None}, "llama.embedding_length is missing"),
    "width": ({"llama__feed_forward_length": 64}, "its metadata states"),
    "pre": ({"tokenizer__ggml__pre": "poro-chat"}, "tokenizer.ggml.pre='poro-chat'"),
    "no pre": ({"tokenizer__ggml__pre": None}, "tokenizer.ggml.pre=null"),
    "tokenizer": ({"tokenizer__ggml__model": "t5"}, "tokenizer.ggml.model='t5'"),
    "eos": ({"tokenizer__ggml__eos_token_id": 999}, "tokenizer.ggml.eos_token_id=999"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_would_be_misread_is_refused_in_one_line(tmp_path, case):
    changes, message = REFUSED[case]
    path = gguf_files.model_file(tmp_path / "m.gguf", **changes)
    with pytest.raises(HFError) as refusal:
        convert_gguf(path, tmp_path / "out")
    assert message in str(refusal.value)
    assert "; " in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.partial").exists()


def test_tensors_that_cannot_be_used_are_refused(tmp_path):
    a = gguf_files.architecture()
    stored = gguf_files.tensors(a, gguf_files.weights(a))
    norm = "output_norm.weight"
    cases = {
        "blk.0.attn_q.bias": (np.zeros(64, np.float32), "1 tensors are not part of a llama"),
        norm: (np.full(64, np.nan, np.float32), f"{norm} holds NaN"),
        "blk.1.ffn_norm.weight": (np.zeros(64, np.int32), "is of type I32"),
    }
    for name, (tensor, message) in cases.items():
        path = gguf_files.write(tmp_path / "m.gguf", a, {**stored, name: tensor})
        with pytest.raises(HFError, match=message):
            convert_gguf(path, tmp_path / "out")


@pytest.mark.parametrize("size", [3, 4, 100, 5000, -20])
def test_a_damaged_file_is_refused_in_one_line(tmp_path, size):
    path = gguf_files.model_file(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(HFError, match=r"m\.gguf: cannot be read as GGUF .*; copy the file again"):
        convert_gguf(path, tmp_path / "out")


def test_a_file_is_converted_once_wherever_a_model_is_read(tmp_path, cache, monkeypatch, caplog):
    path = gguf_files.model_file(tmp_path / "m.gguf")
    directory = resolve(str(path))
    assert directory.parent == cache
    assert "m.gguf: weights converted from GGUF (20 F32 tensors)" in caplog.text
    with monkeypatch.context() as patched:
        patched.setattr(gguf_directory, "convert_gguf", None)  # another conversion would fail
        assert resolve(path) == cached_gguf(path) == directory
    gguf_files.model_file(path, general__license="mit")
    os.utime(path, ns=(0, 0))
    assert resolve(path) != directory
    assert [p.name for p in tmp_path.iterdir() if p.name != "assets"] == ["m.gguf"]


def test_processes_that_start_together_convert_once(tmp_path, monkeypatch):
    path, calls = gguf_files.model_file(tmp_path / "m.gguf"), []
    convert = gguf_directory.convert_gguf
    monkeypatch.setattr(
        gguf_directory, "convert_gguf", lambda *args: calls.append(args) or convert(*args)
    )
    with ThreadPoolExecutor(4) as pool:
        directories = set(pool.map(cached_gguf, [path] * 4))
    assert len(directories) == len(calls) == 1


def test_a_path_without_a_model_is_refused(tmp_path):
    (tmp_path / "text").write_text("no model")
    with pytest.raises(FileNotFoundError, match=r"absent.gguf: no such file; correct the path"):
        resolve("models/absent.gguf")
    with pytest.raises(HFError, match="text: a file, but not a GGUF file"):
        resolve(tmp_path / "text")
    with pytest.raises(FileNotFoundError, match="neither a directory nor a GGUF file"):
        describe(tmp_path / "text")


def test_planning_and_inspection_do_not_convert(tmp_path, cache):
    path = gguf_files.model_file(tmp_path / "m.gguf", "qwen2")
    a = gguf_files.architecture("qwen2")
    assert read_options(ModelOptions(path=str(path))) == a
    facts = describe(path)
    assert facts["kind"] == "GGUF file"
    assert facts["tensor_types"] == {"F32": 26}
    assert facts["parameters"] == sum(t.numel() for t in gguf_files.weights(a).values())
    assert not cache.exists()
    resolve(path)
    assert read_options(ModelOptions(path=str(path))) == a  # from the converted directory


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_only_matrices_in_32_bits_stay_float32(tmp_path, cache, kind, dtype):
    """The norms are stored in 32 bits in every case."""
    a, half = gguf_files.architecture("llama"), GGMLQuantizationType[kind]
    stored = {
        name: (_bytes(rows.shape, kind), half) if rows.ndim == 2 and kind != "F32" else rows
        for name, rows in gguf_files.tensors(a, gguf_files.weights(a)).items()
    }
    gguf_files.write(tmp_path / "m.gguf", a, stored)
    assert read_gguf_config(tmp_path / "m.gguf")["dtype"] == dtype
    line = convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert line.endswith(f", written as {dtype}")
    for directory in (tmp_path / "out", resolve(tmp_path / "m.gguf")):
        assert {t.dtype for t in stored_weights(directory).values()} == {getattr(torch, dtype)}
        assert read_config(directory)["dtype"] == dtype


def test_the_command_writes_a_directory_that_says_where_it_comes_from(tmp_path, capsys):
    path = gguf_files.model_file(tmp_path / "m.gguf")
    assert import_main([str(path), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert "weights converted from GGUF (20 F32 tensors)" in capsys.readouterr().out
    assert {t.dtype for t in stored_weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert read_config(tmp_path / "out")["dtype"] == "bfloat16"
    facts = describe(tmp_path / "out")["gguf"]
    assert facts["file"] == "m.gguf"
    assert facts["tensor_types"] == {"F32": 20}
    assert "license: apache-2.0" in (tmp_path / "out" / CARD_FILE).read_text()
    assert import_main([str(path), str(tmp_path / "out")]) == 2
    assert "exists" in capsys.readouterr().err


def test_a_card_without_a_licence_has_no_front_matter(tmp_path):
    path = gguf_files.model_file(tmp_path / "m.gguf", general__license="")
    convert_gguf(path, tmp_path / "out")
    assert (tmp_path / "out" / CARD_FILE).read_text().startswith("# ")
    assert read_base(str(tmp_path / "out")).license == "unknown"


@pytest.mark.parametrize("place", ["file", "directory"])
def test_the_card_of_an_export_says_that_the_weights_were_quantised(tmp_path, place):
    path = gguf_files.model_file(tmp_path / "m.gguf")
    base = read_base(str(path if place == "file" else resolve(path)))
    assert base.license == "apache-2.0"
    assert base.hub_id is None
    assert base.converted == "weights converted from GGUF (20 F32 tensors)"
    assert read_base("models/gone.gguf").hub_id is None


def test_special_tokens_and_ends_are_written(tmp_path):
    convert_gguf(gguf_files.model_file(tmp_path / "m.gguf"), tmp_path / "out")
    assert read_json(tmp_path / "out" / "generation_config.json") == {
        "bos_token_id": 1,
        "eos_token_id": [2, 0],  # the stated one, and <|endoftext|> by its name
        "pad_token_id": 0,
    }
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == gguf_files.TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["model_input_names"] == ["input_ids", "attention_mask"]
    assert read_config(tmp_path / "out")["rms_norm_eps"] == 1e-5


def test_without_the_package_one_line_says_what_to_install(tmp_path, capsys, monkeypatch):
    path = gguf_files.model_file(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("sys.argv", ["dms-import"])
    assert import_main([str(path), str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err
    assert line == 'dms-import needs gguf: pip install "dms-train[gguf]"\n'


def test_training_starts_from_a_file_and_its_exports_say_so(tmp_path):
    path = gguf_files.model_file(tmp_path / "m.gguf")
    start = find_start(configs.config(model__path=str(path)))
    assert start.model_dir == start.tokenizer_dir == resolve(path)
    assert start.architecture == gguf_files.architecture()
    origin = run_provenance(start.architecture, str(path), start.model_dir)
    assert origin["gguf"]["tensor_types"] == {"F32": 20}
    assert _tokenizer_dir(None, {"model": str(path)}) == resolve(path)


def test_the_hash_of_training_data_fits_the_model(tmp_path):
    path = gguf_files.model_file(tmp_path / "m.gguf")
    (tmp_path / "text.txt").write_text(gguf_files.TEXT)
    words = ["tokenize", "--tokenizer", str(path), "--output", str(tmp_path / "data")]
    assert data_main([*words, "--append-eod", str(tmp_path / "text.txt")]) == 0
    manifest = read_json(tmp_path / "data.manifest.json")
    assert manifest["tokenizer_sha256"] == file_sha256(resolve(path) / "tokenizer.json")
