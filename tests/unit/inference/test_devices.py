"""Device of an engine, as far as a machine without a GPU can test it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dms_train.inference.devices import launches_on


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_the_host_computes_in_one_thread_beside_a_gpu() -> None:
    with launches_on("cuda"):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(KeyError), launches_on("cuda"):
        raise KeyError
    assert torch.get_num_threads() == 3


def test_a_cpu_keeps_its_threads() -> None:
    with launches_on("cpu"):
        assert torch.get_num_threads() == 3
