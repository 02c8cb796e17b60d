"""Streams the tokens of an export and shows how many tokens its cache holds.

python examples/stream.py [EXPORT]
"""

from __future__ import annotations

import sys

from dms_train import LLM, SamplingParams

SHEET = "1: Solve 7*k + 12 = 3*k + 40 for k.\n2: Solve -2*m - 9 = 5*m + 12 for m.\nSolution 1. "


def main() -> None:
    """Print one line for every eighth forward pass."""
    export = sys.argv[1] if len(sys.argv) > 1 else "outputs/example/exports/final/hf"
    llm = LLM(export)
    printed = 0
    greedy = SamplingParams(max_tokens=250, temperature=0, stop=("\n\n",))
    for number, requests in enumerate(llm.stream(SHEET, greedy)):
        request = requests[0]
        if number % 8 == 0 or request.finished:
            text = request.outputs[0].text
            held, seen = request.kv.live_tokens, request.kv.tokens
            print(f"{seen:4d} tokens seen, {held:6.1f} held {'#' * round(held / 8):<40}", end=" ")
            print(repr(text[printed:]))
            printed = len(text)


if __name__ == "__main__":
    main()
