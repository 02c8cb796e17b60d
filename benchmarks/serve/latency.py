"""Measured decode steps beside the latency model of the DMS paper (appendix G)."""

from __future__ import annotations

from typing import Any

from benchmarks.serve.models import architecture
from dms_train.config.build import ConfigError
from dms_train.config.decode_latency import decode_step
from dms_train.config.gpus import GPUS, Gpu

_ENGINES = ("DMS", "dense")  # with 16-bit weights and cache, as the model counts


def known_gpu(device: str) -> Gpu:
    """The GPU whose name is a word of what CUDA calls the device.

    Raises:
        ConfigError: None of `GPUS` is.
    """
    words = device.lower().split()
    for name, gpu in GPUS.items():
        if name in words:
            return gpu
    raise ConfigError(f"{device}: its speeds are not known; give a record of {', '.join(GPUS)}")


def latency_table(cases: list[dict[str, Any]], gpu: Gpu) -> str:
    """Markdown: a row for each case of this engine, predicted for the tokens that it held.

    Args:
        cases: Of a stored record.
        gpu: Where they were measured.
    """
    rows = [
        "| model | batch | context | engine | tokens held | predicted ms | measured ms "
        "| predicted / measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ours = [case for case in cases if case["engine"] in _ENGINES and "step_ms" in case]
    for case in sorted(ours, key=lambda c: (c["shape"], c["engine"], c["context"], c["sequences"])):
        sizes, held = architecture(case["shape"]), case["live"]
        step = decode_step(sizes, gpu, batch=case["sequences"], length=held)
        predicted, measured = 1e3 * step.seconds, case["step_ms"]
        rows.append(
            f"| {case['shape']} | {case['sequences']} | {case['context']} | {case['engine']} "
            f"| {held} | {predicted:.2f} | {measured:.2f} | {predicted / measured:.2f} |"
        )
    return "\n".join(rows)
