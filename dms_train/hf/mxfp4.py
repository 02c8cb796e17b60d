"""MXFP4 weights: blocks of 32 numbers of four bits with a common power of two.

A number has one sign bit, two exponent bits and one mantissa bit (e2m1). The lower half of a byte
comes first. A scale is the exponent of a power of two plus 127 (e8m0); 255 is not a number.
See the OCP Microscaling Formats specification, version 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUFFIXES = BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the tensors [..., rows, blocks, 16] and [..., rows, blocks] of a quantised one."""
BLOCK = 32
"""Numbers of a block."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of blocks, which bfloat16 holds exactly.

    Args:
        blocks: uint8 [..., blocks, 16], two numbers in each byte.
        scales: uint8 [..., blocks].

    Returns:
        bfloat16 [..., 32 * blocks]; NaN for a scale of 255.
    """
    values = torch.tensor([*_POSITIVE, *(-x for x in _POSITIVE)])
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    powers = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    powers = powers.masked_fill(scales == 255, torch.nan)
    scaled = values[numbers.int()] * powers[..., None]
    return scaled.flatten(-2).bfloat16()
