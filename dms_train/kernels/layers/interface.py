"""Interface of the layer kernels and of sampling; `types` describes their arguments.

No function waits for the device. Each may be captured in a CUDA graph after one call that compiles
its kernels.

Shape letters: m tokens, c hidden size, f width of the MLP, n positions or outputs, b sequences, h
KV heads, g query heads per KV head, d head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dms_train.kernels.layers.types import (
    EmbeddingTables,
    EvictionChannel,
    LinearWorkspace,
    NormedInput,
    SampleWorkspace,
    SamplingLimits,
)


class LayerKernels(Protocol):
    """Layers of a decoder on a few tokens, and sampling."""

    def rotate(
        self, query: Tensor, key: Tensor, table: Tensor, eviction_channel: EvictionChannel
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply RoPE; scale and read out the eviction channel.

        Args:
            query: [n, b, h, g, d].
            key: [n, b, h, d].
            table: float32 [n, b, 2, d / 2], contiguous, cosines and sines; or [n, 2, d / 2], the
                same for all sequences.
            eviction_channel: Scaling of the eviction channel.

        Returns:
            Query [n, b, h * g, d], key [n, b, h, d], and the eviction channel before scaling,
            float32 [n, b, h].
        """
        ...

    def add_norm(
        self, residual: Tensor, update: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Add an update to the residual stream and normalise the sum.

        The sum is rounded to its dtype; the RMSNorm is computed in float32. Differentiable.

        Args:
            residual: [..., c].
            update: [..., c], of the same dtype; None adds nothing.
            weight: [c], of the norm.
            epsilon: Added to the mean of the squares.

        Returns:
            The sum and its RMSNorm, both [..., c].
        """
        ...

    def swiglu(self, x: Tensor) -> Tensor:
        """Return silu(x[..., :f]) * x[..., f:] for x [..., 2 f], computed in float32."""
        ...

    def geglu(self, x: Tensor) -> Tensor:
        """Return gelu(x[..., :f]) * x[..., f:], with the tanh approximation, as `swiglu`."""
        ...

    def normed_input(self, residual: Tensor, epsilon: float) -> NormedInput:
        """Allocate the normalised input of products, for a residual stream [m, c]."""
        ...

    def linear_workspace(self, tokens: int, device: torch.device) -> LinearWorkspace:
        """Allocate scratch memory for products of this many tokens."""
        ...

    def linear(
        self,
        x: NormedInput,
        weight: Tensor,
        memory: LinearWorkspace,
        *,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Multiply a normalised input [m, c] by a weight matrix.

        Args:
            x: The input.
            weight: [n, c], contiguous.
            memory: Shared with the previous and the next products.
            out: [m, n]; receives the result, which is returned.
            bias: [n].
        """
        ...

    def swiglu_linear(
        self, x: NormedInput, weight: Tensor, memory: LinearWorkspace, *, out: Tensor
    ) -> Tensor:
        """Return silu(x w_gate^T) * (x w_up^T) of a normalised input [m, c].

        Args:
            x: The input.
            weight: [2 f, c], gates first; contiguous.
            memory: Shared with the previous and the next products.
            out: [m, f]; receives the result, which is returned.
        """
        ...

    def add_linear(
        self,
        x: Tensor,
        weight: Tensor,
        memory: LinearWorkspace,
        *,
        residual: Tensor,
        norm: Tensor,
        after: NormedInput,
    ) -> None:
        """Add a product to the residual stream, and prepare the next RMSNorm.

        Args:
            x: Input [m, c], contiguous.
            weight: [n, c], contiguous.
            memory: Shared with the previous and the next products.
            residual: [m, n], updated in place.
            norm: [n], weight of the next norm.
            after: Normalised input of the next product; written.
        """
        ...

    def embed(
        self,
        tokens: Tensor,
        position: Tensor,
        rows: Tensor,
        tables: EmbeddingTables,
        *,
        norm: Tensor,
        residual: Tensor,
        after: NormedInput,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        """Start a step: look up embeddings and RoPE angles, and prepare the first RMSNorm.

        Args:
            tokens: int64 [m]; -1 for the newest token of the cache row.
            position: int64 [m].
            rows: int64 [m], cache rows; -1 for an unused batch slot.
            tables: Tables to read.
            norm: [c], weight of the first norm.
            residual: [m, c]; written.
            after: Normalised input of the first product; written.
            cos: [m, d]; written.
            sin: [m, d]; written.
        """
        ...

    def sample_workspace(self, sequences: int, device: torch.device) -> SampleWorkspace:
        """Allocate the scratch memory of `sample` for up to this many sequences."""
        ...

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        keys: Tensor,
        rows: Tensor,
        *,
        tokens: Tensor,
        last: Tensor,
        memory: SampleWorkspace,
        limits: SamplingLimits | None = None,
    ) -> None:
        """Sample a token for each sequence.

        Args:
            logits: [b, vocab], contiguous.
            temperature: float64 [b]; 0 takes the most likely token.
            keys: int64 [b], streams of random numbers.
            rows: int64 [b], cache rows; -1 for an unused batch slot.
            tokens: int64 [b]; written.
            last: int64 [cache rows]; the token is written to the row of its sequence.
            memory: For at least as many sequences.
            limits: Top-k, top-p and min-p; None if no sequence has any.
        """
        ...
