"""Log-probabilities of tokens, computed on the device of the logits and sent to the host at once.

Shape letters: b positions, k most likely tokens of a position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.inference.outputs import TokenLogprobs


def token_scores(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """Compute the log-probabilities of given tokens and of the most likely ones.

    Args:
        logits: [b, vocab].
        tokens: int64 [b].
        most: Number of the most likely tokens at each position.

    Returns:
        int32 [b, 2 + 2 k] for `HostScores.of`; one tensor, so that one copy brings it to the host.
    """
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.gather(1, tokens[:, None]), logits.argmax(-1, keepdim=True)
    if most:
        top = logprobs.topk(min(most, logprobs.shape[1]))
        values, ids = torch.cat([values, top.values], 1), torch.cat([ids, top.indices], 1)
    return torch.cat([values.view(torch.int32), ids.int()], 1)


class HostScores(NamedTuple):
    """Result of `token_scores` on the host.

    Attributes:
        logprobs: float32 [b, 1 + k], log-probabilities of the given token, then of the most likely
            ones.
        ids: int32 [b, 1 + k], the argmax, which temperature 0 takes, then the most likely tokens in
            the order of `logprobs`.
    """

    logprobs: Tensor
    ids: Tensor

    @classmethod
    def of(cls, packed: Tensor) -> HostScores:
        """Unpack the tensor of `token_scores` on the CPU."""
        logprobs, ids = packed.chunk(2, 1)
        return cls(logprobs.view(torch.float32), ids)

    def entries(self, tops: list[int]) -> list[TokenLogprobs]:
        """Return an entry for each position, with its `tops` most likely tokens.

        The argmax comes first, even if other tokens have the same logit.
        """
        entries = []
        for values, ids, top in zip(self.logprobs.tolist(), self.ids.tolist(), tops, strict=True):
            first = [(ids[0], values[1])] if top else []
            ranked = dict([*first, *zip(ids[1:], values[1:], strict=True)])
            entries.append(TokenLogprobs(values[0], dict(list(ranked.items())[:top])))
        return entries
