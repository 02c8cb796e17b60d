"""What a GPU does in fewer passes over memory than megatron's plain paths; a CPU keeps those.

Megatron-core looks for these in Apex or Transformer Engine and has slow stand-ins for them. Torch
has what it takes; where one of the two is importable nothing is replaced.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import utils as megatron_utils
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers
from torch import Tensor

from dms_train.mcore import compat


def apply(config: Any, device: torch.device, *, fused: bool) -> None:
    """Set what this device fuses in megatron's configuration, before a model is built.

    `fused` says whether the kernels beside attention run (`kernels.api.fuses`).
    """
    # megatron's name for its slot of an activation; the function in it is ours (see `layer_spec`)
    config.use_te_activation_func = fused
    if device.type == "cuda":
        _clip_in_few_kernels()
        config.gradient_accumulation_fusion = _accumulates_in_place(device)


def _clip_in_few_kernels() -> None:
    """Megatron's stand-ins wait for the GPU once for every parameter."""
    if clip_grads.l2_norm_impl is megatron_utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _l2_norm
        clip_grads.multi_tensor_scale_impl = _scale


def _l2_norm(
    _chunk: int, _flag: Tensor, lists: list[list[Tensor]], _per_tensor: bool
) -> tuple[Tensor, None]:
    norms = torch.stack(torch._foreach_norm(lists[0]))
    return torch.linalg.vector_norm(norms).reshape(1), None


def _scale(_chunk: int, _flag: Tensor, lists: list[list[Tensor]], factor: float) -> None:
    """Multiplies in place: megatron names the same tensors twice."""
    torch._foreach_mul_(lists[1], factor)


def _accumulates_in_place(device: torch.device) -> bool:
    """Let weight gradients be added to the fp32 buffer by the product that computes them."""
    if layers._grad_accum_fusion_available:
        return True
    try:
        sums = torch.zeros(16, 16, device=device)
        one = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
        _add_weight_gradient(one, one, sums)
        _add_weight_gradient(one, one, sums)
        if (sums != 32.0).any():
            return False
    except (AttributeError, TypeError, RuntimeError):  # a torch without products of mixed precision
        return False
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=_add_weight_gradient
    )
    layers._grad_accum_fusion_available = True
    return True


def _add_weight_gradient(inputs: Tensor, d_out: Tensor, sums: Tensor) -> None:
    """sums [out, in] float32 += d_out^T inputs for d_out [tokens, out] and inputs [tokens, in]."""
    if inputs.dtype == torch.float32:
        sums.addmm_(d_out.t(), inputs)
    else:
        torch.ops.aten.addmm.dtype_out(sums, d_out.t(), inputs, torch.float32, out=sums)


def fuse_adam(optimizer: Any) -> None:
    """Let torch's AdamW update in one pass on a GPU; to be called again after loading its state.

    What a checkpoint says about it belongs to the machine that wrote it.
    """
    for part in compat.optimizer_parts(optimizer):
        inner = part.optimizer
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            continue
        for group in inner.param_groups:
            on_gpu = any(parameter.is_cuda for parameter in group["params"])
            group["fused"] = True if on_gpu else None
            for parameter in group["params"] if on_gpu else ():
                state = inner.state.get(parameter)
                if state and "step" in state:
                    state["step"] = state["step"].to(parameter.device)
