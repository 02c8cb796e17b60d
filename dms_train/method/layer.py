"""The interface between a method and the attention of a layer.

Shape letters: s positions, b samples, g KV heads, r query heads per KV head, d head size; numbers
of heads are per tensor-parallel and context-parallel rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from dms_train.method.base import MethodOptions, MethodSpec
from dms_train.method.documents import PackedDocuments
from dms_train.method.eviction_stats import EvictionStats
from dms_train.method.noise import LayerNoise
from dms_train.method.plan import StepPlan


class Heads(NamedTuple):
    """Projections of a layer: query [s, b, g, r, d], key and value [s, b, g, d]."""

    query: Tensor
    key: Tensor
    value: Tensor


class LayerPass(NamedTuple):
    """One micro-batch in one layer.

    Attributes:
        plan: Plan of the current step.
        options: Constants of the method and its training.
        target: alpha* of the layer, the share of the tokens that must take no slot; a number or a
            tensor [].
        documents: Packed documents; None where a sample is one document.
        noise: Key of the relaxation's noise; None for no noise.
        rotate: RoPE on query [s, b, g, r, d] and key [s, b, g, d].
        sum_ranks: Sum over the ranks that share the heads; its gradient is summed too.
        first_rank: Whether the rank holds the model's first heads.
        heads: Number of KV heads of all ranks.
        recorded: Whether to return logits and slots of every KV head.
    """

    plan: StepPlan
    options: MethodOptions
    target: float | Tensor
    documents: PackedDocuments | None
    noise: LayerNoise | None
    rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    sum_ranks: Callable[[Tensor], Tensor]
    first_rank: bool
    heads: int
    recorded: bool

    def hinge(self, alpha_sum: Tensor, groups: int, length: int) -> Tensor:
        """Return this rank's part of the layer's own one-sided loss, times its decisions, [b].

        Args:
            alpha_sum: Sum of the decisions of this rank, [b].
            groups: Number of KV heads of this rank.
            length: Positions of a sample.
        """
        tokens = length if self.documents is None else self.documents.tokens
        mean = self.sum_ranks(alpha_sum) / (self.heads * tokens)
        short: Tensor = (self.target - mean).clamp(min=0.0)
        return short * groups * tokens


class Decided(NamedTuple):
    """Decisions of a layer.

    Attributes:
        log_keep: log(1 - alpha) by key [b, g, s], added to the score of a key outside the
            window; times the distance for a method that `decays`.
        stats: Columns of `EvictionStats`, sums over the KV heads, float32 [b, 3 or 4]; a method
            without a loss of its own leaves out the last column.
        logits: Decision logits [s, b, g], detached; None from kernels.
        held: Number of slots at the last token, int64 [b, g]; None from kernels.
    """

    log_keep: Tensor
    stats: Tensor
    logits: Tensor | None = None
    held: Tensor | None = None


class LayerKernels(NamedTuple):
    """Fused forms of operations on relaxed decisions, for GPUs.

    Attributes:
        decide: Map activations, float32 [s, b, g], to `log_keep` and `stats` of `Decided`.
        decide_merges: Do the same, and return alpha [s, b, g] first; 0 for a token without
            predecessor.
        merge: Kernel for `method.dmc.merge.merge`.
    """

    decide: Callable[
        [Tensor, MethodOptions, LayerNoise | None, PackedDocuments | None], tuple[Tensor, Tensor]
    ]
    decide_merges: Callable[
        [Tensor, MethodOptions, LayerNoise | None, PackedDocuments | None],
        tuple[Tensor, Tensor, Tensor],
    ]
    merge: Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


class Projection(Protocol):
    """Query, key and value projection of a layer, computed on request."""

    def heads(self) -> Heads:
        """Return the heads before RoPE."""
        ...

    def rotated(self, channel: int, *, clear_after_rope: bool) -> tuple[Heads, Tensor]:
        """Apply RoPE with one kernel, which also scales a channel of the first query heads.

        Args:
            channel: The channel; it is multiplied by the step's `channel_scale`.
            clear_after_rope: Whether the product is scaled again after RoPE.

        Returns:
            Rotated heads, and the activations of the channel before RoPE, float32 [s, b, g].
        """
        ...


class MethodLayer(Protocol):
    """Changes of a method to the attention of a layer and to the loss; it has no weights.

    Inherit from it to get the defaults.

    Attributes:
        scale_on_device: Whether `prepare_fused` reads `channel_scale` only on the device, so that
            one CUDA graph serves all of its values.
    """

    scale_on_device: ClassVar[bool] = False

    def __init__(self, spec: MethodSpec, kernels: LayerKernels | None = None) -> None: ...

    def prepare(self, heads: Heads, step: LayerPass) -> tuple[Heads, Decided | None]:
        """Return rotated heads and the decisions for the attention kernel.

        There are no decisions when the plan's eviction is `none`.
        """
        ...

    def prepare_fused(
        self, projection: Projection, step: LayerPass
    ) -> tuple[Heads, Decided | None]:
        """Do the same as `prepare` with fused kernels; by default, call `prepare`."""
        return self.prepare(projection.heads(), step)

    def loss(
        self,
        stats: EvictionStats,
        decisions: int | Tensor,
        target: float | Tensor,
        options: MethodOptions,
    ) -> Tensor:
        """Compute the method's part of the loss, a scalar.

        Args:
            stats: Statistics summed over layers and KV heads.
            decisions: L * H * T, or [b] where padding leaves samples with different T.
            target: alpha*, as in `LayerPass`.
            options: Constants of the method and its training.
        """
        ...

    def hard(self, query: Tensor, key: Tensor) -> Tensor:
        """Decide by the inference rule, bool [..., g] by deciding token.

        A method whose policy reads another signal of each token returns that, [..., g].

        Args:
            query: [..., g, r, d] before RoPE.
            key: [..., g, d] before RoPE.
        """
        ...

    def cleared(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return both, in the same shapes, with 0 in the eviction channels."""
        ...

    def channel_rows(self, query: int, size: int) -> list[int]:
        """Return the rows of the eviction channels within the projection of one KV group.

        Args:
            query: Query rows of the group; the key's follow.
            size: Head size.
        """
        ...


@cache
def method_layer(spec: MethodSpec, kernels: LayerKernels | None = None) -> MethodLayer:
    """Return the layer of the method that a specification names.

    Args:
        spec: Constants of the method.
        kernels: Fused operations; None for torch operations alone.
    """
    module = importlib.import_module(f"dms_train.method.{spec.kind}.attention")
    layer: MethodLayer = module.LAYER(spec, kernels)
    return layer
