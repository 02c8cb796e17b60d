"""Log-probabilities of given tokens from the hidden states of a forward pass."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dms_train.inference.devices import sent
from dms_train.inference.given_tokens import GivenTokens
from dms_train.inference.models.decoder import Decoder
from dms_train.inference.sequence import Sequence
from dms_train.inference.token_scores import HostScores, token_scores

_BLOCK_LOGITS = 2**25  # most fp32 logits, 128 MiB, that are in memory at the same time


class WantedLogits(NamedTuple):
    """A contiguous range of tokens of a forward pass whose logits are needed.

    Attributes:
        indices: Indices of the tokens in the pass.
        following: Token to score after each of them.
        given: Receives the results.
    """

    indices: range
    following: list[int]
    given: GivenTokens


def wanted_logits(batch: list[tuple[Sequence, int]]) -> list[WantedLogits]:
    """Return the tokens whose logits a pass must compute; call it before the sequences advance.

    Args:
        batch: Sequences in the order of their tokens, each with its number of tokens.
    """
    wanted, begin = [], 0
    for sequence, count in batch:
        if sequence.given is not None:
            positions = sequence.given.positions(sequence.num_computed_tokens, count)
            if positions:
                shift = begin - sequence.num_computed_tokens
                indices = range(positions.start + shift, positions.stop + shift)
                following = sequence.tokens[positions.start + 1 : positions.stop + 1]
                wanted.append(WantedLogits(indices, following, sequence.given))
        begin += count
    return wanted


def score(decoder: Decoder, hidden: Tensor, wanted: list[WantedLogits]) -> None:
    """Append the requested log-probabilities to their `GivenTokens`.

    Logits are computed for these tokens only, in blocks of bounded size. All results are copied to
    the host at once.

    Args:
        decoder: Decoder of the pass.
        hidden: Last hidden states of the pass, [t, hidden].
        wanted: Result of `wanted_logits`, in the order of the tokens.
    """
    if not wanted:
        return
    following = np.array([token for item in wanted for token in item.following])
    numbers = np.stack([np.concatenate([np.array(item.indices) for item in wanted]), following])
    indices, tokens = sent(numbers, hidden.device)
    most = max(item.given.top or 0 for item in wanted)
    block = max(1, _BLOCK_LOGITS // decoder.architecture.vocab_size)
    blocks = [
        token_scores(decoder.logits(hidden[some]), scored, most)
        for some, scored in zip(indices.split(block), tokens.split(block), strict=True)
    ]
    _append_scores(wanted, HostScores.of(torch.cat(blocks).cpu()), following)


def _append_scores(
    wanted: list[WantedLogits], scores: HostScores, tokens: NDArray[np.int64]
) -> None:
    """Append the scores of the given tokens [t] to the `GivenTokens` that they belong to."""
    logprobs, greedy = scores.logprobs[:, 0].tolist(), (scores.ids[:, 0].numpy() == tokens).tolist()
    end = 0
    for item in wanted:
        part = slice(end, end + len(item.indices))
        end, given = part.stop, item.given
        given.scores.logprobs.extend(logprobs[part])
        given.scores.greedy.extend(greedy[part])
        if given.top is not None:
            some = HostScores(scores.logprobs[part], scores.ids[part])
            given.entries.extend(some.entries([given.top] * len(item.indices)))
