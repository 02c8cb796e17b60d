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
    many = draw.randint(0 if single else 1, 6)
    lengths = [1] * single + sorted(round(2 * 40 ** draw.random()) for _ in range(many))
    parts = [
        (row, draw.randint(0, 50), [draw.randint(0, 99) for _ in range(length)])
        for row, length in enumerate(lengths)
    ]
    batch = TokenBatch.ragged(parts, torch.device("cpu"))
    assert batch.tokens.tolist() == [token for _, _, tokens in parts for token in tokens]
    both = torch.stack([batch.tokens, batch.position], -1)
    found, back = [], []
    for group in batch.micro_batches:
        content = group.take(both)
        back.append(group.flatten(content))
        for row, position, pairs in zip(group.rows.tolist(), group.position, content, strict=True):
            tokens, places = pairs[position >= 0].T.tolist()
            assert places == position[position >= 0].tolist()
            assert places == list(range(places[0], places[0] + len(places)))
            found.append((row, places[0], tokens))
    assert found == parts
    assert torch.equal(torch.cat(back), both)
    padded = [group.position.numel() for group in batch.micro_batches]
    assert all(n <= 2 * len(flat) for n, flat in zip(padded, back, strict=True))
    for group in batch.micro_batches:
        assert group.lengths in (None, tuple((group.position >= 0).sum(1).tolist()))


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([1, 1, 1], [3]),
        ([1, 1, 30, 60, 90, 150], [2, 4]),
        ([2, 2, 2, 512], [2, 2]),
        ([1, 5, 5, 9, 512, 512], [1, 1, 4]),
    ],
)
def test_few_groups_whose_padding_is_at_most_as_much_as_their_tokens(lengths, groups):
    parts = [(row, 0, [7] * length) for row, length in enumerate(lengths)]
    batch = TokenBatch.ragged(parts, torch.device("cpu"))
    assert [len(group.rows) for group in batch.micro_batches] == groups
