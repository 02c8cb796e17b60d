"""The backend of a configured name, and names that are refused."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch

from dms_train.kernels import dispatch
from dms_train.kernels.errors import KernelError
from dms_train.kernels.options import KERNELS
from dms_train.kernels.train_attention import reference

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NAMES = [name for name in KERNELS if name != "auto"]


@pytest.mark.parametrize(
    ("name", "device", "triton", "expected"),
    [
        ("auto", GPU, True, "triton"),
        ("auto", GPU, False, "blockwise"),
        ("auto", CPU, True, "blockwise"),
        ("triton", GPU, True, "triton"),
        ("flex", GPU, False, "flex"),
        ("blockwise", GPU, True, "blockwise"),
        ("reference", CPU, True, "reference"),
    ],
)
def test_names_are_resolved_by_device(
    monkeypatch: pytest.MonkeyPatch, name: str, device: torch.device, triton: bool, expected: str
) -> None:
    monkeypatch.setattr(dispatch, "_has_triton", lambda: triton)
    assert dispatch.choose_train_attention(name, device) == expected


@pytest.mark.parametrize(
    ("name", "device", "line"),
    [
        ("triton", CPU, "kernels=triton: training runs on the CPU and its kernels need a GPU"),
        ("flex", CPU, "kernels=flex: training runs on the CPU and FlexAttention has no backward"),
        ("triton", GPU, "kernels=triton: triton is not installed"),
    ],
)
def test_what_cannot_train_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, device: torch.device, line: str
) -> None:
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    with pytest.raises(KernelError, match=line) as caught:
        dispatch.choose_train_attention(name, device)
    assert "; " in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_an_implementation_with_one_signature(name: str) -> None:
    if name == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    parameters = inspect.signature(dispatch.train_attention(name)).parameters
    assert list(parameters) == list(inspect.signature(reference.dms_attention).parameters)
    assert parameters["cu_seqlens"].default is None
