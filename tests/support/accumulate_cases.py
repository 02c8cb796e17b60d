"""The kernel that merges one token per sequence, against the merge of whole sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.kernels.decode.triton_accumulate import accumulate
from dms_train.kernels.decode.types import HeadNorms, MergeRule, NewestTokens, Step
from dms_train.method.dmc.attention import DMCLayer, weights
from dms_train.method.dmc.merge import merge
from dms_train.method.dmc.spec import DMCSpec

B, H, R, D, ROWS = 2, 3, 2, 12, 4


def worst_state(spec: DMCSpec, device: torch.device, *, normed: bool, length: int = 24) -> float:
    """Largest difference of queries, keys, values and decisions over a sequence; all float32.

    The sequences lie in rows 3 and 1; an unused place of the batch stands between them.
    """
    draw = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(length, B, H, *shape, generator=draw).to(device)
        for shape in ((R, D), (D,), (D,))
    )
    norms = None
    if normed:
        norms = HeadNorms(*(1 + torch.rand(2, D, generator=draw).to(device)), 1e-6)
    rows = torch.tensor([3, -1, 1], device=device)
    # what an earlier sequence has left there must not matter
    left = torch.full((ROWS, H, spec.merge_window - 1, D), torch.nan, device=device)
    newest = NewestTokens(
        left, left.clone(), torch.ones(ROWS, H, spec.merge_window - 1, 2).to(device)
    )
    merging = MergeRule(
        spec.channel % D, spec.alpha_scale, spec.alpha_offset, spec.importance_offset, 1e-6,
        spec.importance == "uniform",
    )  # fmt: skip
    cos = torch.ones(3, D, device=device)
    worst, wanted = 0.0, _states(spec, query.double(), key.double(), value.double(), norms)
    for t in range(length):
        place = torch.tensor([0, 0, 1], device=device)
        step = Step(
            query=query[t, place].flatten(1, 2),
            key=key[t, place],
            value=value[t, place],
            cos=cos,
            sin=cos,
            position=torch.full((3,), t, device=device),
            rows=rows,
        )
        done = accumulate(step, newest, merging, norms)
        assert done.signal is not None
        found = (done.query.view(3, H, R, D), done.key, done.value, done.signal)
        for x, y in zip(found, wanted, strict=True):
            worst = max(worst, (x[[0, 2]].double() - y[t].double()).abs().max().item())
    return worst


def _states(
    spec: DMCSpec, query: Tensor, key: Tensor, value: Tensor, norms: HeadNorms | None
) -> tuple[Tensor, ...]:
    """Cleared queries, merged keys and values, and decisions, [length, b, h, ...] in float64."""
    if norms is not None:
        query, key = (_normed(x, w, norms.epsilon) for x, w in ((query, norms[0]), (key, norms[1])))
    layer = DMCLayer(spec)
    alpha = layer.hard(query, key)
    alpha[0] = False
    weight = weights(layer.activations(query, key)[1], spec)
    query, key = layer.cleared(query, key)
    states = merge(key, value, alpha.double(), weight.double(), spec.merge_window)
    return query, *states, alpha


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.double()
