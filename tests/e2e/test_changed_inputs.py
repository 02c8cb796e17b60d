"""A resumed run accepts only the data and the base model that it was started with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from dms_train.data.manifest import file_sha256
from dms_train.mcore.checkpoints import state
from tests.support import refusals
from tests.support.ranks import dms_train, run_ranks
from tests.support.refusals import Workspace

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> refusals.Assets:
    return refusals.make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture
def workspace(tmp_path: Path, assets: refusals.Assets) -> Iterator[Workspace]:
    """A run with one step left, on copies of its data and model."""
    with refusals.open_workspace(tmp_path, assets) as opened:
        opened.finish_run(sum(refusals.STEPS) - 1)
        yield opened


def change_data(workspace: Workspace) -> None:
    words = ["--out", str(workspace.data.parent), "--sheets", "60", "--seed", "5", "--overwrite"]
    assert refusals.run_here(["data", "exam-sheets", *words]).code == 0


def change_weights(workspace: Workspace) -> None:
    file = workspace.model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, file, {"format": "pt"})


def change_architecture(workspace: Workspace) -> None:
    file = workspace.model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 1e-3}))


def test_copies_of_the_inputs_continue_the_run(workspace: Workspace) -> None:
    done = refusals.run_here(workspace.train())
    assert done.code == 0, done.stderr
    assert workspace.checkpoint(sum(refusals.STEPS)).is_dir()


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (change_data, ("data.paths=DATA", "SHA-256", "recorded")),
        (change_weights, ("model.path=MODEL", "model.safetensors", "SHA-256", "recorded")),
        (change_architecture, ("model.path=MODEL", "layernorm_epsilon=0.001", "1e-06")),
    ],
)
def test_other_inputs_of_the_same_name_are_refused(workspace: Workspace, change, facts) -> None:  # type: ignore[no-untyped-def]
    change(workspace)
    before = refusals.listing(workspace.run)
    found = refusals.run_here(workspace.train())
    assert found.code == 2, found.stderr
    (message,) = found.messages
    newest = workspace.checkpoint(sum(refusals.STEPS) - 1)
    for fact in (*facts, workspace.named(str(newest)), "restore it, or choose another run.dir"):
        assert fact in workspace.named(message)
    after = refusals.listing(workspace.run)
    assert refusals.touched(before, after, ("state*", "config.yaml", "data_cache*")) == []


@pytest.mark.dist
def test_a_weight_file_that_another_rank_reads_is_compared(workspace: Workspace) -> None:
    tensors = load_file(workspace.model / "model.safetensors")
    (workspace.model / "model.safetensors").unlink()
    norm = {"model.norm.weight": tensors.pop("model.norm.weight")}
    write_shards(workspace.model, {"large.safetensors": tensors, "small.safetensors": norm})
    hashes = {file.name: file_sha256(file) for file in workspace.model.glob("*.safetensors")}
    state.annotate(workspace.checkpoint(sum(refusals.STEPS) - 1), {"model_sha256": hashes})
    norm["model.norm.weight"][0] += 1
    write_shards(workspace.model, {"small.safetensors": norm})

    result = run_ranks(dms_train, 2, *workspace.train()[1:])
    assert result.returncode != 0
    messages = {line for line in result.stderr.splitlines() if "small.safetensors" in line}
    assert messages
    assert "large.safetensors" not in result.stderr
    assert "step 4" not in result.stderr


def write_shards(model: Path, files: dict[str, dict[str, Tensor]]) -> None:
    """Weight files and their index, which keeps its entries of other files."""
    index = model / "model.safetensors.index.json"
    known = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    for name, tensors in files.items():
        save_file(tensors, model / name, {"format": "pt"})
        known |= dict.fromkeys(tensors, name)
    index.write_text(json.dumps({"weight_map": known}))
