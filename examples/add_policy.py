"""Adds a cache policy and continues a sheet with it: the tokens with the largest values stay.

python examples/add_policy.py [MODEL]
"""

from __future__ import annotations

import sys

from torch import Tensor

from dms_train import LLM, SamplingParams
from dms_train.inference.policies.base import PolicyKind
from dms_train.inference.policies.registry import register_policy
from dms_train.inference.policies.score_policy import ScoreOptions, ScorePolicy

SHEET = "1: Solve 7*k + 12 = 3*k + 40 for k.\n2: Solve -2*m - 9 = 5*m + 12 for m.\nSolution 1. "


class LargeValues(ScorePolicy):
    """Keep the newest tokens, and those before them whose values are largest."""

    protected = 16

    def score(self, keys: Tensor, values: Tensor, attention: Tensor | None) -> Tensor:
        """Return the squared norm of every value, [b, h, s]; the highest scores stay."""
        return values.square().sum(-1)


POLICY = PolicyKind(ScoreOptions, lambda options, spec: LargeValues(options))


def main() -> None:
    """Print an answer and what the cache has held."""
    register_policy("large_values", POLICY)
    model = sys.argv[1] if len(sys.argv) > 1 else "outputs/example/exports/final/hf"
    llm = LLM(model, policy="large_values", policy_options={"budget": 48, "interval": 16})
    output = llm.generate(SHEET, SamplingParams(max_tokens=100, temperature=0))[0]
    print(output.outputs[0].text)
    print(f"cr_factor {output.kv.cr_factor:.2f}, {output.kv.live_tokens:.1f} tokens held")


if __name__ == "__main__":
    main()
