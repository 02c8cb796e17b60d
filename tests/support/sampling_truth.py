"""The token that a sequence draws, by the definition of each parameter and in plain loops."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dms_train.inference.options import SamplingParams
from dms_train.method.splitmix import uniform


def left(logits: list[float], params: SamplingParams) -> list[int]:
    """Tokens that top-k, then top-p and min-p leave; most likely ones first."""
    scores = [x / params.temperature for x in logits]
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    order = order[: params.top_k] if params.top_k > 0 else order
    weights = [math.exp(scores[token] - scores[order[0]]) for token in order]
    asked, before, found = params.top_p * math.fsum(weights), 0.0, []
    for token, weight in zip(order, weights, strict=True):
        if params.top_p < 1 and before >= asked:
            break
        if weight >= params.min_p:
            found.append(token)
        before += weight
    return found


def drawn(logits: Tensor, params: SamplingParams, key: Tensor) -> int:
    """The token of one row.

    Args:
        logits: [vocab].
        params: How it is drawn.
        key: int64 [], of its random numbers.
    """
    row = logits.double().cpu()
    if params.temperature == 0:
        return int(row.argmax())
    kept = torch.tensor(sorted(left(row.tolist(), params)))
    noise = -(-uniform(key.cpu()[None], len(row))[0].log()).log()
    return int(kept[(row / params.temperature + noise)[kept].argmax()])
