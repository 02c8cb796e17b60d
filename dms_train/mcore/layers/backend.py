"""Implementation of linear layers and norms: Transformer Engine's or megatron-core's own.

The attention, its RoPE and the activation are this package's in both. Checkpoints fit both: they
carry the fused layers' names (see `layer_spec` and `weights.global_names`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine as te
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dms_train.families import ModelFamily
from dms_train.kernels.layers.clamped_gate import clamped_swiglu
from dms_train.mcore.compat import optimizer_parts
from dms_train.mcore.errors import ModelError
from dms_train.mcore.layers import fp8 as fp8_products
from dms_train.mcore.layers.overlap import ColumnLinear, RowLinear


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose gradient megatron sums over tensor ranks under sequence parallelism.

    With `layernorm_zero_centered_gamma` it multiplies by 1 + weight, in float32.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        device = torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        self.centered = config.layernorm_zero_centered_gamma

    @property
    def gain(self) -> Tensor:
        """Factors on the normalised channels, [hidden size]."""
        return 1 + self.weight.float() if self.centered else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., hidden size]."""
        if not self.centered:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, self.gain, self.eps).type_as(x)


class FusedRMSNorm(RMSNorm):
    """`RMSNorm` as one kernel each way."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., hidden size]."""
        from dms_train.kernels.layers.triton_norm import rms_norm

        assert self.eps is not None
        return rms_norm(x, self.gain, self.eps)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return gelu(x) with the tanh approximation."""
    return F.gelu(x, approximate="tanh")


def activation(family: ModelFamily) -> Callable[[Tensor], Tensor]:
    """Return the activation of an MLP or expert in megatron-core's configuration.

    A clamped gate is a function of gate and up, which only `FusedGate` can call.
    """
    if family.clamped_gate:
        return clamped_swiglu
    return F.silu if family.activation == "silu" else gelu_tanh


class FusedGate(MegatronModule):
    """Activation of a gated MLP that keeps only its input, in place of megatron-core's operations.

    It is one kernel each way, except a clamped gate, which consists of torch operations.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.function = config.activation_func

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """Return activation(gate) * up for [..., gate and up]."""
        if self.function is clamped_swiglu:
            return clamped_swiglu(gate_and_up)
        from dms_train.kernels.layers.triton_gate import geglu, swiglu

        return geglu(gate_and_up) if self.function is gelu_tanh else swiglu(gate_and_up)


class LayerBackend(NamedTuple):
    """Components of a decoder layer.

    Attributes:
        name: `local` or `transformer_engine`.
        reason: Reason for the choice.
        norm: Norms that are not fused with a linear layer.
        norm_linear: Projection out of the residual stream, after a norm.
        linear: Projection out of the residual stream without a norm.
        row: Projection back into the residual stream.
        fuses_norm: Whether `norm_linear` normalises its input.
        norm_name: Package that `norm` comes from.
        fp8: Whether the products of `row` and of `in_mlp` run in FP8.
    """

    name: str
    reason: str
    norm: type
    norm_linear: type
    linear: type
    row: type
    fuses_norm: bool
    norm_name: str
    fp8: bool = False

    def in_mlp(self, projection: type) -> type:
        """Return the class of a projection out of the residual stream that an MLP uses."""
        return fp8_products.in_fp8(projection) if self.fp8 else projection

    def describe(self, optimizer: Any) -> str:
        """Return one line for the log; the optimizer is Megatron's, or None."""
        text = f"{self.name} ({self.reason}), norms by {self.norm_name}"
        text += ", MLP and output projection in FP8" * self.fp8
        if optimizer is None:
            return text
        # Megatron takes the optimizer from any importable package, independent of the layers
        inner = type(optimizer_parts(optimizer)[0].optimizer)
        return f"{text}, optimizer {inner.__module__.partition('.')[0]} {inner.__name__}"


def choose(
    wanted: str,
    device: torch.device,
    *,
    fused: bool = False,
    adapts: bool = False,
    overlaps: bool = False,
    fp8: bool = False,
) -> LayerBackend:
    """Choose the layers that a configured name stands for on a device.

    Args:
        wanted: `parallel.layers`; `auto` is Transformer Engine where it can be imported and the
            device is a GPU, megatron-core's own layers elsewhere.
        device: Device of the training.
        fused: Whether the kernels around attention run (`kernels.dispatch.can_fuse`); norms are
            then kernels too.
        adapts: Whether the projections of attention have adapters (`mcore.layers.adapters`), which
            read the output of the norm.
        overlaps: `parallel.tp_comm_overlap` (`mcore.layers.overlap`).
        fp8: `parallel.fp8` (`mcore.layers.fp8`).

    Raises:
        ModelError: Transformer Engine or FP8 is configured and cannot run.
    """
    missing = _missing(device, adapts, overlaps)
    if fp8:
        _require_fp8(wanted, device, missing)
    if wanted == "transformer_engine" and missing:
        raise ModelError(f"parallel.layers=transformer_engine: {missing}; use parallel.layers=auto")
    norm, norm_name = (FusedRMSNorm, "triton") if fused else (RMSNorm, "torch")
    if wanted == "local" or missing:
        return LayerBackend(
            name="local",
            reason=missing if wanted == "auto" else "as configured",
            norm=norm,
            norm_linear=ColumnLinear,
            linear=ColumnLinear,
            row=RowLinear,
            fuses_norm=False,
            norm_name=norm_name,
        )
    return LayerBackend(
        name="transformer_engine",
        reason=f"version {te.get_te_version()}" + (" found" if wanted == "auto" else ""),
        norm=norm,
        norm_linear=te.TELayerNormColumnParallelLinear,
        linear=te.TEColumnParallelLinear,
        row=fp8_products.in_fp8(te.TERowParallelLinear) if fp8 else te.TERowParallelLinear,
        fuses_norm=True,
        norm_name=f"transformer_engine and {norm_name}",
        fp8=fp8,
    )


def _require_fp8(wanted: str, device: torch.device, missing: str) -> None:
    """Raise ModelError if the layers that a name stands for have no FP8 products."""
    reason = f"{missing}; set it to false" if missing else ""
    if wanted == "local":
        reason = "parallel.layers=local has no FP8 products; use transformer_engine"
    if reason := reason or fp8_products.missing(device):
        raise ModelError(f"parallel.fp8=true: {reason}")


def _missing(device: torch.device, adapts: bool, overlaps: bool) -> str:
    """Say why Transformer Engine cannot run; empty if it can."""
    if adapts:
        return "the adapters of method.train read norms that Transformer Engine does not return"
    if overlaps:
        return "parallel.tp_comm_overlap overlaps products of megatron-core's own layers"
    if device.type != "cuda":
        return f"Transformer Engine needs a GPU and training runs on the {device.type.upper()}"
    # megatron replaces an absent package by mocks, so importing the layers proves nothing
    return "" if te.HAVE_TE else "Transformer Engine cannot be imported"
