"""Every command of docs/guides/reasoning_data.md, on a tiny model with R1's special tokens."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
import yaml
from pyarrow import parquet
from safetensors.torch import save_file
from transformers import AutoTokenizer

from dms_train.data.manifest import read_manifest
from dms_train.data.reader import ShardReader
from dms_train.hf.config_json import from_hf_config
from dms_train.hf.tensors import expected_shapes
from tests.support import launch
from tests.support.commands import write_commands
from tests.support.r1_tokenizer import ASSISTANT, BEGIN, USER, write_tokenizer
from tests.unit.data_prep.conftest import row

GUIDE = launch.ROOT / "docs" / "guides" / "reasoning_data.md"
# What needs the network, or would change the environment of the tests.
NOT_HERE = ("hf download", "pip install")
# The guide's settings, and those of a model of 2 layers on a CPU.
SMALLER = {
    "experiment=qwen_r1_1_5b": "experiment=stories260k data.seq_length=256 method.window=8"
    " data.micro_batch_size=1 data.global_batch_size=2 stage.zero_neuron.steps=2"
    " run.eval_samples=0 run.check_teacher=false observe=quiet",
    "--workers 8": "--workers 1",
    "--seq-length 8192": "--seq-length 256",
    "--max-new-tokens 4096": "--max-new-tokens 16",
    "--limit 1000": "--limit 10",
    "--unconditional 1000": "--unconditional 10",
    "--max-new-tokens 1536": "--max-new-tokens 16",
    "--max-new-tokens 512": "--max-new-tokens 16",
    "--beginning 32-512": "--beginning 4-32",
    "DEVICE=cuda": "DEVICE=cpu SEQS=8 NEW_TOKENS=16",
}
_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_sliding_window": False,
    "vocab_size": 512,  # larger than the tokenizer's, as on the hub
}


def write_model(folder: Path) -> None:
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape) if "norm" in name else 0.1 * torch.randn(shape, generator=generator)
        for name, shape in expected_shapes(from_hf_config(_CONFIG)).items()
    }
    weights["lm_head.weight"][1] *= 10  # so that some continuations end
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_data(folder: Path) -> None:
    """Write the files that the guide downloads, and its other files."""
    traces = folder / "openr1-math" / "data"
    traces.mkdir(parents=True)
    for part in range(2):
        table = pyarrow.Table.from_pylist([row(number + 50 * part) for number in range(50)])
        parquet.write_table(table, traces / f"train-{part:05d}-of-00002.parquet")
    (folder / "math500.jsonl").write_text(json.dumps({"problem": "What is 3 + 1?"}))
    pairs = [{"prompt": f"Say {number}.", "completion": f"{number}"} for number in range(50)]
    write_lines(folder / "chat.jsonl", pairs)
    # no answer of random weights is right, and rows without an answer are not verified
    sums = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]
    write_lines(folder / "gsm8k.jsonl", [*sums, *({**one, "answer": None} for one in sums)])
    write_lines(folder / "instructions.jsonl", [{"prompt": f"Count to {n}."} for n in range(4)])
    books = folder.parent / "books"
    books.mkdir()
    sentences = "".join(f"I think the result is {n} so far.\n" for n in range(60))
    for name in ("one.txt", "two.md"):
        (books / name).write_text(sentences, encoding="utf-8")


def write_lines(file: Path, rows: list[Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder after all commands have run, and what each of them printed."""
    folder = tmp_path_factory.mktemp("guide")
    write_model(folder / "models" / "r1-qwen-1.5b")
    (folder / "models" / "smollm2-135m-instruct").symlink_to("r1-qwen-1.5b")
    (folder / "scripts").symlink_to(launch.ROOT / "scripts")
    write_data(folder / "data")
    commands = write_commands(folder / "bin", launch.fork_server())
    path = os.pathsep.join([str(commands), os.environ["PATH"]])
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    printed = {}
    for command in "".join(blocks).replace("\\\n", " ").splitlines():
        if command.startswith(NOT_HERE):
            continue
        small = command
        for setting, value in SMALLER.items():
            small = small.replace(setting, value)
        done = subprocess.run(
            ["bash", "-c", small],
            cwd=folder,
            env=launch.environment(PATH=path, HF_HUB_OFFLINE="1"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{small}\n{(done.stdout + done.stderr)[-4000:]}"
        printed[command] = done.stdout
    return folder, printed


@pytest.mark.timeout(900)
def test_every_command_of_the_guide_succeeds(outputs):
    _, printed = outputs
    words = {" ".join(command.split()[:2]) for command in printed}
    assert {
        f"dms-data {name}"
        for name in ("openr1", "chat", "generate", "mix", "show", "check", "packing")
    } < words
    text = "\n".join(printed)
    assert not [setting for setting in SMALLER if setting not in text]
    shown = next(said for command, said in printed.items() if command.startswith("dms-data show"))
    assert f"{ASSISTANT}⟦<think>\nLet me see.\n</think>\n\nThe answer is $\\boxed{{1}}$" in shown


def test_the_shards_of_the_guide_hold_what_was_asked_for(outputs):
    folder, _ = outputs
    traces = read_manifest(folder / "data" / "openr1")
    assert traces.preparation is not None
    assert traces.preparation["rows"] == {"read": 100, "kept": 99, "evaluation_overlap": 1}
    blend = read_manifest(folder / "data" / "blend")
    assert [source.name for source in blend.sources] == ["openr1", "chat"]
    assert blend.loss_mask is not None


def test_the_model_of_the_guide_continues_its_prompts(outputs):
    folder, _ = outputs
    own, free = (ShardReader(folder / "data" / name) for name in ("own", "free"))
    decode = AutoTokenizer.from_pretrained(folder / "models" / "r1-qwen-1.5b").decode
    prompts = [decode(one.tokens[one.mask == 0]) for one in own]
    expected = f"{BEGIN}{USER}What is {{}} + 1?{ASSISTANT}<think>\n"
    assert prompts == [expected.format(number) for number in range(10)]
    assert [decode(one.tokens[one.mask == 0]) for one in free] == [BEGIN] * 10


def test_the_training_text_of_the_guide_is_blended_with_its_terms(outputs):
    folder, _ = outputs
    manifest = read_manifest(folder / "data" / "smollm2" / "train")
    names = ["gsm8k", "instructions", "continued", "books"]
    assert [source.name for source in manifest.sources] == names
    model = "smollm2-135m-instruct"
    assert [(one.source, one.license, one.model) for one in manifest.origins] == [
        ("openai/grade-school-math", "MIT", model),
        ("unknown", "unknown", model),
        ("https://openstax.org", "CC-BY-4.0", model),
        ("https://openstax.org", "CC-BY-4.0", None),
    ]
    assert sum(one.tokens for one in manifest.origins) == manifest.tokens


def test_the_model_of_the_guide_is_trained_on_them(outputs):
    folder, _ = outputs
    lines = (folder / "outputs" / "r1" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "train/loss" in line]
    assert steps == [1, 2]


def test_the_documents_of_the_guide_are_packed(outputs):
    folder, printed = outputs
    said = next(said for command, said in printed.items() if command.startswith("dms-data pack"))
    assert re.search(r"99 documents, 0 of them cut, .* sequences of 256 .* \d\.\d\d% padding", said)
    assert yaml.safe_load((folder / "outputs/r1/config.yaml").read_text())["data"]["packing"]
