"""A training that cannot fit its GPU is refused before it allocates anything."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from dms_train.app.memory_check import check_memory
from dms_train.config.build import ConfigError
from dms_train.mcore import groups, runtime
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.options import ParallelOptions
from tests.support import configs

MODEL = configs.KNOWN["qwen_r1_1_5b"]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[ParallelView]:
    yield groups.start(ParallelOptions(), seed=1)
    groups.stop()
    runtime.stop()


def check(
    monkeypatch: pytest.MonkeyPatch, gib: float, *, validates: bool = False, **changes
) -> None:
    found = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    view = SimpleNamespace(device=torch.device("cuda"), world_size=1, rank=0, pp_rank=0)
    config = configs.config(
        **{
            "parallel__params_dtype": "bf16",
            "data__seq_length": 8192,
            "data__micro_batch_size": 2,
            **changes,
        }
    )
    check_memory(config, MODEL, view, validates=validates)


def test_what_fits_is_accepted_without_a_warning(monkeypatch, caplog):
    check(monkeypatch, 139)
    assert not [record for record in caplog.records if record.name == "dms_train"]


def test_what_is_expected_not_to_fit_is_warned_about(monkeypatch, caplog):
    check(monkeypatch, 60)
    (record,) = caplog.records
    assert "GiB more than the 60.0 GiB of a NVIDIA H100" in record.getMessage()
    assert ": data.micro_batch_size=1 (" in record.getMessage()


def test_what_cannot_fit_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"needs .* GiB more than the 20\.0 GiB"):
        check(monkeypatch, 20)


def test_a_validation_that_does_not_fit_beside_the_training_is_refused(monkeypatch):
    """20 bytes of training for each of 1.8 billion parameters, a model of 3.3 GiB, and texts."""
    check(monkeypatch, 139, validates=True)
    message = (
        r"stage\.validate_export: needs 40\.0 GiB of one GPU, 33\.1 GiB of the training included"
    )
    with pytest.raises(ConfigError, match=message):
        check(monkeypatch, 35, validates=True, data__micro_batch_size=1)


def test_memory_is_not_checked_on_a_cpu(monkeypatch):
    view = SimpleNamespace(device=torch.device("cpu"), world_size=1, rank=0)
    check_memory(configs.config(), MODEL, view, validates=True)
