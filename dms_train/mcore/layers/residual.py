"""Decoder layer whose norms include additions to the residual stream and to its gradient."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from dms_train.mcore import compat
from dms_train.mcore.layers.backend import FusedRMSNorm


class ResidualNorm(FusedRMSNorm):
    """Norm that is computed where the layer adds to the residual stream.

    Megatron calls the norm after the addition; it then returns what `join` computed.
    """

    _normed: Tensor | None = None

    def join(self, residual: Tensor, update: Tensor | None = None) -> Tensor:
        """Add an update to the residual stream and normalise the sum; all are [s, b, h].

        Returns:
            The residual stream after the addition. Its gradient is added to the norm's by the
            backward kernel, if later layers use this tensor and not `residual`.
        """
        from dms_train.kernels.layers.triton_norm import add_norm

        compat.run_forward_pre_hooks(self)
        assert self.eps is not None
        stream, self._normed = add_norm(residual, update, self.weight, self.eps)
        return stream

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x, which is the result of the last `join`."""
        normed, self._normed = self._normed, None
        assert normed is not None
        return normed


class ResidualLayer(TransformerLayer):
    """Megatron's layer with `ResidualNorm`; it has neither biases nor dropout to add."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.self_attn_bda = lambda *_: self._add_attention
        # Megatron enables gradients for its additions, so that the first pass of a recomputed
        # layer would record the norm
        self.bias_dropout_add_exec_handler = nullcontext

    def _forward_attention(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super()._forward_attention(self.input_layernorm.join(hidden_states), *args, **kwargs)

    def _add_attention(
        self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, _: float
    ) -> Tensor:
        return self.pre_mlp_layernorm.join(residual, output_with_bias[0])
