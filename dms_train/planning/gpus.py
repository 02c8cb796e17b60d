"""GPUs by name, and the constants of the plan, which were measured on one of them."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from dms_train.config.build import ConfigError

_CALIBRATION = "assets/planning.json"
_GIB = 2**30


class Gpu(NamedTuple):
    """One model of GPU; speeds from its data sheet, memory as CUDA reports it.

    Attributes:
        label: Name for messages.
        memory_gib: Usable memory.
        tflops: Dense bf16 products, 10^12 operations a second.
        memory_tbs: Memory bandwidth, 10^12 bytes a second.
        link_gbs: Bandwidth to the GPUs of its node, 10^9 bytes a second in each direction.
        network_gbs: Bandwidth to other nodes, one adapter of 400 (A100: 200) Gbit/s for each GPU.
        host_gbs: Bandwidth of copies from pinned host memory, 80 % of PCIe 5 x16 (A100: PCIe 4).
        has_fp8: Whether it has FP8 products.
    """

    label: str
    memory_gib: float
    tflops: float
    memory_tbs: float
    link_gbs: float
    network_gbs: float
    host_gbs: float
    has_fp8: bool = True

    @property
    def memory(self) -> int:
        """Usable memory in bytes."""
        return int(self.memory_gib * _GIB)


GPUS = {
    "a100_40gb": Gpu("A100 SXM 40 GB", 39.4, 312, 1.555, 300, 25, 25, has_fp8=False),
    "a100_80gb": Gpu("A100 SXM 80 GB", 79.1, 312, 2.039, 300, 25, 25, has_fp8=False),
    "h100": Gpu("H100 SXM 80 GB", 79.1, 989, 3.35, 450, 50, 50),
    "h200": Gpu("H200 SXM 141 GB", 139.7, 989, 4.8, 450, 50, 50),
}


class Calibration(NamedTuple):
    """Measured constants of the plan, from `benchmarks/plan_memory` unless stated otherwise.

    Attributes:
        activation_factor: Measured over counted bytes of what varies during a step.
        constant_bytes: In torch's allocator besides: workspaces of the matrix products.
        outside_bytes: Outside the allocator: CUDA's context and kernels.
        nccl_bytes: NCCL's buffers, where there are several processes.
        reserved_share: Reserved by the allocator over allocated, at their peaks.
        matmul_efficiency: Share of the peak that matrix products of layers reach.
        attention_efficiency: Share of the peak that attention reaches, forward and backward: about
            what `benchmarks/attention` measures for 32 heads of 128 and 8,192 tokens.
        traffic_factor: Passes over what a layer keeps, at full memory bandwidth.
        link_efficiency: Share of a link's bandwidth that collectives reach.
    """

    activation_factor: float
    constant_bytes: float
    outside_bytes: float
    nccl_bytes: float
    reserved_share: float
    matmul_efficiency: float
    attention_efficiency: float
    traffic_factor: float
    link_efficiency: float


@cache
def calibration() -> Calibration:
    """Return the constants in force."""
    return Calibration(**read_calibration()["constants"])


@cache
def read_calibration() -> dict[str, Any]:
    """Return the data file: the constants, and the device and command that measured them."""
    text = files("dms_train").joinpath(_CALIBRATION).read_text(encoding="utf-8")
    constants: dict[str, Any] = json.loads(text)
    return constants


def gpu(name: str) -> Gpu:
    """Return the GPU with this name.

    Raises:
        ConfigError: There is none.
    """
    if name not in GPUS:
        raise ConfigError(f"GPU {name!r}: unknown; choose one of {', '.join(GPUS)}")
    return GPUS[name]


def like(name: str, memory: int) -> Gpu:
    """Return the GPU that a driver calls `name`, with the memory in bytes that it reports.

    Speeds are those of the known GPU whose model the name contains, else of an H100.
    """
    models = {key.partition("_")[0]: known for key, known in GPUS.items()}
    gpu = next((known for model, known in models.items() if model in name.lower()), GPUS["h100"])
    return gpu._replace(label=name, memory_gib=memory / _GIB)
