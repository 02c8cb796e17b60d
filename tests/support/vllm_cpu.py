"""vLLM's GPU engine on a CPU: `python -m tests.support.vllm_cpu FUNCTION FOLDER`.

The platform is taken for an H200. The real scheduler and model runner V2 run in this process, with
vLLM's own replacements for CUDA streams and events and with Triton's interpreter. FUNCTION, such
as `vllm_engine.generate`, is called with each job in FOLDER/jobs.json; FOLDER/results.json receives
the results. Without a module it is one of `vllm_engine`.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import triton.backends

from tests.support.interpreter import leave_out_idle_work, round_fp8_to_nearest

MEMORY = 2**34


def pretend_gpu() -> None:
    """Before vLLM is imported: one H200 for torch and for Triton."""
    for backend in triton.backends.backends.values():
        if "nvidia" in backend.driver.__module__:
            backend.driver.is_active = staticmethod(lambda: True)
    card = SimpleNamespace(major=9, minor=0, multi_processor_count=4, name="NVIDIA H200")
    card.total_memory = MEMORY
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda *_, **__: card
    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)
    torch.cuda.get_device_name = lambda *_, **__: card.name
    torch.cuda.mem_get_info = lambda *_: (MEMORY, MEMORY)


def pretend_platform() -> None:
    """After that: vLLM's CUDA platform, with tensors on the CPU."""
    import vllm.platforms as platforms
    from vllm.platforms import cuda

    platforms._current_platform = cuda.NonNvmlCudaPlatform()
    cuda.CudaPlatform = cuda.NonNvmlCudaPlatform
    cuda.NonNvmlCudaPlatform.dispatch_key = "CPU"
    communicator = "vllm.distributed.device_communicators.base_device_communicator"
    cuda.NonNvmlCudaPlatform.get_device_communicator_cls = classmethod(
        lambda _: f"{communicator}.DeviceCommunicatorBase"  # torch.distributed
    )
    import vllm.utils.platform_utils as utils

    utils.is_uva_available = lambda: True
    import vllm.v1.worker.cpu.shm  # noqa: F401 - replaces CUDA streams and events
    from vllm.v1.worker.cpu import buffer_utils as of_cpu
    from vllm.v1.worker.gpu import buffer_utils as of_gpu
    from vllm.v1.worker.gpu import model_runner

    of_gpu.is_uva_available = of_cpu.is_uva_available = lambda: True
    model_runner.DeviceMemoryProfiler = _NoProfiler


class _NoProfiler:
    consumed_memory = 0

    def __enter__(self) -> _NoProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def main() -> None:
    folder = Path(sys.argv[2])
    pretend_gpu()
    leave_out_idle_work()
    round_fp8_to_nearest()
    pretend_platform()
    from dms_train.vllm_plugin.plugin import register
    from tests.support.vllm_experts import register_operators

    register()
    register_operators()
    module, _, name = sys.argv[1].rpartition(".")
    function = getattr(importlib.import_module(f"tests.support.{module or 'vllm_engine'}"), name)
    results = [function(job) for job in json.loads((folder / "jobs.json").read_text())]
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
