"""What a checkpoint records of the data of its run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dms_train.app import inputs
from dms_train.data.manifest import Source
from dms_train.data.writer import ShardWriter


def shard(prefix: Path, tokens: list[int], mask: list[int] | None) -> str:
    with ShardWriter(
        prefix,
        vocab_size=50,
        eod_id=None,
        tokenizer_sha256="a" * 64,
        loss_mask=mask is not None,
        overwrite=True,
    ) as writer:
        counted = None if mask is None else np.array(mask, dtype=np.uint8)
        writer.add(np.array(tokens, dtype=np.int32), counted)
        writer.finish((Source(name="words", sha256="b" * 64, rows=1),))
    return str(prefix)


def test_tokens_and_masks_are_recorded(tmp_path: Path) -> None:
    contents = [
        ([1, 2, 3], None),
        ([1, 2, 3], [0, 1, 1]),
        ([1, 2, 3], [0, 0, 1]),
        ([1, 2, 4], [0, 0, 1]),
    ]
    recorded = [inputs._data_hashes([shard(tmp_path / "x", *content)])[0] for content in contents]
    assert len(set(recorded)) == len(contents)
    again = shard(tmp_path / "y", *contents[1])
    assert inputs._data_hashes([again]) == [recorded[1]]
