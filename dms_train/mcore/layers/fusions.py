"""Fused operations on a GPU in place of Megatron's plain paths; a CPU keeps those.

Megatron-core takes these from Apex or Transformer Engine and has slow substitutes for them. Torch
has equivalents; where one of the two is importable nothing is replaced.
"""

from __future__ import annotations

from typing import Any

import torch

from dms_train.kernels.layers.clamped_gate import clamped_swiglu
from dms_train.mcore import compat


def apply(config: Any, device: torch.device, *, fused: bool) -> None:
    """Set what this device fuses in megatron's configuration, before a model is built.

    `fused`: whether the kernels around attention run (`kernels.dispatch.can_fuse`).
    """
    # megatron's name for the slot of the activation; `layer_spec` and `experts` put `FusedGate`
    # there. megatron's own clamped gate keeps three times the memory, and compiles a part of it.
    config.use_te_activation_func = fused or config.activation_func is clamped_swiglu
    if device.type == "cuda":
        compat.clip_in_few_kernels()
        config.gradient_accumulation_fusion = compat.accumulate_in_place(device)


def fuse_adam(optimizer: Any) -> None:
    """Let torch's AdamW update in one pass on a GPU; call it again after loading its state.

    A checkpoint holds the setting of the machine that wrote it.
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
