"""The files of a shard against those of megatron-core's own builder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from dms_train.data.index_file import bin_path, idx_path, token_dtype
from dms_train.data.manifest import mask_prefix
from dms_train.data.writer import ShardWriter


@pytest.mark.parametrize("vocab_size", [50, 65_499, 65_500, 152_000])
def test_tokens_and_masks_are_those_of_megatron(tmp_path: Path, vocab_size: int) -> None:
    assert token_dtype(vocab_size) == DType.optimal_dtype(vocab_size)
    generator = np.random.default_rng(vocab_size)
    documents = [
        generator.integers(0, vocab_size, length, dtype=np.int32)
        for length in (1, 7, 3000, *generator.integers(1, 99, 50))
    ]
    masks = [(document % 2).astype(np.uint8) for document in documents]
    ours = tmp_path / "ours"
    with ShardWriter(
        ours, vocab_size=vocab_size, eod_id=None, tokenizer_sha256="", loss_mask=True
    ) as writer:
        for document, mask in zip(documents, masks, strict=True):
            writer.add(document, mask)
        writer.finish(())
    pairs = [
        (ours, DType.optimal_dtype(vocab_size), documents),
        (mask_prefix(ours), np.uint8, masks),
    ]
    for prefix, dtype, values in pairs:
        theirs = tmp_path / "theirs"
        builder = IndexedDatasetBuilder(str(bin_path(theirs)), dtype)
        for each in values:
            builder.add_document(each, [len(each)])
        builder.finalize(str(idx_path(theirs)))
        for path in (bin_path, idx_path):
            assert path(prefix).read_bytes() == path(theirs).read_bytes()
