"""Log-probabilities of given tokens from the hidden states of a forward pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.inference.given_tokens import GivenTokens
from dms_train.inference.models.decoder import Decoder
from dms_train.inference.sampler import token_logprobs
from dms_train.inference.sequence import Sequence

_BLOCK_LOGITS = 2**25  # of these many fp32 numbers, 128 MiB, log-probabilities are taken at a time


class WantedLogits(NamedTuple):
    """A token of a forward pass whose logits are wanted.

    Attributes:
        place: Of the token in the pass.
        following: The token behind it, which is scored.
        given: Takes the result.
    """

    place: int
    following: int
    given: GivenTokens


def wanted_logits(batch: list[tuple[Sequence, int]]) -> list[WantedLogits]:
    """Whose logits a pass must give, before the sequences advance.

    Args:
        batch: Sequences in the order of their tokens, and how many each computes.
    """
    found, begin = [], 0
    for sequence, count in batch:
        if sequence.given is not None:
            shift = begin - sequence.computed
            for position in sequence.given.positions(sequence.computed, count):
                following = sequence.tokens[position + 1]
                found.append(WantedLogits(shift + position, following, sequence.given))
        begin += count
    return found


def score(decoder: Decoder, hidden: Tensor, wanted: list[WantedLogits]) -> None:
    """Append the log-probabilities that are wanted to their `GivenTokens`.

    Logits are computed for these tokens only, in blocks of bounded size.

    Args:
        decoder: Of the pass.
        hidden: Its last hidden states, [t, hidden].
        wanted: From `wanted_logits`, in the order of the tokens.
    """
    block = max(1, _BLOCK_LOGITS // decoder.architecture.vocab_size)
    for begin in range(0, len(wanted), block):
        part = wanted[begin : begin + block]
        places, tokens = torch.tensor([item[:2] for item in part], device=hidden.device).T
        logits = decoder.logits(hidden[places])
        scores = token_logprobs(logits, tokens, [item.given.top for item in part])
        for item, entry in zip(part, scores, strict=True):
            item.given.found.append(entry)
