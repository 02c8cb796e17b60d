"""Products in FP8 by Transformer Engine's layers (`parallel.fp8`).

Each tensor is scaled by its largest absolute value at that time (current scaling), in e4m3 in the
forward pass and in e5m2 for gradients. Nothing is remembered between passes, so that a checkpoint
holds no state of it. A layer enters FP8 itself. Recomputed passes and the teacher therefore use the
same products, and layers that are not wrapped stay in bf16.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from torch import Tensor

from dms_train.mcore.options import FP8_CAPABILITY


class FP8Products:
    """Mixin of a layer of Transformer Engine: its products run in FP8.

    Attributes:
        active: False while the products run in bf16 (`paused`).
    """

    active = True

    def forward(self, x: Tensor) -> Any:
        """Return what the layer returns for x."""
        with _autocast() if self.active else contextlib.nullcontext():
            return super().forward(x)  # type: ignore[misc]

    def get_extra_state(self) -> Tensor:
        """Return the state of a layer in bf16, which has none."""
        return torch.empty(0, dtype=torch.uint8)


@functools.cache
def in_fp8(layer: type) -> type:
    """Return a class of the same layer with products in FP8."""
    return type(f"FP8{layer.__name__}", (FP8Products, layer), {})


@contextlib.contextmanager
def paused(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Run the products of models in bf16 inside the block."""
    modules = [m for model in models for m in model.modules() if isinstance(m, FP8Products)]
    for module in modules:
        module.active = False
    try:
        yield
    finally:
        for module in modules:
            module.active = True


def missing(device: torch.device) -> str:
    """Say why Transformer Engine, which is installed, has no FP8 products; empty if it has."""
    if not hasattr(te.te.pytorch, "autocast"):
        return f"Transformer Engine {te.get_te_version()} has no `autocast`; install 2.11"
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        needed, own = (".".join(map(str, pair)) for pair in (FP8_CAPABILITY, capability))
        return f"needs a GPU of compute capability {needed} and this one has {own}; set it to false"
    return ""


def _autocast() -> Any:
    return te.te.pytorch.autocast(enabled=True, recipe=_recipe())


@functools.cache
def _recipe() -> Any:
    recipe = te.te.common.recipe
    return recipe.Float8CurrentScaling(fp8_format=recipe.Format.HYBRID)
