"""Device of the program, chosen once, at start-up, in this module only.

megatron-core names `torch.cuda` in its layers, schedules, optimizers and random-number tracker.
Without CUDA, `start` redirects those names to the CPU, so that the same Megatron code runs with
gloo, whose groups then share one device. With CUDA nothing is patched.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from dms_train.mcore import compat

_CPU = torch.device("cpu")
_TO_CUDA, _TYPE = torch.Tensor.cuda, torch.Tensor.type
_cpu_runtime: _CpuRuntime | None = None


def _names_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Redirection of `device="cuda"`, `Tensor.cuda()` and the type string Megatron compares."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _TO_CUDA:
            return args[0]
        if not kwargs:  # most of the thousands of calls in a step end here
            if func is _TYPE and len(args) == 1:
                # optimizers pick a parameter class by comparing with 'torch.cuda.FloatTensor'
                return func(args[0]).replace("torch.", "torch.cuda.", 1)
            return func(*args)
        if _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


class _SameStateWarning(logging.Filter):
    """Filter for Megatron's warning about random states; on a CPU there is only one state."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _sharing_gloo() -> type:
    """Return torch's gloo group, but with the device of the first one in each further group.

    The thread of a device wakes up a hundred times a second. Megatron makes dozens of groups in
    every process; with a device for each, a few processes keep two cores busy.
    """
    gloo: Any = dist.ProcessGroupGloo
    devices: list[Any] = []

    class SharingGloo(gloo):
        def __init__(
            self, store: dist.Store, rank: int, size: int, timeout: timedelta, **others: Any
        ) -> None:
            if not devices:
                super().__init__(store, rank, size, timeout, **others)
                devices.extend(self.options._devices)
                return
            options = gloo._Options()
            options._devices, options._threads = devices, 2 * len(devices)
            options._timeout = timeout
            for name, value in others.items():  # `enable_reconfigure` of torch 2.14
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    return SharingGloo


class _CpuRuntime:
    """Names that are redirected while Megatron runs on the CPU; `stop` restores them."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        self._filter = _SameStateWarning()
        self._mode = _CudaMeansCpu()
        self._logger = ""

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def start(self) -> None:
        generator = torch.default_generator
        get_state = lambda *_, **__: generator.get_state()  # noqa: E731
        self._replace(torch.cuda, "current_device", lambda: _CPU)
        self._replace(torch.cuda, "synchronize", lambda *_, **__: None)
        # Megatron asks for the stream, and then waits for events on it that only CUDA graphs leave.
        self._replace(torch.cuda, "current_stream", lambda *_, **__: None)
        # Without CUDA torch only queues the next three, so the tracker would fork nothing.
        self._replace(torch.cuda, "manual_seed", generator.manual_seed)
        self._replace(torch.cuda, "get_rng_state", get_state)
        self._replace(torch.cuda.random, "get_rng_state", get_state)
        set_state = lambda state, *_, **__: generator.set_state(state)  # noqa: E731
        self._replace(dist.distributed_c10d, "ProcessGroupGloo", _sharing_gloo())
        owner, name = compat.rng_state_setter()
        self._replace(owner, name, set_state)
        logging.getLogger(owner.__name__).addFilter(self._filter)
        self._logger = owner.__name__
        # advice about GPUs only
        warnings.filterwarnings("ignore", message="When using async grad allreduce")
        self._mode.__enter__()

    def stop(self) -> None:
        self._mode.__exit__(None, None, None)
        logging.getLogger(self._logger).removeFilter(self._filter)
        for owner, name, value in reversed(self._replaced):
            setattr(owner, name, value)


def start() -> torch.device:
    """Choose the device of this process and make megatron use it; safe to call again."""
    global _cpu_runtime
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if _cpu_runtime is None:
        _cpu_runtime = _CpuRuntime()
        _cpu_runtime.start()
    return _CPU


def stop() -> None:
    """Undo `start`; does nothing with CUDA."""
    global _cpu_runtime
    if _cpu_runtime is not None:
        _cpu_runtime.stop()
        _cpu_runtime = None
