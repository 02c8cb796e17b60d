"""FP8 products: which layers run them, and refusals. Their values need a GPU (tests/gpu)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dms_train.mcore.errors import ModelError
from dms_train.mcore.layers import backend, fp8

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Plain(torch.nn.Module):
    """Layer that records whether it ran in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[bool] = []

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        self.ran.append(Autocast.entered)
        return x, None


class Autocast:
    """Stand-in of Transformer Engine's context."""

    entered = False

    @classmethod
    @contextlib.contextmanager
    def enter(cls) -> Iterator[None]:
        cls.entered = True
        yield
        cls.entered = False


def installed(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], **parts: Any) -> None:
    monkeypatch.setattr(backend.te, "HAVE_TE", True)
    monkeypatch.setattr(backend.te, "te", SimpleNamespace(pytorch=SimpleNamespace(**parts)))
    monkeypatch.setattr(backend.te, "get_te_version", lambda: "2.11.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for name in ("TERowParallelLinear", "TELayerNormColumnParallelLinear"):
        monkeypatch.setattr(backend.te, name, type(name, (Plain,), {}))


def test_a_wrapped_layer_runs_in_fp8_wherever_it_is_called(monkeypatch) -> None:
    monkeypatch.setattr(fp8, "_autocast", Autocast.enter)
    wrapped, plain = fp8.in_fp8(Plain)(), Plain()
    model = torch.nn.ModuleList([wrapped, plain])
    for module in model:
        module(torch.ones(1))
    with fp8.paused([model]):
        for module in model:
            module(torch.ones(1))
    wrapped(torch.ones(1))
    assert (wrapped.ran, plain.ran) == ([True, False, True], [False, False])
    assert isinstance(wrapped, Plain)
    assert fp8.in_fp8(Plain) is type(wrapped)


def test_a_wrapped_layer_has_the_state_of_a_layer_in_bf16() -> None:
    state = fp8.in_fp8(Plain)().get_extra_state()
    assert (state.numel(), state.dtype) == (0, torch.uint8)


def test_mlp_and_output_are_wrapped_and_the_projection_of_heads_is_not(monkeypatch) -> None:
    installed(monkeypatch, (9, 0), autocast=None)
    found = backend.choose("auto", GPU, fp8=True)
    plain = backend.choose("auto", GPU)
    assert issubclass(found.row, fp8.FP8Products)
    assert issubclass(found.in_mlp(found.norm_linear), fp8.FP8Products)
    assert found.norm_linear is plain.norm_linear
    assert plain.in_mlp(plain.norm_linear) is plain.norm_linear
    assert not issubclass(plain.row, fp8.FP8Products)
    assert found.describe(None).endswith("MLP and output projection in FP8")
    assert "FP8" not in plain.describe(None)


@pytest.mark.parametrize(
    ("changes", "wanted", "capability", "expected"),
    [
        ({}, "local", (9, 0), "parallel.layers=local has no FP8 products"),
        ({"adapts": True}, "auto", (9, 0), "the adapters of method.train"),
        ({"overlaps": True}, "auto", (9, 0), "parallel.tp_comm_overlap overlaps products"),
        ({}, "auto", (8, 0), "compute capability 8.9 and this one has 8.0"),
        ({"device": CPU}, "auto", (9, 0), "needs a GPU"),
    ],
)
def test_fp8_is_refused_where_it_cannot_run(
    monkeypatch, changes, wanted, capability, expected
) -> None:
    installed(monkeypatch, capability, autocast=None)
    with pytest.raises(ModelError, match=r"parallel\.fp8=true: ") as refused:
        backend.choose(wanted, changes.pop("device", GPU), **changes, fp8=True)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_fp8_is_refused_without_a_new_transformer_engine(monkeypatch) -> None:
    with pytest.raises(ModelError, match=r"parallel\.fp8=true: Transformer Engine cannot be"):
        backend.choose("auto", GPU, fp8=True)
    installed(monkeypatch, (9, 0))
    with pytest.raises(ModelError, match=r"parallel\.fp8=true: Transformer Engine 2\.11\.0 has"):
        backend.choose("auto", GPU, fp8=True)
