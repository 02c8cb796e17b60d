"""Attention of a layer with token retention: a bias that decays with distance, and a loss.

The method follows arXiv:2512.03324; docs/methods.md lists the differences. `method.layer` explains
the shape letters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dms_train.method import decisions
from dms_train.method.base import MethodOptions, MethodSpec
from dms_train.method.dms.attention import DMSLayer
from dms_train.method.documents import PackedDocuments
from dms_train.method.eviction_stats import EvictionStats
from dms_train.method.layer import Decided, LayerKernels, LayerPass
from dms_train.method.trim_kv.spec import TrimKVOptions

_BLOCK = 256  # queries whose retention sums are computed at a time
_NOTHING = -1e4  # log retention that leaves a query its own token only; 0 * -inf is not a number


def log_retention(activation: Tensor, spec: MethodSpec) -> Tensor:
    """Compute log beta = log sigmoid(-x) for logits x, in float32 (float64 stays)."""
    return F.logsigmoid(-decisions.eviction_logits(activation, spec))


def retained(log_beta: Tensor, first: Tensor | None = None) -> Tensor:
    """Compute the expected number of tokens held at each position.

    Memory grows with T, because the backward pass computes each block of queries again.

    Args:
        log_beta: [b, g, s], log retention of each token.
        first: int64 [b, s], first position of the document that a position belongs to; None for
            one document.

    Returns:
        [b, g, s], the sum over i <= t of beta_i^(t - i), within the document of t.
    """
    sums = [
        checkpoint(
            _retained_block, log_beta, first, begin, use_reentrant=False, preserve_rng_state=False
        )
        for begin in range(0, log_beta.shape[-1], _BLOCK)
    ]
    return torch.cat(sums, -1)


def _retained_block(log_beta: Tensor, first: Tensor | None, begin: int) -> Tensor:
    """Compute `retained` for the queries from `begin` on."""
    end = min(begin + _BLOCK, log_beta.shape[-1])
    query = torch.arange(begin, end, device=log_beta.device)
    key = torch.arange(end, device=log_beta.device)
    age = query[:, None] - key
    seen = age >= 0
    if first is not None:
        seen = seen & (key >= first[:, begin:end, None])
        seen = seen[:, None]
    left = torch.exp(log_beta[..., None, :end] * age.clamp(min=0))
    return (left * seen).sum(-1)


class TrimKVLayer(DMSLayer):
    """Retention in a layer: the eviction channel of the first query head is the gate."""

    def __init__(self, spec: MethodSpec, kernels: LayerKernels | None = None) -> None:
        super().__init__(spec, None)  # the kernels of DMS decide otherwise

    def decide(self, eviction_channel: Tensor, step: LayerPass) -> Decided | None:
        """Return log beta by key, from the eviction channel [s, b, g]."""
        plan, documents = step.plan, step.documents
        if plan.eviction == "none":
            return None
        logits = decisions.eviction_logits(eviction_channel, self.spec)
        log_beta = F.logsigmoid(-logits).permute(1, 2, 0)
        if plan.eviction == "all":
            log_beta = torch.full_like(log_beta, _NOTHING)
        held = retained(log_beta, None if documents is None else documents.first)
        stats = self._stats(held, step.target, documents)
        last = held[..., -1] if documents is None else (held * documents.is_last[:, None]).sum(-1)
        return Decided(log_beta, stats, logits.detach(), last.detach().round().long())

    def _stats(
        self, held: Tensor, target: float | Tensor, documents: PackedDocuments | None
    ) -> Tensor:
        """Return the columns of `EvictionStats` from the tokens held at each position [b, g, s].

        The capacity loss of a position is its tokens beyond (1 - target) T, over all tokens so far.
        """
        s = held.shape[-1]
        numbers = torch.arange(s, device=held.device)
        counts = held.new_ones(held.shape[0], 1, s)
        last = counts * (numbers == s - 1)
        seen = (numbers + 1).expand(held.shape[0], -1)
        length = torch.full_like(seen, s)
        if documents is not None:
            counts, last = (x[:, None].to(held) for x in (documents.is_token, documents.is_last))
            seen, length = documents.positions + 1, documents.end - documents.first
        seen, capacity = seen[:, None], (length * (1 - target)).clamp(min=1)[:, None]
        excess = (held - capacity).clamp(min=0) / seen * counts
        stats = EvictionStats(
            alpha=((seen - held) * last).sum((1, 2)),
            live=(held * last).sum((1, 2)).detach(),
            reads=(held * counts).sum((1, 2)).detach() / s,
            own_loss=excess.sum((1, 2)),
        )
        return torch.stack([column.float() for column in stats], -1)

    def loss(
        self,
        stats: EvictionStats,
        decisions: int | Tensor,
        target: float | Tensor,
        options: MethodOptions,
    ) -> Tensor:
        """Compute the capacity loss, averaged over layers, heads and tokens."""
        assert isinstance(options, TrimKVOptions)
        excess: Tensor = stats.own_loss / decisions
        excess = excess * decisions if options.aux_form == "sum" else excess
        return options.capacity_weight * excess.mean()

    def hard(self, query: Tensor, key: Tensor) -> Tensor:
        """Return log beta, [..., g], which the cache policy reads."""
        return log_retention(decisions.eviction_channel(query, self.spec.channel), self.spec)


LAYER = TrimKVLayer
