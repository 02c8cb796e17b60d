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

_BLOCK_LOGITS = 2**25  # of these many fp32 numbers, 128 MiB, log-probabilities are taken at a time


class WantedLogits(NamedTuple):
    """Neighbouring tokens of a forward pass whose logits are wanted.

    Attributes:
        places: Of the tokens in the pass.
        following: The token behind each of them, which is scored.
        given: Takes the results.
    """

    places: range
    following: list[int]
    given: GivenTokens


def wanted_logits(batch: list[tuple[Sequence, int]]) -> list[WantedLogits]:
    """Whose logits a pass must give, before the sequences advance.

    Args:
        batch: Sequences in the order of their tokens, and how many each computes.
    """
    found, begin = [], 0
    for sequence, count in batch:
        if sequence.given is not None:
            positions = sequence.given.positions(sequence.computed, count)
            if positions:
                shift = begin - sequence.computed
                places = range(positions.start + shift, positions.stop + shift)
                following = sequence.tokens[positions.start + 1 : positions.stop + 1]
                found.append(WantedLogits(places, following, sequence.given))
        begin += count
    return found


def score(decoder: Decoder, hidden: Tensor, wanted: list[WantedLogits]) -> None:
    """Append the log-probabilities that are wanted to their `GivenTokens`.

    Logits are computed for these tokens only, in blocks of bounded size. All results are copied to
    the host at once.

    Args:
        decoder: Of the pass.
        hidden: Its last hidden states, [t, hidden].
        wanted: From `wanted_logits`, in the order of the tokens.
    """
    if not wanted:
        return
    following = np.array([token for item in wanted for token in item.following])
    numbers = np.stack([np.concatenate([np.array(item.places) for item in wanted]), following])
    places, tokens = sent(numbers, hidden.device)
    most = max(item.given.top or 0 for item in wanted)
    block = max(1, _BLOCK_LOGITS // decoder.architecture.vocab_size)
    parts = [
        token_scores(decoder.logits(hidden[some]), scored, most)
        for some, scored in zip(places.split(block), tokens.split(block), strict=True)
    ]
    _note(wanted, HostScores.of(torch.cat(parts).cpu()), following)


def _note(wanted: list[WantedLogits], found: HostScores, tokens: NDArray[np.int64]) -> None:
    """Append results, whose given tokens are `tokens` [t], to those that take them."""
    logprobs, greedy = found.logprobs[:, 0].tolist(), (found.ids[:, 0].numpy() == tokens).tolist()
    end = 0
    for item in wanted:
        part = slice(end, end + len(item.places))
        end, given = part.stop, item.given
        given.scores.logprobs.extend(logprobs[part])
        given.scores.greedy.extend(greedy[part])
        if given.top is not None:
            some = HostScores(found.logprobs[part], found.ids[part])
            given.entries.extend(some.entries([given.top] * len(item.places)))
