"""Ranks read their parts of the base model once, for student and teacher together."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import refusals
from tests.support.ranks import dms_train, run_ranks, values_of_ranks
from tests.support.refusals import Workspace

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
TP2 = "parallel.tensor_model_parallel_size=2"
_open = safetensors.safe_open
READS: Counter[str] = Counter()


def _counted(name: str, tensor: torch.Tensor) -> torch.Tensor:
    READS[name] += tensor.nbytes
    return tensor


class _Slice:
    def __init__(self, name: str, inner: Any) -> None:
        self._name, self._inner = name, inner

    def __getitem__(self, index: Any) -> torch.Tensor:
        return _counted(self._name, self._inner[index])


class _File:
    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._inner = _open(*arguments, **options)

    def get_tensor(self, name: str) -> torch.Tensor:
        return _counted(name, self._inner.get_tensor(name))

    def get_slice(self, name: str) -> _Slice:
        return _Slice(name, self._inner.get_slice(name))


def train_and_count(*words: str) -> tuple[int, Counter[str]]:
    """Run `dms-train`; its exit code, and the bytes that safetensors handed out by tensor."""
    safetensors.safe_open = _File  # type: ignore[assignment, misc]
    return dms_train(*words), READS


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> refusals.Assets:
    return refusals.make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture
def workspace(tmp_path: Path, assets: refusals.Assets):  # type: ignore[no-untyped-def]
    with refusals.open_workspace(tmp_path, assets) as opened:
        refusals.write_model(
            opened.folder / "untied",
            opened.folder / "data" / "tokenizer",
            tie_word_embeddings=False,
        )
        yield opened


def sizes(model: Path) -> Counter[str]:
    tensors = load_file(model / "model.safetensors")
    return Counter({name: tensor.nbytes for name, tensor in tensors.items()})


def reads(workspace: Workspace, processes: int, *overrides: str) -> list[Counter[str]]:
    """Bytes of each tensor that each rank read in a run with a student and a teacher."""
    words = workspace.train(*overrides)[1:]
    found = values_of_ranks(train_and_count, processes, *words)
    assert [code for code, _ in found] == [0] * processes
    return [read for _, read in found]


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


@pytest.mark.parametrize("model", ["model", pytest.param("untied", marks=pytest.mark.slow)])
def test_tensor_parallel_ranks_read_their_parts_once(workspace: Workspace, model: str) -> None:
    folder = workspace.folder / model
    by_rank = reads(workspace, 2, TP2, f"model.path={folder}")
    stored = sizes(folder)
    together = Counter({name: size * (1 + is_norm(name)) for name, size in stored.items()})
    assert by_rank[0] + by_rank[1] == together  # norms are on every rank
    split = [name for name in stored if "layers" in name and not is_norm(name)]
    assert all(2 * by_rank[0][name] == stored[name] for name in split)


def test_one_process_reads_every_tensor_once(workspace: Workspace) -> None:
    (found,) = reads(workspace, 1)
    assert found == sizes(workspace.model)


def test_a_teacher_beside_another_student_is_read_too(workspace: Workspace) -> None:
    workspace.finish_run()
    student, run = workspace.export / "hf", workspace.folder / "second"
    changes = (f"run.load={student}", f"run.dir={run}", "stage.run=[hold]", "stage.hold.steps=1")
    (found,) = reads(workspace, 1, *changes)
    assert found == sizes(workspace.model) + sizes(student)


@pytest.mark.parametrize("part", [pytest.param("first", marks=pytest.mark.slow), "last"])
def test_numbers_that_one_rank_reads_end_every_rank_in_one_line(
    workspace: Workspace, part: str
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    file = workspace.model / "model.safetensors"
    tensors: dict[str, Tensor] = load_file(file)
    tensors[name][3, 0 if part == "first" else -1] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    result = run_ranks(dms_train, 2, *workspace.train(TP2)[1:])
    assert result.returncode == 2, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert line.startswith(f"error: {file}: {name} holds NaN or infinite numbers")
    assert "Traceback" not in result.stderr
    assert not list((workspace.run / "checkpoints").glob("*"))
