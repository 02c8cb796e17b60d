"""A checkpoint records the data of its run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dms_train.app import inputs
from dms_train.config.build import ConfigError
from dms_train.data.manifest import Source
from dms_train.data.writer import ShardWriter
from dms_train.mcore import groups, runtime
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.options import ParallelOptions


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


@pytest.fixture(scope="module")
def view() -> Iterator[ParallelView]:
    yield groups.start(ParallelOptions(), seed=1)
    groups.stop()
    runtime.stop()


@pytest.mark.parametrize("name", ["a.bin", "b.idx", "b.loss_mask.bin", "a.loss_mask.idx"])
def test_one_flipped_bit_of_the_data_is_found(
    tmp_path: Path, view: ParallelView, name: str
) -> None:
    prefixes = [shard(tmp_path / x, [1, 2, 3], [0, 1, 1]) for x in ("a", "b")]
    inputs.verify_data(prefixes, view)
    file = tmp_path / name
    content = bytearray(file.read_bytes())
    content[1] ^= 16
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^data\.paths: {file}: SHA-256 \w+, the manifest") as e:
        inputs.verify_data(prefixes, view)
    assert len(e.value.problems) == 1


def test_tokens_and_masks_are_recorded(tmp_path: Path) -> None:
    contents = [
        ([1, 2, 3], None),
        ([1, 2, 3], [0, 1, 1]),
        ([1, 2, 3], [0, 0, 1]),
        ([1, 2, 4], [0, 0, 1]),
    ]
    recorded = [inputs.data_hashes([shard(tmp_path / "x", *content)])[0] for content in contents]
    assert len(set(recorded)) == len(contents)
    again = shard(tmp_path / "y", *contents[1])
    assert inputs.data_hashes([again]) == [recorded[1]]
