"""A projected training step: Qwen2.5-32B on 256 GPUs, TP 8 x PP 2 x DP 16, from measured parts.

Measured: what one rank of the last stage computes (one GPU, the rank's own sizes), and how fast
collectives of tensor parallelism run (two GPUs). Assumed, as a range: the network between nodes,
how much of the communication hides behind products, and how much slower 256 GPUs run than one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

GPUS, TP, PP = 256, 8, 2
DP = GPUS // (TP * PP)
SAMPLES, LENGTH = 256, 8192
LAYERS, HIDDEN, VOCAB = 64, 5120, 152064
PARAMETERS = 32.8e9
PAPER_STEP_S = 18.0
# What travels for one layer and microbatch, each of s x h bf16 numbers: all-gather and
# reduce-scatter around attention and around the MLP, in the student's forward pass, the teacher's,
# and the backward pass, which gathers the inputs of both projections again.
COLLECTIVES = 4 + 4 + 6
COMPUTE_SHAPE, COMPUTE_LAYOUT = "qwen2.5-32b-rank", "dp1"
LINK_SHAPE, LINK_LAYOUT = "qwen2.5-7b", "tp2_sp"


class Assumptions(NamedTuple):
    """What was not measured.

    Attributes:
        exposed: Share of tensor-parallel communication that no product hides.
        network: Bytes per second of one GPU between nodes.
        hidden_data: Share of the data-parallel communication that hides behind the passes.
        jitter: Factor on the whole step for the slowest of many ranks.
    """

    name: str
    exposed: float
    network: float
    hidden_data: float
    jitter: float


CASES = (
    Assumptions("favourable", 0.5, 45e9, 0.8, 1.03),
    Assumptions("central", 1.0, 40e9, 0.5, 1.08),
    Assumptions("unfavourable", 1.0, 25e9, 0.0, 1.20),
)


class Measured(NamedTuple):
    """Parts of a step.

    Attributes:
        microbatch_s: Of one rank, forward and backward, teacher included.
        link: Bytes per second and GPU of collectives within a node.
    """

    microbatch_s: float
    link: float


def _find(rows: list[dict[str, Any]], shape: str, layout: dict[str, Any]) -> dict[str, Any] | None:
    for row in rows:
        case = row["case"]
        same = all(case["layout"][key] == value for key, value in layout.items())
        if case["shape"] == shape and case["kind"] == "dms" and same and "profile" in row:
            return row
    return None


def measured(rows: list[dict[str, Any]]) -> Measured | None:
    """What the projection needs of `train_step.json`; None when a row is missing."""
    rank = _find(rows, COMPUTE_SHAPE, {"tp": 1, "pp": 1, "dp": 1})
    link = _find(rows, LINK_SHAPE, {"tp": 2, "pp": 1, "sp": True})
    if rank is None or link is None:
        return None
    # the optimizer's share is counted apart: with 16 copies a rank updates a sixteenth
    passes = rank["step_s"] - rank["profile"]["kinds"].get("optimizer", 0.0) / 1e3
    travelled = _tensor_bytes(tp=2, layers=28, hidden=3584) * link["case"]["microbatches"]
    seconds = link["profile"]["kinds"]["communication"] / 1e3
    return Measured(passes / rank["case"]["microbatches"], travelled / seconds)


def _tensor_bytes(tp: int, layers: int, hidden: int) -> float:
    """Sent by one rank for one microbatch of one stage."""
    return COLLECTIVES * layers * LENGTH * hidden * 2 * (tp - 1) / tp


def step_s(found: Measured, assumed: Assumptions) -> dict[str, float]:
    """Seconds of one step by part, and `total`."""
    microbatches = SAMPLES // DP
    tensor = assumed.exposed * _tensor_bytes(TP, LAYERS // PP, HIDDEN) / found.link
    # student and teacher of one microbatch forward, one gradient of the same size backward
    pipeline = 2 * 2 * LENGTH * HIDDEN * 2 / TP / assumed.network
    passes = microbatches * found.microbatch_s
    own = PARAMETERS / (TP * PP)
    data = own * (4 + 2) * (DP - 1) / DP / assumed.network * (1 - assumed.hidden_data)
    parts = {
        "passes": passes,
        "tensor parallel": microbatches * tensor,
        "pipeline": microbatches * pipeline,
        "bubble": (PP - 1) * (found.microbatch_s + tensor),
        "data parallel": data,
    }
    parts["stragglers"] = (assumed.jitter - 1) * sum(parts.values())
    return {**parts, "total": sum(parts.values())}


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The projection as Markdown; nothing when it cannot be made."""
    found = measured(rows)
    if found is None:
        return
    yield (
        f"One microbatch on one rank of the last stage: {found.microbatch_s * 1e3:.0f} ms; "
        f"collectives within a node: {found.link / 1e9:.0f} GB/s sent by each GPU.\n"
    )
    cases = {assumed: step_s(found, assumed) for assumed in CASES}
    parts = list(next(iter(cases.values())))
    yield "| | " + " | ".join(parts) + " | tokens/s per GPU |"
    yield "|---|" + "---|" * (len(parts) + 1)
    for assumed, seconds in cases.items():
        each = SAMPLES * LENGTH / seconds["total"] / GPUS
        cells = [f"{seconds[part]:.2f} s" for part in parts]
        yield f"| {assumed.name} | " + " | ".join(cells) + f" | {each:,.0f} |"
    paper = SAMPLES * LENGTH / PAPER_STEP_S / GPUS
    yield f"| the paper | " + " | " * (len(parts) - 1) + f" {PAPER_STEP_S:.0f} s | {paper:,.0f} |"
