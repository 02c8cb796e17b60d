"""Decoder layers that add to the residual stream in other ways than Megatron's."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from dms_train.mcore import compat
from dms_train.mcore.layers.backend import FusedRMSNorm, RMSNorm


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
        stream, self._normed = add_norm(residual, update, self.gain, self.eps)
        return stream

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x, which is the result of the last `join`."""
        normed, self._normed = self._normed, None
        assert normed is not None
        return normed


class SandwichLayer(TransformerLayer):
    """Megatron's layer that normalises the updates of attention and MLP before it adds them."""

    def __init__(self, *args: Any, norm: type[RMSNorm], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        size = {"hidden_size": self.config.hidden_size, "eps": self.config.layernorm_epsilon}
        self.post_attention_layernorm = norm(self.config, **size)
        self.post_mlp_layernorm = norm(self.config, **size)
        self.self_attn_bda = lambda *_: partial(_add_normed, self.post_attention_layernorm)
        self.mlp_bda = lambda *_: partial(_add_normed, self.post_mlp_layernorm)
        # see `ResidualLayer`
        self.bias_dropout_add_exec_handler = nullcontext


def _add_normed(
    norm: RMSNorm, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, _: float
) -> Tensor:
    return residual + norm(output_with_bias[0])


class ResidualLayer(TransformerLayer):
    """Megatron's layer with `ResidualNorm`; it has no dropout."""

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
        update, bias = output_with_bias
        return self.pre_mlp_layernorm.join(residual, update if bias is None else update + bias)
