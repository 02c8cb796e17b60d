"""Passes of a micro-batch as a CUDA graph: one launch instead of thousands.

The host needs longer to launch the kernels of a layer one by one than a fast GPU needs to run them.
A graph repeats the same kernels on the same memory, so it can run every micro-batch of the same
shape. Numbers that change from step to step are read from tensors (`MethodState.set_plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dms_train.data.batches import Batch
from dms_train.mcore.errors import ModelError
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.options import ParallelOptions
from dms_train.observe import log

# Run the passes of one micro-batch with a token scale; return the report of its loss.
Passes = Callable[[Batch, Tensor], Any]

OPTION = "parallel.cuda_graph"
_EAGER_STEPS = 2  # kernels are compiled, plans chosen and constants made before the capture


class GraphInputs:
    """Copies of the tensors of a micro-batch, at addresses that stay.

    Args:
        batch: Micro-batch without packed documents.
        scale: Token scale, float64 [].
    """

    def __init__(self, batch: Batch, scale: Tensor) -> None:
        assert batch.documents is None  # a replay would read those of the first microbatch
        self.batch = batch.map(torch.clone)
        self.scale = scale.clone()

    def fill(self, batch: Batch, scale: Tensor) -> None:
        """Copy the tensors of another micro-batch.

        Raises:
            ModelError: The tensors of `batch` have other shapes.
        """
        own = [self.scale, *self.batch[:4], *(self.batch.teacher or ())]
        given = [scale, *batch[:4], *(batch.teacher or ())]
        if [tensor.shape for tensor in own] != [tensor.shape for tensor in given]:
            before, now = (list(each[1].shape) for each in (own, given))
            raise ModelError(
                f"{OPTION}: the shape of a microbatch changed from {before} to {now}; set it to "
                "never"
            )
        torch._foreach_copy_(own, given)


class _Captured(NamedTuple):
    """A graph with the memory it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: GraphInputs
    report: dict[str, Tensor]


class PassGraph:
    """Runs the passes of micro-batches eagerly in two steps, then captures and replays them.

    Gradients are added to Megatron's buffers, whose addresses never change. The reduction of the
    gradients over data-parallel ranks and the update of the weights are not part of the graph.

    Args:
        device: GPU that trains.
        required: Raise where passes cannot be captured; otherwise they run eagerly.
    """

    def __init__(self, device: torch.device, *, required: bool) -> None:
        self._stream = torch.cuda.Stream(device)
        self._required = required
        self._key: Hashable = None
        self._steps = 0
        self._captured: _Captured | None = None
        self._obstacle = ""

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Queue the GPU's work inside the block on the captured stream.

        Autograd accumulates a gradient on the stream that first used its parameter. The gradient
        buffers are therefore built inside such a block, and passes run inside one.
        """
        outer = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def release(self) -> None:
        """Free the memory of the graph; the next steps run eagerly and capture another."""
        if self._captured is not None:
            self._captured = None
            torch.cuda.empty_cache()  # the memory pool was private to the graph
        self._key = None

    def begin_step(self, computation: Hashable, microbatches: int) -> None:
        """Begin a step, and release the graph of another computation."""
        key = computation, microbatches
        if key != self._key:
            self.release()
            self._key, self._steps = key, 0
        self._steps += 1

    def run(self, passes: Passes, batch: Batch, scale: Tensor) -> dict[str, Tensor]:
        """Run or replay `passes` inside `stream`, and return their report.

        Args:
            passes: Passes of a micro-batch; the same computation in every call of a step.
            batch: Micro-batch on the device.
            scale: Token scale of the step, float64 [].

        Raises:
            ModelError: The passes cannot be captured although that is required, or shapes changed.
        """
        if self._steps <= _EAGER_STEPS or self._obstacle:
            return passes(batch, scale)
        if self._captured is None:
            try:
                self._captured = self._capture(passes, GraphInputs(batch, scale))
            except RuntimeError as error:  # nothing has been computed
                self._refuse(f"the passes cannot be captured ({error})", error)
                return passes(batch, scale)
        self._captured.inputs.fill(batch, scale)
        self._captured.graph.replay()
        return {name: value.clone() for name, value in self._captured.report.items()}

    def _capture(self, passes: Passes, inputs: GraphInputs) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        # other threads, such as NCCL's, may call CUDA meanwhile
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            report = passes(inputs.batch, inputs.scale)
        return _Captured(graph, inputs, report)

    def _refuse(self, obstacle: str, cause: Exception | None = None) -> None:
        if self._required:
            raise ModelError(f"{OPTION}=always: {obstacle}; set it to never") from cause
        self._obstacle = " ".join(obstacle.split())
        log.logger().warning("%s=auto: %s; passes run eagerly", OPTION, self._obstacle)


def choose_graph(
    options: ParallelOptions,
    view: ParallelView,
    *,
    fused: bool,
    experts: int = 0,
    linear: bool = False,
    packed: bool = False,
) -> PassGraph | None:
    """Return a graph for the passes of this layout, or None where they run eagerly.

    Args:
        options: Layout and `cuda_graph`.
        view: Process groups of this rank.
        fused: Whether the fused kernels run. Other kernels read the numbers of a step on the host,
            so a replay would repeat the numbers of the captured step.
        experts: Number of experts of a layer.
        linear: Whether layers have linear attention.
        packed: Whether samples hold several documents.

    Raises:
        ModelError: `parallel.cuda_graph=always` in a layout that cannot be captured.
    """
    required = options.cuda_graph == "always"
    if required:
        require_gpu(view.device)
    obstacles = list(options.graph_obstacles(view.dp_size, experts, linear=linear, packed=packed))
    if not fused:
        obstacles.append("only the triton kernels can be captured; set kernels=triton")
    if required and obstacles:
        raise ModelError(f"{OPTION}=always: {obstacles[0]}")
    if options.cuda_graph == "never" or obstacles or view.device.type != "cuda":
        return None
    return PassGraph(view.device, required=required)


def require_gpu(device: torch.device) -> None:
    """Raise ModelError if training runs on another device."""
    if device.type != "cuda":
        name = device.type.upper()
        raise ModelError(f"{OPTION}=always: needs a GPU and training runs on the {name}; use auto")
