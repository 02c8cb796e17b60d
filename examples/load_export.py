"""Loads an export and its original, has both solve a sheet, and prints what their caches cost.

python examples/load_export.py [EXPORT] [ORIGINAL]
"""

from __future__ import annotations

import sys
from pathlib import Path

from dms_train import LLM, SamplingParams

ASSETS = Path(__file__).resolve().parents[1] / "dms_train" / "assets"
SHEET = "1: Solve 7*k + 12 = 3*k + 40 for k.\n2: Solve -2*m - 9 = 5*m + 12 for m.\nSolution 1. "


def main() -> None:
    """Print one line for each model."""
    export = sys.argv[1] if len(sys.argv) > 1 else "outputs/example/exports/final/hf"
    original = sys.argv[2] if len(sys.argv) > 2 else str(ASSETS / "exam_teacher")
    greedy = SamplingParams(max_tokens=250, temperature=0, stop=("\n\n",))
    for path in (original, export):
        llm = LLM(path)
        request = llm.generate(SHEET, greedy)[0]
        window = llm.spec.window if llm.spec else None
        print(f"{path} (window {window})")
        print(request.outputs[0].text)
        print(
            f"{request.kv.tokens} tokens, {request.kv.live_tokens:.1f} held a KV head at the end, "
            f"cr_factor {request.kv.cr_factor:.2f}, {request.kv.kv_reads:,.0f} KV reads\n"
        )


if __name__ == "__main__":
    main()
