"""The log line of the attention backend; a resumed run may have another backend."""

from __future__ import annotations

import io

import pytest
import torch

from dms_train.app import run_folder, session
from dms_train.config import frozen
from dms_train.kernels.errors import KernelError
from dms_train.observe import log
from tests.support import configs


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("given", "chosen"), [("auto", "blockwise"), ("blockwise",) * 2, ("reference",) * 2]
)
def test_one_line_names_the_attention_backend(given: str, chosen: str) -> None:
    stream = io.StringIO()
    log.configure(stream=stream)
    session._announce_kernels(configs.config(kernels=given))
    log.configure()
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(f"attention: {chosen} kernels on CPU")


@pytest.mark.parametrize("name", ["triton", "flex"])
def test_a_backend_that_needs_a_gpu_is_refused(name: str) -> None:
    with pytest.raises(KernelError, match=f"kernels={name}: training runs on the CPU"):
        session._announce_kernels(configs.config(kernels=name))


def test_a_resumed_run_may_have_other_kernels() -> None:
    fixed = [
        frozen._fixed(run_folder.mapping(configs.config(kernels=name)))
        for name in ("auto", "reference")
    ]
    assert fixed[0] == fixed[1]
    assert "optim.lr" in fixed[0]
