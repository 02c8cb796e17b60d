"""Adds a cache policy and continues a sheet with it: every second token leaves the window.

python examples/add_policy.py [MODEL]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from dms_train import LLM, SamplingParams
from dms_train.inference.policies.base import CachePolicy, PolicyKind, Slots
from dms_train.inference.policies.registry import register_policy
from dms_train.limits import AtLeast

SHEET = "1: Solve 7*k + 12 = 3*k + 40 for k.\n2: Solve -2*m - 9 = 5*m + 12 for m.\nSolution 1. "


@dataclass(frozen=True, slots=True, kw_only=True)
class EverySecondOptions:
    """`window`: newest tokens that all stay."""

    window: Annotated[int, AtLeast(1)] = 16


class EverySecond(CachePolicy):
    """Evicts tokens at odd positions once they are out of the window."""

    def __init__(self, window: int) -> None:
        self.window = window

    def evict_mask(self, slots: Slots, at: Tensor) -> Tensor:
        """bool [b, h, q, s]: which slots the queries at positions `at` [b, q] do not read."""
        position = slots.position[:, :, None, :]
        return (at[:, None, :, None] - position > self.window) & (position % 2 == 1)


def main() -> None:
    """Print an answer and what the cache has held."""
    register_policy(
        "every_second",
        PolicyKind(EverySecondOptions, lambda options, spec: EverySecond(options.window)),
    )
    model = sys.argv[1] if len(sys.argv) > 1 else "outputs/example/exports/final/hf"
    llm = LLM(model, policy="every_second", policy_options={"window": 32})
    output = llm.generate(SHEET, SamplingParams(max_tokens=100, temperature=0))[0]
    print(output.outputs[0].text)
    print(f"cr_factor {output.kv.cr_factor:.2f}, {output.kv.live_tokens:.1f} tokens held")


if __name__ == "__main__":
    main()
