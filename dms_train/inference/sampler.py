"""From logits to the next token of each sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.inference.options import SamplingParams


def sample(
    logits: Tensor, params: list[SamplingParams], generators: list[torch.Generator]
) -> list[int]:
    """Draw one token per row.

    Args:
        logits: float [b, vocab].
        params: Sampling parameters of each row.
        generators: CPU generators, one for each row, so that rows are independent.
    """
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, (how, generator) in enumerate(zip(params, generators, strict=True)):
        if how.temperature > 0:
            share = _probabilities(logits[row].float().cpu() / how.temperature, how)
            tokens[row] = int(torch.multinomial(share, 1, generator=generator))
    return tokens


def _probabilities(scores: Tensor, how: SamplingParams) -> Tensor:
    """softmax(scores) [vocab] after top-k, with 0 for the tokens that top-p excludes."""
    if 0 < how.top_k < len(scores):
        least = scores.topk(how.top_k).values[-1]
        scores = scores.masked_fill(scores < least, -torch.inf)
    share = scores.softmax(-1)
    if how.top_p < 1:
        ordered, index = share.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= how.top_p
        share[index[beyond]] = 0
    return share
