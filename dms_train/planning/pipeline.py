"""The order in which megatron-core's pipeline stages run their forward and backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Pass(NamedTuple):
    """One microbatch through one model chunk of a stage."""

    forward: bool
    chunk: int


def warmup_passes(rank: int, pp: int, vp: int, microbatches: int) -> int:
    """Return the number of forward passes of stage `rank` before its first backward pass.

    Args:
        rank: Number of the stage.
        pp: Pipeline stages.
        vp: Model chunks of a stage; above 1 the schedule is interleaved.
        microbatches: Number of microbatches per data-parallel rank and step.
    """
    if vp == 1:
        return min(pp - rank - 1, microbatches)
    return min(2 * (pp - rank - 1) + (vp - 1) * pp, microbatches * vp)


def passes(rank: int, pp: int, vp: int, microbatches: int) -> Iterator[Pass]:
    """Yield the passes of stage `rank` in order: 1F1B, or its interleaved form."""
    warmup = warmup_passes(rank, pp, vp, microbatches)
    total = microbatches * vp
    forward = [Pass(True, (index // pp) % vp) for index in range(total)]
    backward = [Pass(False, vp - 1 - (index // pp) % vp) for index in range(total)]
    yield from forward[:warmup]
    for forward_pass, backward_pass in zip(forward[warmup:], backward, strict=False):
        yield forward_pass
        yield backward_pass
    yield from backward[total - warmup :]


def bubble(pp: int, vp: int, microbatches: int) -> float:
    """Return the idle time of a stage as a share of its working time: (p - 1) / (m v)."""
    return (pp - 1) / (microbatches * vp)
