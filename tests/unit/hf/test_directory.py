"""Model directories: found, read tensor by tensor, written shard by shard."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dms_train.hf.directory import resolve
from dms_train.hf.json_files import read_config
from dms_train.hf.safetensors_files import INDEX_FILE, SINGLE_FILE
from dms_train.hf.text_files import read_lines
from dms_train.hf.weight_reader import WeightReader
from dms_train.hf.weight_writer import WeightWriter

TENSORS = {f"layer.{i}": torch.full((4, 4), float(i)) for i in range(5)}


def write(directory, max_shard_bytes):
    with WeightWriter(directory, max_shard_bytes) as writer:
        for name, tensor in TENSORS.items():
            writer.add(name, tensor)


@pytest.fixture
def sharded(tmp_path):
    write(tmp_path, 2 * 64)
    return tmp_path


def test_one_file(tmp_path):
    write(tmp_path, 10**6)
    assert [p.name for p in tmp_path.iterdir()] == [SINGLE_FILE]
    assert load_file(tmp_path / SINGLE_FILE).keys() == TENSORS.keys()


def test_shards(sharded):
    names = sorted(p.name for p in sharded.iterdir())
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names == [*shards, INDEX_FILE]
    index = json.loads((sharded / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == 5 * 64
    assert index["weight_map"]["layer.4"] == shards[2]


def test_reader(sharded):
    reader = WeightReader(sharded)
    assert reader.names() == sorted(TENSORS)
    assert reader.shape("layer.2") == (4, 4)
    assert reader.dtype("layer.2") == "F32"
    assert all(torch.equal(reader.get(name), tensor) for name, tensor in TENSORS.items())
    with pytest.raises(KeyError, match="no tensor nope"):
        reader.get("nope")


def test_views_and_reused_buffers_are_copied(tmp_path):
    buffer = torch.arange(6.0).view(2, 3)
    with WeightWriter(tmp_path) as writer:
        writer.add("a", buffer.T)
        writer.add("b", buffer[0])
        buffer.zero_()
    reader = WeightReader(tmp_path)
    assert torch.equal(reader.get("a"), torch.arange(6.0).view(2, 3).T)
    assert torch.equal(reader.get("b"), torch.arange(3.0))


def test_repeated_name(tmp_path):
    writer = WeightWriter(tmp_path)
    writer.add("a", torch.zeros(1))
    with pytest.raises(ValueError, match="already written"):
        writer.add("a", torch.zeros(1))


def test_failed_writer_leaves_nothing(tmp_path):
    def fail():
        with WeightWriter(tmp_path, 64) as writer:
            for name, tensor in TENSORS.items():
                writer.add(name, tensor)
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        fail()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [5, 40, -1])
def test_truncated_shard(sharded, cut):
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:cut])
    with pytest.raises(ValueError, match="model-00002-of-00003") as error:
        WeightReader(sharded)
    assert "\n" not in str(error.value)


def test_garbled_header(sharded):
    shard = sharded / "model-00001-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[8:12] = b"nope"
    shard.write_bytes(data)
    with pytest.raises(ValueError, match="unreadable header"):
        WeightReader(sharded)


def test_missing_shard(sharded):
    (sharded / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00003-of-00003"):
        WeightReader(sharded)


def test_index_and_shards_disagree(sharded):
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"]["layer.9"] = "model-00001-of-00003.safetensors"
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"layer\.9"):
        WeightReader(sharded)


def test_empty_index(tmp_path):
    (tmp_path / INDEX_FILE).write_text("{}")
    with pytest.raises(ValueError, match="no weight_map"):
        WeightReader(tmp_path)


def test_pickle_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="safe_serialization"):
        WeightReader(tmp_path)


def test_no_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match=SINGLE_FILE):
        WeightReader(tmp_path)


def test_git_lfs_pointers_are_named(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 19572\n"
    reads = {
        SINGLE_FILE: WeightReader,
        "config.json": read_config,
        "model.gguf": lambda folder: resolve(folder / "model.gguf"),
        "rows.jsonl": lambda folder: read_lines(folder / "rows.jsonl"),
    }
    for name, read in reads.items():
        (tmp_path / name).write_text(pointer)
        with pytest.raises(ValueError, match=rf"{name}: a Git LFS pointer.* `git lfs pull`"):
            read(tmp_path)
        (tmp_path / name).unlink()


def test_foreign_files_are_read(tmp_path):
    save_file({"x": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / SINGLE_FILE)
    assert WeightReader(tmp_path).dtype("x") == "BF16"


@pytest.mark.parametrize(
    ("text", "kind", "named"),
    [
        (None, FileNotFoundError, "no such file"),
        ("{", ValueError, "not valid JSON"),
        ("[]", ValueError, r"expected a JSON object, found \[\]"),
        ("null", ValueError, "expected a JSON object, found null"),
    ],
)
def test_broken_config(tmp_path, text, kind, named):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(kind, match=named):
        read_config(tmp_path)


def test_a_directory_wins(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("model").name == "model"


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "a/b/c", "~/absent-model"])
def test_absent_path(name):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        resolve(name)


@pytest.mark.parametrize("name", ["nobody/absent-model", "absent model!"])
def test_absent_hub_id(name):
    with pytest.raises(FileNotFoundError, match="local hub cache") as error:
        resolve(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", [None, 5, b"model", ["model"], ""])
def test_what_is_no_path_is_refused_in_one_line(path):
    with pytest.raises(ValueError, match=r"path_or_id.*[;:] give (str or Path|a directory)"):
        resolve(path)
