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
from dms_train.hf.architecture import Architecture
from dms_train.mcore.options import ParallelOptions
from dms_train.method.spec import PRESETS
from dms_train.planning.activations import Microbatch
from dms_train.planning.flops import forward_flops_per_token
from dms_train.planning.pipeline_stage import PipelineStage
from dms_train.planning.step_time import SentBytes, sent_bytes
from dms_train.tables import markdown_table

GPUS, TP, PP = 256, 8, 2
DP = GPUS // (TP * PP)
SAMPLES, LENGTH = 256, 8192
PAPER_STEP_S = 18.0
_PASSES = 4  # of the student: forward 1, backward 2; and the teacher's forward pass
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
        fits = (layout.tp, layout.pp, layout.sp, layout.overlap) == (_SOURCE_TP, 1, True, False)
        fits = fits and case.layers == "local"  # also measured with others, and in FP8
        if fits and (case.shape, case.kind) == (_SOURCE_SHAPE, "dms") and "profile" in row:
            kinds = row["profile"]["kinds"]
            hidden = sum(kinds.values()) - row["profile"]["busy_ms"]
            apart = (kinds["communication"] - hidden + kinds["optimizer"]) / 1e3
            source, length, _ = SHAPES[case.shape]
            sent = _sent(source, length, case.microbatches, tp=layout.tp)
            return Measured(
                case.model_flops / layout.world / (row["step_s"] - apart),
                sent.tensor / (kinds["communication"] / 1e3),
            )
    return None


def _sent(
    architecture: Architecture,
    length: int,
    microbatches: int,
    *,
    tp: int,
    pp: int = 1,
    copies: int = 1,
) -> SentBytes:
    """Return what a rank of the last stage sends in a step, as `dms-plan --trace` lists it."""
    parallel = ParallelOptions(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=True,
        params_dtype="bf16",
    )
    microbatch = Microbatch(
        architecture=architecture,
        method=PRESETS["dms"],
        parallel=parallel,
        samples=1,
        length=length,
        distills=True,
    )
    return sent_bytes(
        PipelineStage(microbatch=microbatch, rank=pp - 1, copies=copies, microbatches=microbatches)
    )


def step_s(rates: Measured, assumed: Assumptions) -> dict[str, float]:
    """Return the seconds of one step by part, and `total`."""
    a, microbatches = QWEN_32B, SAMPLES // DP
    vocabulary = 2 * a.vocab_size * a.hidden_size
    layers = forward_flops_per_token(a, LENGTH) - vocabulary
    # the last stage also computes the vocabulary, and the others wait for it
    operations = _PASSES * (layers / PP + vocabulary) * LENGTH / TP
    passes = operations / (rates.rate * assumed.narrow)
    sent = _sent(a, LENGTH, microbatches, tp=TP, pp=PP, copies=DP)
    tensor = assumed.exposed * sent.tensor / rates.link
    parts = {
        "passes": microbatches * passes,
        "tensor parallel": tensor,
        "pipeline transfers": sent.pipeline / assumed.network,
        "pipeline bubble": (PP - 1) * (passes + tensor / microbatches),
        "data parallel": assumed.data_exposed * sent.data / assumed.network,
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
