"""Measured decode steps compared with the latency model of the DMS paper (appendix G)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.serve.models import architecture
from benchmarks.serve.tables import best
from benchmarks.tables import Column, field, table
from dms_train.config.build import ConfigError
from dms_train.planning.decode_latency import decode_step
from dms_train.planning.gpus import GPUS, Gpu

_ENGINES = ("DMS", "dense")  # with 16-bit weights and cache, like the latency model


def known_gpu(device: str) -> Gpu:
    """Return the GPU whose name is a word of what CUDA calls the device.

    Raises:
        ConfigError: The device matches no name in `GPUS`.
    """
    words = device.lower().split()
    for name, gpu in GPUS.items():
        if name in words:
            return gpu
    raise ConfigError(f"{device}: its speeds are not known; give a record of {', '.join(GPUS)}")


COLUMNS: tuple[Column, ...] = (
    ("model", field("shape")),
    ("batch", field("sequences")),
    ("context", field("context")),
    ("engine", field("engine")),
    ("tokens held", field("live")),
    ("predicted ms", field("predicted_ms", ".2f")),
    ("measured ms", field("step_ms", ".2f")),
    ("predicted / measured", lambda row: f"{row['predicted_ms'] / row['step_ms']:.2f}"),
)


def latency_table(cases: list[dict[str, Any]], gpu: Gpu) -> str:
    """Return a row for each case of this engine, with the prediction for the tokens it held.

    Args:
        cases: Rows of a stored record.
        gpu: GPU on which they were measured.
    """
    return table(
        COLUMNS, [{**case, "predicted_ms": _predicted(case, gpu)} for case in _ours(cases)]
    )


def summary(cases: list[dict[str, Any]], gpu: Gpu) -> Iterator[str]:
    """Yield a line for each model: accuracy of the predicted steps and of the predicted savings.

    Args:
        cases: As in `latency_table`.
        gpu: As in `latency_table`.
    """
    ours = _ours(cases)
    for shape in dict.fromkeys(case["shape"] for case in ours):
        mine = [case for case in ours if case["shape"] == shape]
        shares = [_predicted(case, gpu) / case["step_ms"] for case in mine]
        line = f"{shape}: predicted / measured is {min(shares):.2f} to {max(shares):.2f}"
        most = max(case["sequences"] for case in mine)
        pair = [best([c for c in mine if c["sequences"] == most], name, "") for name in _ENGINES]
        if all(pair):
            dms, dense = pair
            predicted = _predicted(dms, gpu) / _predicted(dense, gpu)
            line += (
                f"; with {most} sequences DMS takes {predicted:.2f} of the dense step as predicted "
                f"and {dms['step_ms'] / dense['step_ms']:.2f} as measured"
            )
        yield f"{line}."


def _ours(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    mine = [case for case in cases if case["engine"] in _ENGINES and "step_ms" in case]
    return sorted(mine, key=lambda c: (c["shape"], c["engine"], c["context"], c["sequences"]))


def _predicted(case: dict[str, Any], gpu: Gpu) -> float:
    """Return the predicted milliseconds of a step for the tokens that a case held."""
    sizes = architecture(case["shape"])
    step = decode_step(sizes, gpu, batch=case["sequences"], length=case["live"])
    return 1e3 * step.seconds
