"""Device of an engine, and transfers between host and device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions


class HasOptions(Protocol):
    """Object that computes on the device of its options."""

    options: EngineOptions


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Owner = TypeVar("Owner", bound=HasOptions)


def require_device(device: str) -> None:
    """Fail if this machine does not have a device.

    Args:
        device: Name of a torch device, such as `cpu`, `cuda` or `cuda:1`.

    Raises:
        InferenceError: There is no such device.
    """
    try:
        target = torch.device(device)
    except RuntimeError:
        raise InferenceError(f"device={device}: use cpu, cuda or cuda:1") from None
    if target.type != "cuda":
        return
    count = torch.cuda.device_count()
    if not count:
        raise InferenceError(f"device={device}: this machine has no GPU; use cpu")
    if (target.index or 0) >= count:
        raise InferenceError(f"device={device}: GPUs here are numbered from 0 to {count - 1}")


def sent(values: Any, device: torch.device) -> Tensor:
    """Send numbers to a device; the host does not wait for earlier work of a GPU.

    Args:
        values: A list or an array of integers.
        device: Device of the result.
    """
    on_host = torch.from_numpy(np.asarray(values))  # torch is several times slower on lists
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)


class Fetched:
    """Numbers in flight to the host, which waits for them only when it needs them.

    Args:
        values: Host memory that launched work writes to; pinned if a GPU writes it.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.is_pinned():
            self._event = torch.cuda.Event()
            self._event.record()

    @classmethod
    def of(cls, values: Tensor) -> Fetched:
        """Launch the copy of numbers that a device computes."""
        memory = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
        return cls(memory.copy_(values, non_blocking=True))

    def wait(self) -> Tensor:
        """Wait for the numbers, and return them."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


@contextmanager
def launches_on(device: str) -> Iterator[None]:
    """Make `device` current, and limit torch to one CPU thread inside the block.

    The host has little to compute. Every operation on more than 32,768 numbers would wait for a
    thread on each core, where threads of other processes may be running. `cuda` is the current GPU.
    On `cpu` nothing changes.
    """
    target, threads = torch.device(device), torch.get_num_threads()
    if target.type == "cpu":
        yield
        return
    torch.set_num_threads(1)
    try:
        with nullcontext() if target.index is None else torch.cuda.device(target):
            yield
    finally:
        torch.set_num_threads(threads)


def launches(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Decorate a method that launches kernels: run it on its owner's device."""

    @wraps(method)
    def launched(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with launches_on(self.options.device):
            return method(self, *args, **kwargs)

    return launched
