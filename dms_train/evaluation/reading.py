"""Number of texts that a validation reads at a time, and the memory that they take."""

from __future__ import annotations

from dms_train.hf.architecture import Architecture

READ_CHUNK = 64  # tokens of a text in a pass, after which the compact cache frees evicted tokens
_TEXTS = 64  # most texts at a time
_BYTES = 2 * 2**30  # for texts read together; a longer text is read alone
_COPIES = 4  # of the attention weights of a dense cache, in float32


def cached_token_bytes(architecture: Architecture, width: int) -> int:
    """Return the bytes that a token takes in the dense cache.

    Args:
        architecture: Sizes of the model.
        width: Bytes of a number in the cache.
    """
    a = architecture
    return 2 * len(a.cache_layers) * a.num_query_groups * a.kv_channels * width


def read_token_bytes(architecture: Architecture, width: int) -> int:
    """Return the bytes that a token of a text takes in the dense cache and its attention.

    Args:
        architecture: Sizes of the model.
        width: Bytes of a number in the cache.
    """
    attention = READ_CHUNK * architecture.num_attention_heads * 4 * _COPIES
    return cached_token_bytes(architecture, width) + attention


def most_tokens(architecture: Architecture, longest: int) -> int:
    """Return the most tokens to read at a time, of any number of texts.

    Args:
        architecture: Sizes of the model.
        longest: Most tokens of a text.
    """
    fitting = _BYTES // read_token_bytes(architecture, 4)
    return max(longest, min(_TEXTS * longest, fitting))


def texts_at_once(architecture: Architecture, count: int, longest: int) -> int:
    """Return the number of texts, at most `count`, to read at a time.

    Args:
        architecture: Sizes of the model.
        count: Number of texts.
        longest: Tokens of the longest one.
    """
    return min(count, most_tokens(architecture, longest) // longest)
