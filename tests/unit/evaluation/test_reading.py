"""Number of texts that a validation reads at a time, and their memory."""

from __future__ import annotations

import pytest

from dms_train.evaluation.reading import (
    READ_CHUNK,
    cached_token_bytes,
    most_tokens,
    read_token_bytes,
    texts_at_once,
)
from tests.support import configs

LLAMA = configs.KNOWN["llama31_8b"]


def test_bytes_of_a_token():
    """Llama-3.1-8B: 32 layers, 8 KV heads of 128 channels, 32 query heads."""
    assert cached_token_bytes(LLAMA, 2) == 128 * 1024
    weights = 4 * 4 * 32 * READ_CHUNK  # four copies of the attention weights, in float32
    assert read_token_bytes(LLAMA, 2) == 128 * 1024 + weights
    assert read_token_bytes(LLAMA, 4) == 256 * 1024 + weights


@pytest.mark.parametrize(
    ("count", "longest", "expected"),
    [
        (8, 100_000, 1),  # longer than the memory for texts read together
        (1, 100, 1),
        (3, 100, 3),
        (10_000, 10, 64),
        (64, 512, 14),  # 2 GiB / 288 KiB are 7281 tokens
        (64, 3640, 2),
        (64, 3641, 1),
    ],
)
def test_texts_at_once(count, longest, expected):
    assert texts_at_once(LLAMA, count, longest) == expected


@pytest.mark.parametrize("longest", [1, 60, 113, 114, 3000, 100_000])
def test_no_set_of_texts_has_more_tokens_than_the_most(longest):
    shorter = {1, longest // 3, longest // 2, longest - 1, longest} - {0}
    read = [length * texts_at_once(LLAMA, 10_000, length) for length in shorter]
    assert max(read) <= most_tokens(LLAMA, longest)
