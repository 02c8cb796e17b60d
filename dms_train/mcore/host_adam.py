"""AdamW on the CPU for weights on a GPU: fp32 weights and moments are in host memory.

Megatron's distributed optimizer calls it as Transformer Engine's FusedAdam with fp32 weights of
its own: gradients are in `decoupled_grad`, and the optimizer writes the weights of the model.

Megatron's own `HybridDeviceOptimizer` is not used. It first copies the whole model to the host of
every rank, creates its state by an update with random gradients, and stores classes in checkpoints.
It also pins as much memory as the gradients take.

The state is not pinned, because the process that writes a checkpoint is forked and would share
pinned pages with later updates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from dms_train.mcore.options import HOST_PIECE

_SLOTS = 2
_STATES = ("master_param", "exp_avg", "exp_avg_sq")


class _Piece(NamedTuple):
    """Part of a parameter's shard: weights and gradient on the device, state on the host."""

    weights: Tensor
    gradient: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    group: dict[str, Any]

    def update(self, gradient: Tensor) -> None:
        """Take an AdamW step on the host, with the gradient in host memory."""
        beta1, beta2 = self.group["betas"]
        adamw(
            [self.master],
            [gradient],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [torch.tensor(self.group["step"] - 1.0)],  # `adamw` counts it up
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=self.group["lr"],
            weight_decay=self.group["weight_decay"],
            eps=self.group["eps"],
            maximize=False,
        )


class HostAdamW(torch.optim.AdamW):
    """AdamW with its state in host memory, in pieces whose copies overlap the updates of others."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        threads: int,
        **_: Any,
    ) -> None:
        """Take Megatron's arguments of an optimizer on the CPU, and the threads of an update."""
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        for group in self.param_groups:
            group["step"] = 0
        self._threads = threads
        self._copies: _Copies | None = None

    def initialize_state(self, parameter: Tensor) -> None:
        """Create moments of zero, and the fp32 weights from the parameter's own."""
        with _in_threads(self._threads):
            master = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            self.state[parameter] = {
                "master_param": master.copy_(parameter.detach()),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def set_scaled_state(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Copy into a tensor of the state."""
        self.state[parameter][name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the packed state, with the counters that Megatron expects of torch's AdamW."""
        packed: dict[str, Any] = super().state_dict()
        for group in packed["param_groups"]:
            step = torch.tensor(float(group["step"]))
            for index in group["params"]:
                if index in packed["state"]:
                    packed["state"][index] = {**packed["state"][index], "step": step}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the settings of the groups; see `load_groups`."""
        load_groups(self, state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters; the device holds the new weights after its queued work."""
        del closure
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if not self.state.get(parameter):
                    self.initialize_state(parameter)
        pieces = list(self._pieces())
        if not pieces:
            return
        if self._copies is None:
            self._copies = _Copies(pieces[0].weights)
        with _in_threads(self._threads):
            self._copies.begin(pieces)
            for number, piece in enumerate(pieces):
                piece.update(self._copies.gradient(number))
                self._copies.return_weights(number)
            self._copies.end()

    def _pieces(self) -> Iterator[_Piece]:
        for group in self.param_groups:
            for parameter in group["params"]:
                tensors = [parameter.detach(), parameter.decoupled_grad]
                tensors += [self.state[parameter][name] for name in _STATES]
                parts = (tensor.view(-1).split(HOST_PIECE) for tensor in tensors)
                for weights, gradient, master, first, second in zip(*parts, strict=True):
                    if weights.numel():
                        yield _Piece(weights, gradient, master, first, second, group)


class _Copies:
    """Copies of pieces between a device and pinned host memory, two pieces at a time.

    While the CPU updates a piece, one stream copies the next gradient and another one the weights
    of the last piece. On a CPU the pieces need no copy.
    """

    def __init__(self, weights: Tensor) -> None:
        """Allocate the buffers for weights of this dtype and device."""
        self._pieces: list[_Piece] = []
        self._device = weights.device
        self._on_gpu = weights.is_cuda
        if not self._on_gpu:
            return
        self._gradients = _pinned(torch.float32)
        self._weights = _pinned(weights.dtype)
        self._down, self._up = (torch.cuda.Stream(self._device) for _ in range(2))
        self._arrived: list[Any] = [None] * _SLOTS
        self._returned: list[Any] = [None] * _SLOTS

    def begin(self, pieces: list[_Piece]) -> None:
        """Copy the first gradient, after the work that is queued on the device."""
        assert {piece.weights.dtype for piece in pieces} == {pieces[0].weights.dtype}
        self._pieces = pieces
        if self._on_gpu:
            for stream in (self._down, self._up):
                stream.wait_stream(torch.cuda.current_stream(self._device))
            self._fetch(0)

    def gradient(self, number: int) -> Tensor:
        """Wait for the gradient of a piece, and begin to copy the next one."""
        if not self._on_gpu:
            return self._pieces[number].gradient
        if number + 1 < len(self._pieces):
            self._fetch(number + 1)
        self._arrived[number % _SLOTS].synchronize()
        return self._slot(self._gradients, number)

    def return_weights(self, number: int) -> None:
        """Round the updated weights to the dtype of the model, and copy them to the device."""
        piece, index = self._pieces[number], number % _SLOTS
        if not self._on_gpu:
            piece.weights.copy_(piece.master)
            return
        if self._returned[index] is not None:
            self._returned[index].synchronize()
        slot = self._slot(self._weights, number)
        slot.copy_(piece.master)
        with torch.cuda.stream(self._up):
            piece.weights.copy_(slot, non_blocking=True)
        self._returned[index] = self._up.record_event()

    def end(self) -> None:
        """Let later work on the device wait for the copies."""
        self._pieces = []
        if self._on_gpu:
            torch.cuda.current_stream(self._device).wait_stream(self._up)

    def _fetch(self, number: int) -> None:
        with torch.cuda.stream(self._down):
            gradient = self._pieces[number].gradient
            self._slot(self._gradients, number).copy_(gradient, non_blocking=True)
        self._arrived[number % _SLOTS] = self._down.record_event()

    def _slot(self, buffers: list[Tensor], number: int) -> Tensor:
        return buffers[number % _SLOTS][: self._pieces[number].weights.numel()]


def _pinned(dtype: torch.dtype) -> list[Tensor]:
    return [
        torch.empty(HOST_PIECE, dtype=dtype, device="cpu", pin_memory=True) for _ in range(_SLOTS)
    ]


@contextlib.contextmanager
def _in_threads(threads: int) -> Iterator[None]:
    """Let torch use this number of threads inside the block.

    Other work of the process keeps its number. A forked process must not start threads of its own.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_groups(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Take the settings of the groups from a packed state and keep all tensors.

    Torch would convert the tensors to the dtype and device of the weights. Megatron copies loaded
    values into them afterwards.
    """
    for group, loaded in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        group.update({name: value for name, value in loaded.items() if name != "params"})
