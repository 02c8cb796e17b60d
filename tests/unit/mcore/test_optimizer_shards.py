"""Runs of elements and the rectangles they are written as."""

from __future__ import annotations

import pytest
import torch

from dms_train.mcore.checkpoints.optimizer_shards import blocks


@pytest.mark.parametrize("shape", [(12,), (3, 4), (1, 12), (12, 1), (4, 3)])
def test_every_run_is_the_join_of_at_most_three_rectangles(shape: tuple[int, ...]) -> None:
    whole = torch.arange(12).view(shape)
    for start in range(12):
        for end in range(start + 1, 13):
            found = blocks(start, end, shape)
            assert 1 <= len(found) <= 3
            assert [block.start for block in found] == [start, *(b.end for b in found[:-1])]
            assert found[-1].end == end
            read = [
                whole[tuple(slice(o, o + s) for o, s in zip(b.offset, b.shape, strict=True))]
                for b in found
            ]
            assert [tuple(part.shape) for part in read] == [block.shape for block in found]
            joined = torch.cat([part.reshape(-1) for part in read])
            assert joined.tolist() == list(range(start, end))
