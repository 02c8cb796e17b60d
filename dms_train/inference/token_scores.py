"""Log-probabilities of tokens from logits, computed on their device and sent to the host at once.

Shape letters: b places, k most likely tokens of a place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.inference.outputs import TokenLogprobs


def token_scores(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """Log-probabilities of given tokens and of the most likely ones.

    Args:
        logits: [b, vocab].
        tokens: int64 [b].
        most: How many of the most likely tokens are wanted at any place.

    Returns:
        int32 [b, 2 + 2 k], in one tensor for one copy to the host; see `HostScores`.
    """
    shares = logits.float().log_softmax(-1)
    values, ids = shares.gather(1, tokens[:, None]), logits.argmax(-1, keepdim=True)
    if most:
        found = shares.topk(min(most, shares.shape[1]))
        values, ids = torch.cat([values, found.values], 1), torch.cat([ids, found.indices], 1)
    return torch.cat([values.view(torch.int32), ids.int()], 1)


class HostScores(NamedTuple):
    """What `token_scores` has found, on the host.

    Attributes:
        logprobs: float32 [b, 1 + k], of the given token and of the most likely ones.
        ids: int32 [b, 1 + k], the token of the argmax, which temperature 0 takes, and the most
            likely ones in the order of `logprobs`.
    """

    logprobs: Tensor
    ids: Tensor

    @classmethod
    def of(cls, packed: Tensor) -> HostScores:
        """From the tensor of `token_scores` on the CPU."""
        logprobs, ids = packed.chunk(2, 1)
        return cls(logprobs.view(torch.float32), ids)

    def entries(self, tops: list[int]) -> list[TokenLogprobs]:
        """One for each place, with so many of the most likely tokens.

        The first one is that of the argmax, also where several have the same logit.
        """
        found = []
        for values, ids, top in zip(self.logprobs.tolist(), self.ids.tolist(), tops, strict=True):
            first = [(ids[0], values[1])] if top else []
            ranked = dict([*first, *zip(ids[1:], values[1:], strict=True)])
            found.append(TokenLogprobs(values[0], dict(list(ranked.items())[:top])))
        return found
