"""Warnings of other packages that every command hides."""

from __future__ import annotations

import warnings

# Issued at every start. The fallback that each names is tested.
_KNOWN = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "absl.logging is not installed",
    "MimoModelConfig is experimental",
    "full scope is deprecated",
    "The pad token id in the tokenizer collides",
    r"`torch\.distributed\.\w+` is deprecated",
    "The .grad attribute of a Tensor that is not a leaf Tensor",
    "The argument order of load has been changed",
    "torch.distributed is disabled, unavailable or uninitialized",
)


def hide_known_warnings() -> None:
    """Hide these warnings; call it before torch and megatron-core are imported."""
    for message in _KNOWN:
        warnings.filterwarnings("ignore", message=message)
