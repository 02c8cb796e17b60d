"""The flat order of a pass and the sequences in it, against lists."""

from __future__ import annotations

import random

import pytest
import torch

from dms_train.inference.models.batch import TokenBatch


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("single", [0, 3])
def test_every_token_finds_its_sequence_and_its_way_back(seed, single):
    draw = random.Random(seed)
    lengths = [1] * single + [
        draw.randint(2, 6) for _ in range(draw.randint(0 if single else 1, 4))
    ]
    parts = [
        (row, draw.randint(0, 50), [draw.randint(0, 99) for _ in range(length)])
        for row, length in enumerate(lengths)
    ]
    batch = TokenBatch.ragged(parts, torch.device("cpu"))
    assert batch.tokens.tolist() == [token for _, _, tokens in parts for token in tokens]
    both = torch.stack([batch.tokens, batch.position], -1)
    found, back = [], []
    for group in batch.groups:
        content = group.take(both)
        back.append(group.flatten(content))
        for row, position, pairs in zip(group.rows.tolist(), group.position, content, strict=True):
            tokens, places = pairs[position >= 0].T.tolist()
            assert places == position[position >= 0].tolist()
            assert places == list(range(places[0], places[0] + len(places)))
            found.append((row, places[0], tokens))
    assert found == parts
    assert torch.equal(torch.cat(back), both)
    assert len(batch.groups) == (single > 0) + (len(lengths) > single)
