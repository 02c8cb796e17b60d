"""Time of a call with its spread, the memory it adds, and the limits of the machine."""

from __future__ import annotations

import importlib.util
import platform
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_QUANTILES = (0.5, 0.2, 0.8)
_CPU_REPEATS = 5
# Large enough to be limited by the memory and the tensor cores, not by launches.
_COPY_BYTES, _GEMM_SIZE = 2**32, 8192
_CPU_SHRINK = 32  # a CPU gets a copy and a GEMM's edge this much smaller


class Timing(NamedTuple):
    """Milliseconds: median, and the 20 % and 80 % quantiles."""

    median: float
    low: float
    high: float


def measure(call: Callable[[], Any], device: torch.device) -> Timing:
    """Time one call; on a GPU with triton's do_bench, which empties the L2 cache in between."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return Timing(*do_bench(call, quantiles=_QUANTILES))
    call()
    times = sorted(_seconds(call) * 1e3 for _ in range(_CPU_REPEATS))
    return Timing(times[_CPU_REPEATS // 2], times[1], times[-2])


def _seconds(call: Callable[[], Any]) -> float:
    since = time.perf_counter()
    call()
    return time.perf_counter() - since


def extra_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """Return the peak memory that one call takes in addition; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def ceilings(device: torch.device) -> dict[str, float]:
    """Measure bytes read plus written per second of a copy, and FLOP/s of a square bf16 product."""
    small = device.type != "cuda"
    size = _COPY_BYTES // (2 * _CPU_SHRINK if small else 2)
    edge = _GEMM_SIZE // (_CPU_SHRINK if small else 1)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device)
    a, b = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
    gemm = measure(lambda: a @ b, device)
    return {
        "copy_bytes_per_s": 2 * size / copy.median * 1e3,
        "gemm_flops_per_s": 2 * edge**3 / gemm.median * 1e3,
        "gemm_edge": edge,
    }


def device_name(device: torch.device) -> str:
    """Return the name under which a result is filed."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}"


def versions(device: torch.device) -> dict[str, str | None]:
    """Return the versions of all software that affects times."""
    by_name: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        import triton

        by_name |= {
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "cudnn": str(torch.backends.cudnn.version()),
        }
    return by_name


class Busy:
    """Share of the time in which a GPU computes, by NVML, while a block runs.

    Attributes:
        share: Mean of NVML's samples; None on a CPU or without nvidia-ml-py.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._over = device, threading.Event()
        self._seen: list[int] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.share: float | None = None

    def __enter__(self) -> Busy:
        if self._device.type == "cuda" and importlib.util.find_spec("pynvml"):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.share = statistics.fmean(self._seen) / 100 if self._seen else None

    def _watch(self) -> None:
        """Sample NVML, which has a new value every sixth of a second or less often."""
        while not self._over.wait(0.1):
            self._seen.append(torch.cuda.utilization(self._device))
