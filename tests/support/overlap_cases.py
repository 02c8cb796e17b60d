"""Overlapped linear layers in several ranks, against one product in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dms_train.mcore import compat, groups
from dms_train.mcore.layers.overlap import ColumnLinear, RowLinear
from dms_train.mcore.model.configuration import transformer_config
from dms_train.mcore.options import ParallelOptions
from tests.support import tiny

# Trained by autograd, trained by a product that adds to `main_grad`, frozen.
WEIGHTS = ("returned", "added", "frozen")


def differences(tp: int, dtype: str, sizes: tuple[int, int], rounds: int) -> dict[str, float]:
    """Largest error of output and gradients by name, relative to the largest value.

    The rounds have growing and shrinking inputs, without a synchronization between them. `sizes`:
    fewest positions of a rank, and hidden size.
    """
    options = ParallelOptions(
        tensor_model_parallel_size=tp,
        sequence_parallel=True,
        tp_comm_overlap=True,
        params_dtype=dtype,
    )
    view = groups.start(options, seed=1)
    config = transformer_config(tiny.architecture("qwen2"), options)
    can_add = compat.accumulate_in_place(view.device)
    found = []
    for number in range(rounds):
        weights = WEIGHTS[number % len(WEIGHTS)]
        if weights != "added" or can_add:
            found.append(_Case(number, weights, sizes, config, view).run())
    worst: dict[str, float] = {}
    for case in found:
        for name, (value, exact) in case.items():
            error = ((value.double() - exact).abs().max() / exact.abs().max()).item()
            worst[name] = max(worst.get(name, 0.0), error)
    groups.stop()
    return worst


class _Case:
    """A column-parallel layer and a row-parallel one after it."""

    def __init__(
        self, number: int, weights: str, sizes: tuple[int, int], config: Any, view: Any
    ) -> None:
        length, width = sizes
        self.rank, self.tp, self.weights = view.tp_rank, view.tp_size, weights
        config.gradient_accumulation_fusion = weights == "added"
        dtype = config.params_dtype
        generator = torch.Generator().manual_seed(number)
        s, b, inner = self.tp * length * (1 + 2 * number % 3), 1 + number % 2, 3 * width
        shapes = {"x": (s, b, width), "first": (inner, width), "bias": (inner,)}
        shapes |= {"second": (width, inner), "factors": (s, b, width)}
        self.given = {
            name: (torch.randn(shape, generator=generator) / shape[-1] ** 0.5)
            .to(dtype)
            .to(view.device)
            for name, shape in shapes.items()
        }
        common = {"config": config, "init_method": config.init_method, "skip_bias_add": False}
        column = ColumnLinear(width, inner, bias=True, gather_output=False, **common)
        row = RowLinear(inner, width, bias=False, input_is_parallel=True, **common)
        self.layers = [column.to(view.device), row.to(view.device)]
        for name, parameter, axis in self.parameters():
            parameter.data.copy_(self.own(self.given[name], axis))
            parameter.requires_grad_(weights != "frozen")
            if weights == "added" and name != "bias":
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)

    def parameters(self) -> list[tuple[str, Any, int]]:
        column, row = self.layers
        return [("first", column.weight, 0), ("bias", column.bias, 0), ("second", row.weight, 1)]

    def own(self, whole: Tensor, axis: int = 0) -> Tensor:
        return whole.chunk(self.tp, axis)[self.rank]

    def run(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Pairs of this rank's value and the exact one."""
        column, row = self.layers
        x = self.own(self.given["x"]).clone().requires_grad_()
        output = row(column(x)[0])[0]
        output.backward(self.own(self.given["factors"]))
        exact = {name: t.double().requires_grad_() for name, t in self.given.items()}
        hidden = torch.nn.functional.linear(exact["x"], exact["first"], exact["bias"])
        wanted = torch.nn.functional.linear(hidden, exact["second"])
        wanted.backward(exact["factors"].detach())
        pairs = {"output": (output.detach(), self.own(wanted.detach()))}
        pairs["x"] = x.grad, self.own(exact["x"].grad)
        for name, parameter, axis in self.parameters() if self.weights != "frozen" else ():
            added = self.weights == "added" and name != "bias"
            value = parameter.main_grad if added else parameter.grad
            pairs[f"{name} {self.weights}"] = value, self.own(exact[name].grad, axis)
        return pairs
