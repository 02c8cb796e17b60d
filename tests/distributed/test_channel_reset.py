"""Resetting the eviction channel changes its own rows and nothing else, however it is spread.

Real processes: three data-parallel ranks, which share the optimizer's state in parts that end
inside a projection, and two tensor-parallel ranks, which share the heads.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dms_train.method.spec import PRESETS
from tests.support import launch, tiny
from tests.support.reset_worker import CASES, KINDS, LAYOUTS

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=LAYOUTS)
def stem(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reset")
    processes, _ = LAYOUTS[request.param]
    words = ("tests.support.reset_worker", request.param, str(out))
    launch.checked(launch.workers(processes, *words))
    return out / request.param


def channel_rows(name: str, family: str, preset: str) -> list[int]:
    """Of a Hugging Face tensor: in q_proj one row for the first query head of each KV head."""
    if "q_proj" not in name:
        return []
    a = tiny.architecture(family)
    heads = range(0, a.num_attention_heads, a.num_attention_heads // a.num_query_groups)
    channel = PRESETS[preset].channel % a.kv_channels
    return [head * a.kv_channels + channel for head in heads]


@pytest.mark.parametrize("kind", ["weight", *KINDS])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_channels_rows_are_zero_and_all_others_as_before(
    stem: Path, case: tuple[str, str, str], kind: str
) -> None:
    family, preset, _ = case
    name = "-".join((stem.name, *case))
    before = load_file(stem.with_name(f"{name}-before.safetensors"))
    after = load_file(stem.with_name(f"{name}-after.safetensors"))
    wrong = []
    for key, old in before.items():
        if not key.startswith(f"{kind}/"):
            continue
        rows = channel_rows(key, family, preset)
        assert not rows or (old[rows].abs().reshape(len(rows), -1).amax(1) > 0).all(), key
        expected = old.clone()
        expected[rows] = 0
        if not torch.equal(after[key], expected):
            wrong.append((key, (after[key] != expected).sum().item()))
    assert not wrong  # (tensor, number of wrong elements)
