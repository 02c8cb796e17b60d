"""Checkpoints written by forked processes while GPUs continue to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import saving_cases as worker
from tests.support import saving_runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(400),
]
two_gpus = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
SIZES = {"hidden_size": 512, "ffn_hidden_size": 1536, "vocab_size": 8000}


def case(name: str, dtype: str, length: int, *, head: int, exact: bool, **parallel: Any) -> Any:
    """A model of 21 million weights; `exact` asks torch for kernels of a fixed order of additions.

    The other kernels add to the gradient of a query in the order in which they come. Two tiles of
    128 keys leave nothing to chance: a sum of two does not depend on it.
    """
    architecture = {**SIZES, "kv_channels": head, "max_position_embeddings": length}
    return {
        "name": f"{name}-{dtype}",
        "parallel": {**parallel, "params_dtype": dtype},
        "architecture": architecture,
        "length": length,
        "exact": exact,
    }


CASES = {
    1: [
        case("one", "bf16", 256, head=64, exact=False),
        case("one", "fp32", 320, head=128, exact=True),
    ],
    2: [
        case("tp2_sp", "bf16", 256, head=64, exact=False, **TP2, sequence_parallel=True),
        case("dp2", "bf16", 256, head=128, exact=False),
        case("tp2", "fp32", 320, head=64, exact=True, **TP2),
        case("dp2", "fp32", 320, head=64, exact=True),
        case("pp2_vp2", "bf16", 320, head=64, exact=True, **PP2),
    ],
}
# Continued in another layout, and the largest relative difference of a loss.
MOVES = [
    ("tp2-fp32", "dp2", {}, 1e-5),
    ("tp2-fp32", "pp2_vp2", PP2, 1e-5),
    ("dp2-fp32", "tp2_sp", {**TP2, "sequence_parallel": True}, 1e-5),
    ("tp2_sp-bf16", "pp2_vp2", PP2, 1e-2),
    ("pp2_vp2-bf16", "tp2_sp", {**TP2, "sequence_parallel": True}, 1e-2),
]
CHOSEN = [
    pytest.param(processes, each, id=each["name"], marks=two_gpus if processes > 1 else [])
    for processes, cases in CASES.items()
    for each in cases
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saving")
    for processes, cases in CASES.items():
        if processes <= torch.cuda.device_count():
            saving_runs.run("overlap", processes, cases, out)
    return out


@pytest.mark.parametrize(("processes", "each"), CHOSEN)
def test_later_steps_do_not_change_the_checkpoint(
    folder: Path, processes: int, each: dict[str, Any]
) -> None:
    outcomes = saving_runs.read(folder, each, "overlap")
    assert len(outcomes) == processes
    megabytes = [found["bytes"] >> 20 for found in outcomes]
    print(each["name"], megabytes, "MB; losses", [row["loss"] for row in outcomes[0]["rows"]])
    saving_runs.assert_checkpoints_are_of_their_step(outcomes)


def move(source: str, name: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """The case of that name in another layout."""
    saved = next(each for each in CASES[2] if each["name"] == source)
    parallel = {**parallel, "params_dtype": saved["parallel"]["params_dtype"]}
    return {**saved, "name": f"{source}-to-{name}", "source": source, "parallel": parallel}


@pytest.fixture(scope="module")
def moved(folder: Path) -> Path:
    saving_runs.run("moved", 2, [move(*each[:3]) for each in MOVES], folder)
    return folder


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("source", "name", "parallel", "bar"), MOVES)
def test_another_layout_continues_the_same_run(
    moved: Path, source: str, name: str, parallel: dict[str, Any], bar: float
) -> None:
    case = move(source, name, parallel)
    expected = saving_runs.read(moved, {"name": source}, "overlap")[0]["rows"][worker.HALF :]
    for found in saving_runs.read(moved, case, "moved"):
        difference = saving_runs.largest_difference(found["rows"], expected)
        print(f"{case['name']}: {difference:.1e}")
        assert difference < bar


@pytest.mark.parametrize(("processes", "each"), [CHOSEN[0], CHOSEN[2], CHOSEN[3]])
def test_writers_end_with_a_killed_rank(
    tmp_path: Path, processes: int, each: dict[str, Any]
) -> None:
    saving_runs.kill_during_save(each, processes, processes - 1, tmp_path)
