"""The device of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dms_train.inference.errors import InferenceError


def require_device(device: str) -> None:
    """Refuse a device that this machine does not have.

    Args:
        device: As torch names it, such as `cpu`, `cuda` or `cuda:1`.

    Raises:
        InferenceError: There is no such device.
    """
    try:
        found = torch.device(device)
    except RuntimeError:
        raise InferenceError(f"device={device}: use cpu, cuda or cuda:1") from None
    if found.type != "cuda":
        return
    count = torch.cuda.device_count()
    if not count:
        raise InferenceError(f"device={device}: this machine has no GPU; use cpu")
    if (found.index or 0) >= count:
        raise InferenceError(f"device={device}: GPUs here are numbered from 0 to {count - 1}")


def sent(values: Any, device: torch.device) -> Tensor:
    """Numbers as a tensor on a device; the host does not wait for what a GPU computes before.

    Args:
        values: A list or an array of integers.
        device: Where they go.
    """
    on_host = torch.from_numpy(np.asarray(values))  # torch converts lists several times as slowly
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)


class Fetched:
    """Numbers on their way to the host, which does not wait for them before it needs them.

    Args:
        values: Memory of the host into which work that is launched already writes them; pinned
            where a GPU does.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.is_pinned():
            self._event = torch.cuda.Event()
            self._event.record()

    @classmethod
    def of(cls, values: Tensor) -> Fetched:
        """A copy of numbers that a device computes."""
        memory = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
        return cls(memory.copy_(values, non_blocking=True))

    def wait(self) -> Tensor:
        """The numbers on the host, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


@contextmanager
def launches_on(device: str) -> Iterator[None]:
    """Has kernels launched on a GPU such as `cuda:1`, while torch takes one thread of the host.

    `cuda` is the GPU that is current. What is left for the host is small, and every operation on
    more than 32,768 numbers would wait for a thread on each core, where threads of other processes
    may be running. On `cpu` nothing changes.
    """
    found, threads = torch.device(device), torch.get_num_threads()
    if found.type == "cpu":
        yield
        return
    torch.set_num_threads(1)
    try:
        with nullcontext() if found.index is None else torch.cuda.device(found):
            yield
    finally:
        torch.set_num_threads(threads)
