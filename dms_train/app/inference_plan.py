"""The table of `dms-plan --inference`: latency of decoding steps on a named GPU."""

from __future__ import annotations

from collections.abc import Sequence

from dms_train.hf.architecture import Architecture
from dms_train.planning.decode_latency import decode_step
from dms_train.planning.gpus import Gpu

_HEADER = (
    f"{'batch':>6} {'length':>8} {'CR':>4} {'TFLOP':>9} {'GB read':>9} {'ms':>9} {'KV share':>9}"
)


def inference_table(
    architecture: Architecture,
    gpu: Gpu,
    batches: Sequence[int],
    lengths: Sequence[int],
    ratios: Sequence[float],
) -> str:
    """Return one line for each batch, length and compression ratio.

    Args:
        architecture: Architecture of the model.
        gpu: Model of the GPU.
        batches: Numbers of sequences in a step.
        lengths: Numbers of tokens in a sequence.
        ratios: Compression ratios, tokens over tokens held.
    """
    lines = [f"a decoding step on {gpu.label}, 16-bit weights and cache, peak speeds", _HEADER]
    for batch in batches:
        for length in lengths:
            for cr in ratios:
                step = decode_step(architecture, gpu, batch=batch, length=length, cr=cr)
                lines.append(
                    f"{batch:6} {length:8,} {cr:4g} {step.flops / 1e12:9.4f} "
                    f"{step.reads / 1e9:9.3f} {step.seconds * 1e3:9.4f} {step.kv_share:9.2%}"
                )
    return "\n".join(lines)
