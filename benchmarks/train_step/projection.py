"""A projected training step: Qwen2.5-32B on 256 GPUs with TP 8 x PP 2 x DP 16.

Measured, on Qwen2.5-7B with TP 2 and sequence parallelism: the rate of everything except
communication, and the speed of tensor-parallel collectives. Counted: operations and bytes. Assumed,
as a range: how much slower the narrower products of TP 8 are, the network between nodes, how much
communication overlaps with products, and how much longer 256 GPUs wait for the slowest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.tables import Column, field, table
from benchmarks.train_step.shapes import QWEN_32B, SHAPES, Case
from dms_train.planning.flops import forward_flops_per_token
from dms_train.planning.memory import parameter_count
from dms_train.tables import markdown_table

GPUS, TP, PP = 256, 8, 2
DP = GPUS // (TP * PP)
SAMPLES, LENGTH = 256, 8192
PAPER_STEP_S = 18.0
_PASSES = 4  # of the student: forward 1, backward 2; and the teacher's forward pass
# Communicated for one layer and microbatch, each of s x h bf16 numbers: all-gather and
# reduce-scatter around the attention and around the MLP in two forward passes and in the backward
# pass, which also gathers the inputs of both projections again.
_COLLECTIVES = 4 + 4 + 6
_SOURCE_SHAPE, _SOURCE_TP = "qwen2.5-7b", 2


class Assumptions(NamedTuple):
    """Values that were not measured.

    Attributes:
        narrow: Rate of a rank with TP 8 divided by the rate of a rank with TP 2.
        exposed: Share of tensor-parallel communication that does not overlap with products.
        network: Bytes per second of one GPU between nodes.
        data_exposed: Share of data-parallel communication that does not overlap with the passes.
        waits: Share added to the step for the slowest of many ranks.
    """

    name: str
    narrow: float
    exposed: float
    network: float
    data_exposed: float
    waits: float


CASES = (
    Assumptions("favourable", 0.95, 0.5, 45e9, 0.2, 0.03),
    Assumptions("central", 0.85, 0.7, 40e9, 0.5, 0.08),
    Assumptions("unfavourable", 0.70, 1.0, 25e9, 1.0, 0.20),
)


ASSUMED: tuple[Column, ...] = (
    ("assumed", field("name")),
    ("narrower products", lambda row: f"x {row['narrow']:.2f}"),
    ("exposed", field("exposed", ".0%")),
    ("network", lambda row: f"{row['network'] / 1e9:.0f} GB/s"),
    ("data exposed", field("data_exposed", ".0%")),
    ("waits", field("waits", ".0%")),
)


class Measured(NamedTuple):
    """Rates of one GPU.

    Attributes:
        rate: Model FLOP/s, without the optimizer and exposed communication.
        link: Bytes sent per second of communication.
    """

    rate: float
    link: float


def measured(rows: list[dict[str, Any]]) -> Measured | None:
    """Return the measured rates in `train_step.json`; None if they were not measured."""
    for row in rows:
        case = Case.from_dict(row["case"])
        layout = case.layout
        fits = (layout.tp, layout.pp, layout.sp) == (_SOURCE_TP, 1, True)
        if fits and (case.shape, case.kind) == (_SOURCE_SHAPE, "dms") and "profile" in row:
            kinds = row["profile"]["kinds"]
            hidden = sum(kinds.values()) - row["profile"]["busy_ms"]
            apart = (kinds["communication"] - hidden + kinds["optimizer"]) / 1e3
            source, length, _ = SHAPES[case.shape]
            sent = case.microbatches * _tensor_bytes(
                source.num_layers, source.hidden_size, length, layout.tp
            )
            return Measured(
                case.model_flops / layout.world / (row["step_s"] - apart),
                sent / (kinds["communication"] / 1e3),
            )
    return None


def _tensor_bytes(layers: int, hidden: int, length: int, tp: int) -> float:
    """Return the bytes that one rank of tensor parallelism sends for one microbatch."""
    return _COLLECTIVES * layers * length * hidden * 2 * (tp - 1) / tp


def step_s(rates: Measured, assumed: Assumptions) -> dict[str, float]:
    """Return the seconds of one step by part, and `total`."""
    a, microbatches = QWEN_32B, SAMPLES // DP
    vocabulary = 2 * a.vocab_size * a.hidden_size
    layers = forward_flops_per_token(a, LENGTH) - vocabulary
    # the last stage also computes the vocabulary, and the others wait for it
    operations = _PASSES * (layers / PP + vocabulary) * LENGTH / TP
    passes = operations / (rates.rate * assumed.narrow)
    tensor = assumed.exposed * _tensor_bytes(a.num_layers // PP, a.hidden_size, LENGTH, TP)
    tensor /= rates.link
    # student and teacher of a microbatch forward, and the same backward
    pipeline = 2 * 2 * LENGTH * a.hidden_size * 2 / TP / assumed.network
    # fp32 gradients are reduced and bf16 weights gathered
    data = parameter_count(a) / (TP * PP) * (4 + 2) * (DP - 1) / DP / assumed.network
    parts = {
        "passes": microbatches * passes,
        "tensor parallel": microbatches * tensor,
        "pipeline transfers": microbatches * pipeline,
        "pipeline bubble": (PP - 1) * (passes + tensor),
        "data parallel": assumed.data_exposed * data,
    }
    parts["waits"] = assumed.waits * sum(parts.values())
    return {**parts, "total": sum(parts.values())}


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the projection as Markdown; nothing if it cannot be made."""
    rates = measured(rows)
    if rates is None:
        return
    yield (
        f"Measured on each GPU: {rates.rate / 1e12:.0f} model-TFLOP/s outside exposed "
        f"communication and optimizer, {rates.link / 1e9:.0f} GB/s sent by collectives within a "
        "node.\n"
    )
    yield table(ASSUMED, [assumed._asdict() for assumed in CASES])
    cases = {assumed.name: step_s(rates, assumed) for assumed in CASES}
    parts = list(next(iter(cases.values())))
    steps = [
        [name, *(f"{seconds[part]:.2f}" for part in parts), *_rates(seconds["total"])]
        for name, seconds in cases.items()
    ]
    steps.append(
        ["the paper", *[""] * (len(parts) - 1), f"{PAPER_STEP_S:.0f}", *_rates(PAPER_STEP_S)]
    )
    yield "\n" + markdown_table(["seconds", *parts, "tokens/s/GPU", "model-TFLOP/s/GPU"], steps)


def _rates(seconds: float) -> list[str]:
    tokens = SAMPLES * LENGTH / seconds / GPUS
    flops = _PASSES * forward_flops_per_token(QWEN_32B, LENGTH) * tokens
    return [f"{tokens:,.0f}", f"{flops / 1e12:.0f}"]
