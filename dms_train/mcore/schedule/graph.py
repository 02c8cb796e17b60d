"""The forward and backward passes of a step as a CUDA graph: one launch instead of thousands.

A small model's kernels take less time than the host needs to launch them one by one. A graph
repeats the same kernels on the same memory, so it serves steps that differ in their data alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dms_train.data.batches import Batch
from dms_train.mcore.errors import ModelError
from dms_train.method.plan import StepPlan

# Computes passes over microbatches with a token scale; the reports of the loss.
Passes = Callable[[list[Batch], Tensor], list[Any]]

_OPTION = "stage.pretrain.cuda_graph=true"
_EAGER_STEPS = 2  # kernels are compiled, plans chosen and constants made before the capture


class StepInputs:
    """Copies of a step's tensors, at addresses that stay.

    Args:
        batches: Microbatches, none with packed documents, whose number per sample varies.
        scale: Token scale, float64 [].

    Raises:
        ModelError: Documents are packed.
    """

    def __init__(self, batches: list[Batch], scale: Tensor) -> None:
        if any(batch.documents is not None for batch in batches):
            raise ModelError(f"{_OPTION}: packed documents vary in number; set data.packing=false")
        self.batches = [batch.map(torch.clone) for batch in batches]
        self.scale = scale.clone()

    def fill(self, batches: list[Batch], scale: Tensor) -> None:
        """Copy the tensors of another step.

        Raises:
            ModelError: They have other shapes.
        """
        own, given = _tensors(self.batches, self.scale), _tensors(batches, scale)
        shapes = [[tuple(tensor.shape) for tensor in each] for each in (own, given)]
        if shapes[0] != shapes[1]:
            kinds = [f"{len(each) // 4} of shape {list(each[1])}" for each in shapes]
            raise ModelError(
                f"{_OPTION}: the microbatches of a step changed from {kinds[0]} to {kinds[1]}; set "
                "it to false"
            )
        torch._foreach_copy_(own, given)


def _tensors(batches: list[Batch], scale: Tensor) -> list[Tensor]:
    return [scale, *(tensor for batch in batches for tensor in batch[:4])]


class _Captured(NamedTuple):
    """A graph with the memory it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    reports: list[Any]


class PassGraph:
    """Runs passes eagerly in the first steps, then captures them and replays the graph.

    Gradients are added to megatron's buffers, which stay where they are. The reduction of the
    gradients and the update of the weights are not part of the graph.

    Args:
        device: Where the training computes.

    Raises:
        ModelError: That is not a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        require_gpu(device)
        self._stream = torch.cuda.Stream(device)
        self._eager_steps = 0
        self._captured: _Captured | None = None

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Inside the block the GPU's work is queued on the stream that is captured.

        Autograd accumulates a gradient on the stream on which its parameter was first used, so the
        gradient buffers are built inside such a block, and passes run inside one.
        """
        outer = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def release(self) -> None:
        """Give back the memory of the graph; the next steps run eagerly and capture another."""
        self._captured, self._eager_steps = None, 0

    def run(self, passes: Passes, batches: list[Batch], scale: Tensor) -> list[Any]:
        """The reports of `passes`; valid until the next call. To be called inside `stream`.

        Args:
            passes: The same computation in every call.
            batches: This step's microbatches, of the same shapes in every call.
            scale: Its token scale, float64 [].

        Raises:
            ModelError: The passes cannot be captured, or the shapes changed.
        """
        if self._eager_steps < _EAGER_STEPS:
            self._eager_steps += 1
            return passes(batches, scale)
        if self._captured is None:
            self._captured = self._capture(passes, StepInputs(batches, scale))
        self._captured.inputs.fill(batches, scale)
        self._captured.graph.replay()
        return self._captured.reports

    def _capture(self, passes: Passes, inputs: StepInputs) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads, such as NCCL's, may call CUDA meanwhile
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                reports = passes(inputs.batches, inputs.scale)
        except RuntimeError as error:
            raise ModelError(f"{_OPTION}: cannot be captured ({error}); set it to false") from error
        return _Captured(graph, inputs, reports)


def require_gpu(device: torch.device) -> None:
    """ModelError where the training computes on another device."""
    if device.type != "cuda":
        name = device.type.upper()
        raise ModelError(f"{_OPTION}: needs a GPU and training runs on the {name}; set it to false")


def serves(plan: StepPlan) -> bool:
    """Whether a step computes what every step of `pretrain` computes, whatever its number."""
    return plan == StepPlan(step=plan.step, stage_step=plan.stage_step, loss="lm")
