"""Folders that are no checkpoints are refused, and foreign pickles never run."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from dms_train.mcore import checkpoint
from dms_train.mcore.errors import CheckpointError


def write(folder: Path, files: dict[str, bytes], **state: Any) -> Path:
    """A sealed folder with these files."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    sizes = {name: len(content) for name, content in files.items()}
    (folder / checkpoint.STATE_FILE).write_text(json.dumps({**state, "files": sizes}))
    return folder


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    return write(tmp_path / "step_00000010", {"a.distcp": b"12345", "common.pt": b"1"}, step=10)


def test_a_whole_folder_gives_its_state(sealed: Path) -> None:
    assert checkpoint.read_state(sealed)["step"] == 10


DAMAGE = {
    "absent": lambda p: shutil.rmtree(p),
    "unsealed": lambda p: (p / checkpoint.STATE_FILE).unlink(),
    "file_missing": lambda p: (p / "a.distcp").unlink(),
    "file_truncated": lambda p: (p / "a.distcp").write_bytes(b"1234"),
    "file_grown": lambda p: (p / "a.distcp").write_bytes(b"123456"),
    "file_is_folder": lambda p: ((p / "a.distcp").unlink(), (p / "a.distcp").mkdir()),
    "state_truncated": lambda p: (p / checkpoint.STATE_FILE).write_text('{"step": 1'),
    "state_empty": lambda p: (p / checkpoint.STATE_FILE).write_text(""),
    "state_without_files": lambda p: (p / checkpoint.STATE_FILE).write_text('{"step": 10}'),
    "state_is_a_list": lambda p: (p / checkpoint.STATE_FILE).write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_in_one_line_with_the_folder(sealed: Path, damage: str) -> None:
    DAMAGE[damage](sealed)
    with pytest.raises(CheckpointError, match=str(sealed)) as caught:
        checkpoint.read_state(sealed)
    assert "\n" not in str(caught.value)


def test_newest_passes_damaged_folders_and_says_why(tmp_path: Path) -> None:
    for step in (8, 9, 10, 100):
        write(tmp_path / f"step_{step:08d}", {"a": b"12"}, step=step)
    write(tmp_path / "step_00000200.partial", {"a": b"12"})
    (tmp_path / "step_00000100" / "a").write_bytes(b"1")
    (tmp_path / "step_00000010" / checkpoint.STATE_FILE).unlink()
    path, passed = checkpoint.newest(tmp_path)
    assert path == tmp_path / "step_00000009"
    assert len(passed) == 2
    assert "step_00000100" in passed[0]
    assert "1 bytes instead of 2" in passed[0]
    assert "step_00000010" in passed[1]


def test_newest_of_nothing_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "absent") == (None, [])


class Trap:
    """Creates a file when unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


def by_name(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls module.name(argument); protocol 4 resolves dots inside the name."""
    parts = [pickle.PROTO, b"\x04"]
    for text in (module, name):
        raw = text.encode()
        parts += [pickle.SHORT_BINUNICODE, bytes([len(raw)]), raw]
    raw = argument.encode()
    parts += [pickle.STACK_GLOBAL, pickle.SHORT_BINUNICODE, bytes([len(raw)]), raw]
    return b"".join([*parts, pickle.TUPLE1, pickle.REDUCE, pickle.STOP])


NAMES = [
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    ("subprocess", "check_output"),
    ("torch.serialization", "os.system"),
    ("torch", "load"),
    ("torch.hub", "load"),
    ("torch.distributed.checkpoint.filesystem", "os.system"),
    ("pathlib", "Path.touch"),
]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_metadata_naming_foreign_code_is_refused_before_it_runs(
    tmp_path: Path, module: str, name: str
) -> None:
    ran = tmp_path / "ran"
    files = {".metadata": by_name(module, name, f"touch {ran}"), "common.pt": b""}
    with pytest.raises(CheckpointError, match="do not load files"):
        checkpoint.load(write(tmp_path / "step_00000001", files), [])
    assert not ran.exists()


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("place", ["common.pt", "x.distcp"])
def test_pickles_outside_the_metadata_are_refused_before_they_run(
    tmp_path: Path, place: str
) -> None:
    ran = tmp_path / "ran"
    contents = {"common.pt": saved({}), "x.distcp": saved(None), place: saved(Trap(ran))}
    stored = _StorageInfo("x.distcp", 0, len(contents["x.distcp"]))
    metadata = Metadata({"x": BytesStorageMetadata()}, storage_data={MetadataIndex("x"): stored})
    files = {".metadata": pickle.dumps(metadata), **contents}
    with pytest.raises(CheckpointError, match="do not load files"):
        checkpoint.load(write(tmp_path / "step_00000001", files), [])
    assert not ran.exists()
