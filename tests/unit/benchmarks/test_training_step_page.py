"""The page of the training step quotes its records where it says what limits a small model."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.records import RESULTS, ROOT

VOCABULARY = 49152 * 576  # weights of SmolLM2-135M, 30 layers of attention and MLP
WEIGHTS = VOCABULARY + 30 * 576 * (960 + 576 + 3 * 1536)
TOKENS = 32768  # of a step on the H200


def _rows(device: str) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / device / "train_step.json").read_text("utf-8"))["rows"]
    label, shape = "ours (local): teacher + KL + DMS", "smollm2-135m"
    return [
        row
        for row in rows
        if (row["label"], row["case"]["shape"]) == (label, shape) and "profile" in row
    ]


def test_the_page_says_what_limits_a_small_model() -> None:
    text = " ".join((ROOT / "docs/performance/training_step.md").read_text("utf-8").split())
    (here,), (there,) = _rows("nvidia_h200"), _rows("nvidia_h100_80gb_hbm3")
    # 6 operations for each weight and token of the student, 2 of the teacher
    vocabulary, everything = 8 * VOCABULARY * TOKENS, 8 * WEIGHTS * TOKENS
    rate = 1e3 * everything / here["profile"]["kinds"]["GEMM"]
    loss = here["profile"]["kinds"]["loss"]
    products = 1e3 * vocabulary / rate
    busy = there["profile"]["busy_ms"]
    share = (products + loss) / (1e3 * here["step_s"])
    for sentence in (
        f"have {everything / 1e12:.1f} TFLOP (8 for each weight and token) and run at "
        f"{rate / 1e12:.0f} TFLOP/s",
        f"has {vocabulary / 1e12:.1f} of the {everything / 1e12:.1f} TFLOP",
        f"At the rate above that is {products:.1f} ms. With the loss, {loss:.1f} ms, it is "
        f"{100 * share:.0f} % of the step.",
        f"instead of {here['tokens_per_s_gpu']:,.0f}. We aimed at 300,000 on an H100, where a step "
        f"reaches {there['tokens_per_s_gpu']:,.0f}. It takes {busy:.1f} ms of kernels for "
        f"{2 * TOKENS:,} tokens, so that without any gap it would reach "
        f"{round(2e3 * TOKENS / busy, -3):,.0f}.",
    ):
        assert sentence in text
