"""A run checks its documents before it packs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dms_train.app.preparation import _check_packing
from dms_train.config.build import ConfigError
from dms_train.data.manifest import Source
from dms_train.data.writer import ShardWriter
from tests.support import configs


def shard(prefix: Path, lengths: list[int]) -> str:
    with ShardWriter(prefix, vocab_size=50, eod_id=None, tokenizer_sha256="a" * 64) as writer:
        for length in lengths:
            writer.add(np.full(length, 3, dtype=np.int32))
        writer.finish((Source(name="words", sha256="b" * 64, rows=len(lengths)),))
    return str(prefix)


def test_documents_that_are_cut_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [shard(tmp_path / "one", [65, 66, 10]), shard(tmp_path / "two", [200])]
    _check_packing(configs.config(data__paths=paths, data__packing=True))
    (line,) = caplog.messages
    assert line == "data.packing: 2 of 4 documents do not fit into data.seq_length=64 and are cut"
    caplog.clear()
    _check_packing(configs.config(data__paths=[shard(tmp_path / "three", [65, 20])]))
    assert not caplog.messages


@pytest.mark.parametrize(("longest", "refused"), [(17, True), (18, False)])
def test_the_longest_document_must_leave_the_window(
    tmp_path: Path, longest: int, refused: bool
) -> None:
    paths = [shard(tmp_path / "short", [2, longest])]
    config = configs.config(data__paths=paths)  # of window 16
    if not refused:
        _check_packing(config)
        return
    with pytest.raises(ConfigError, match=r"method.window=16: the longest .* has 16 positions"):
        _check_packing(config)
