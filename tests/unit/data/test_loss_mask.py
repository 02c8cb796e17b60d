"""Shards whose loss counts some tokens only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from dms_train.data.errors import DataError
from dms_train.data.index_file import bin_path, idx_path
from dms_train.data.manifest import Source, check_bin_hash, check_shard, mask_prefix, read_manifest
from dms_train.data.reader import ShardReader
from dms_train.data.writer import ShardWriter

SOURCES = (Source(name="words", sha256="b" * 64, rows=3),)


def write(prefix: Path, *, loss_mask: bool = True) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    rows = [
        (rng.integers(0, 300, n).astype(np.int32), rng.integers(0, 2, n).astype(np.uint8))
        for n in (5, 1, 17)
    ]
    with ShardWriter(
        prefix,
        vocab_size=300,
        eod_id=None,
        tokenizer_sha256="a" * 64,
        loss_mask=loss_mask,
        overwrite=True,
    ) as writer:
        for tokens, mask in rows:
            writer.add(tokens, mask)
        writer.finish(SOURCES, {"rows": {"kept": 3}})
    return rows


def test_documents_and_masks_are_read_back(tmp_path: Path) -> None:
    rows = write(tmp_path / "out")
    reader = ShardReader(tmp_path / "out")
    assert len(reader) == 3
    for document, (tokens, mask) in zip(reader, rows, strict=True):
        assert document.tokens.tolist() == tokens.tolist()
        assert document.mask.tolist() == mask.tolist()
    manifest = read_manifest(tmp_path / "out")
    assert manifest.loss_mask is not None
    assert manifest.loss_mask.loss_tokens == sum(int(mask.sum()) for _, mask in rows)
    assert manifest.preparation == {"rows": {"kept": 3}}


def test_megatron_reads_the_mask_as_a_data_set_of_the_same_documents(tmp_path: Path) -> None:
    rows = write(tmp_path / "out")
    data = IndexedDataset(str(mask_prefix(tmp_path / "out")))
    assert [data[i].tolist() for i in range(len(data))] == [mask.tolist() for _, mask in rows]


def test_without_a_mask_every_token_counts_and_old_mask_files_go(tmp_path: Path) -> None:
    write(tmp_path / "out")
    write(tmp_path / "out", loss_mask=False)
    assert all(document.mask.all() for document in ShardReader(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out.bin",
        "out.idx",
        "out.manifest.json",
    ]


@pytest.mark.parametrize("path", [bin_path, idx_path])
def test_a_damaged_mask_is_refused(tmp_path: Path, path) -> None:
    write(tmp_path / "out")
    file = path(mask_prefix(tmp_path / "out"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    manifest = read_manifest(tmp_path / "out")
    check = check_bin_hash if path is bin_path else check_shard
    with pytest.raises(DataError, match=r"out\.loss_mask\..*SHA-256"):
        check(tmp_path / "out", manifest)
    file.unlink()
    with pytest.raises(DataError, match=r"out\.loss_mask\..*missing"):
        check_shard(tmp_path / "out", manifest)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    with ShardWriter(
        tmp_path / "out", vocab_size=300, eod_id=None, tokenizer_sha256="a" * 64, loss_mask=True
    ) as writer:
        writer.add(np.ones(3, np.int32), np.ones(3, np.uint8))
    assert list(tmp_path.iterdir()) == []
