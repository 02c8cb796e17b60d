"""Folders that are no checkpoints are refused, and foreign pickles never run."""

from __future__ import annotations

import errno
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
from torch.distributed.checkpoint.planner import WriteItemType

from dms_train.mcore.checkpoints import checksums
from dms_train.mcore.checkpoints import reading as checkpoint
from dms_train.mcore.checkpoints import state as checkpoint_state
from dms_train.mcore.errors import CheckpointError, DamagedError
from dms_train.mcore.groups import ParallelView


def write(folder: Path, files: dict[str, bytes], **state: Any) -> Path:
    """A sealed folder with these files."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    checkpoint_state.seal(folder, state, checksums.records(folder.iterdir()))
    return folder


class Attribute:
    """Is pickled as the attribute of an object, like an enumeration's member by Python 3.11.2."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, tuple[Any, str]]:
        return getattr, (self.owner, self.name)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


PLAIN = {
    ".metadata": pickle.dumps(Metadata({}, storage_data={})),
    "common.pt": saved({"lr": 0.5}),
    "a.distcp": bytes(range(256)) * 20,
}


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    return write(tmp_path / "step_00000010", PLAIN, step=10, spec={"window": 4})


def test_a_whole_folder_gives_its_state(sealed: Path) -> None:
    assert checkpoint_state.read_state(sealed)["step"] == 10


DAMAGE = {
    "absent": lambda p: shutil.rmtree(p),
    "unsealed": lambda p: (p / checkpoint_state.STATE_FILE).unlink(),
    "file_missing": lambda p: (p / "a.distcp").unlink(),
    "file_truncated": lambda p: (p / "a.distcp").write_bytes(b"1234"),
    "file_grown": lambda p: (p / "a.distcp").write_bytes(b"123456"),
    "file_is_folder": lambda p: ((p / "a.distcp").unlink(), (p / "a.distcp").mkdir()),
    "state_truncated": lambda p: (p / checkpoint_state.STATE_FILE).write_text('{"step": 1'),
    "state_empty": lambda p: (p / checkpoint_state.STATE_FILE).write_text(""),
    "state_without_files": lambda p: (p / checkpoint_state.STATE_FILE).write_text('{"step": 10}'),
    "state_is_a_list": lambda p: (p / checkpoint_state.STATE_FILE).write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_in_one_line_with_the_folder(sealed: Path, damage: str) -> None:
    DAMAGE[damage](sealed)
    with pytest.raises(DamagedError, match=str(sealed)) as caught:
        checkpoint_state.read_state(sealed)
    assert "\n" not in str(caught.value)


def test_newest_passes_damaged_folders_and_reports_why(tmp_path: Path) -> None:
    for step in (8, 9, 10, 100):
        write(tmp_path / f"step_{step:08d}", PLAIN, step=step)
    for name in ("1a2b.partial", "damaged"):
        write(tmp_path / f"step_00000200.{name}", PLAIN)
    (tmp_path / "step_00000100" / "a.distcp").write_bytes(b"1")
    (tmp_path / "step_00000010" / checkpoint_state.STATE_FILE).unlink()
    path, passed = checkpoint.newest(tmp_path)
    assert path == tmp_path / "step_00000009"
    assert len(passed) == 2
    assert "step_00000100" in passed[0]
    assert "1 bytes instead of 5120" in passed[0]
    assert "step_00000010" in passed[1]
    older, passed = checkpoint.newest(tmp_path, before="step_00000009")
    assert (older, passed) == (tmp_path / "step_00000008", [])


def test_newest_of_nothing_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "absent") == (None, [])


class Malicious:
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


@pytest.mark.parametrize("place", ["common.pt", "x.distcp"])
def test_pickles_outside_the_metadata_are_refused_before_they_run(
    tmp_path: Path, place: str
) -> None:
    ran = tmp_path / "ran"
    contents = {"common.pt": saved({}), "x.distcp": saved(None), place: saved(Malicious(ran))}
    stored = _StorageInfo("x.distcp", 0, len(contents["x.distcp"]))
    metadata = Metadata({"x": BytesStorageMetadata()}, storage_data={MetadataIndex("x"): stored})
    files = {".metadata": pickle.dumps(metadata), **contents}
    with pytest.raises(CheckpointError, match="do not load files"):
        checkpoint.load(write(tmp_path / "step_00000001", files), [])
    assert not ran.exists()


def flipped(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.mark.parametrize("name", [*PLAIN, checkpoint_state.STATE_FILE])
def test_one_flipped_bit_anywhere_is_found(sealed: Path, view: ParallelView, name: str) -> None:
    checkpoint.verify(sealed, view)
    bits = 8 * (sealed / name).stat().st_size
    step = 1 if name == checkpoint_state.STATE_FILE else 97
    for bit in range(0, bits, step):
        flipped(sealed / name, bit)
        with pytest.raises(DamagedError, match=str(sealed)):
            checkpoint.verify(sealed, view)
        flipped(sealed / name, bit)
    checkpoint.verify(sealed, view)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_damaged_pickle_is_passed_and_a_foreign_one_refused(sealed: Path, name: str) -> None:
    write(sealed.with_name("step_00000009"), PLAIN)
    (sealed / name).write_bytes(b"x" * (sealed / name).stat().st_size)
    path, passed = checkpoint.newest(sealed.parent)
    assert path == sealed.with_name("step_00000009")
    assert f"the content of {name} is not what was saved" in passed[0]
    state = checkpoint_state.read_state(sealed)
    checkpoint_state.seal(sealed, state, checksums.records(sealed / file for file in PLAIN))
    with pytest.raises(CheckpointError, match="do not load files") as caught:
        checkpoint.newest(sealed.parent)
    assert not isinstance(caught.value, DamagedError)


@pytest.mark.parametrize("name", [*PLAIN, checkpoint_state.STATE_FILE])
def test_a_file_that_cannot_be_read_counts_as_damaged(
    sealed: Path, view: ParallelView, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    older = write(sealed.with_name("step_00000009"), PLAIN)
    real = Path.open

    def fails(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == sealed / name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(DamagedError, match=rf"{name} .*Input/output error.*use an older"):
        checkpoint.verify(sealed, view)
    if name != "a.distcp":  # which is read only to compare its checksum
        path, passed = checkpoint.newest(sealed.parent)
        assert path == older
        assert f"{name} cannot be read (Input/output error)" in passed[0]


@pytest.mark.parametrize("early", [True, False])
def test_a_checkpoint_of_another_format_is_refused_and_not_passed_over(
    sealed: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    write(sealed.with_name("step_00000009"), PLAIN)
    if early:  # the first versions recorded neither a format nor checksums
        sizes = {name: len(content) for name, content in PLAIN.items()}
        (sealed / checkpoint_state.STATE_FILE).write_text(json.dumps({"step": 10, "files": sizes}))
    else:
        monkeypatch.setattr(checkpoint_state, "FORMAT", checkpoint_state.FORMAT + 1)
    now, was = checkpoint_state.FORMAT, 1 if early else checkpoint_state.FORMAT - 1
    with pytest.raises(CheckpointError, match=f"format is {was}.* reads {now}") as caught:
        checkpoint.newest(sealed.parent)
    assert not isinstance(caught.value, DamagedError)
    assert str(sealed) in str(caught.value)


def test_ranks_share_the_files(sealed: Path) -> None:
    recorded = checkpoint_state.recorded_files(sealed)
    shares = [checksums.share(recorded, rank, 2) for rank in range(2)]
    assert shares[0].keys() | shares[1].keys() == recorded.keys() == PLAIN.keys()
    assert not shares[0].keys() & shares[1].keys()
    assert list(checksums.share(recorded, 0, 3)) == [
        "a.distcp"
    ]  # the largest file has a rank alone


def test_an_annotation_keeps_the_folder_valid(sealed: Path, view: ParallelView) -> None:
    checkpoint_state.annotate(sealed, {"exported": "cr2"})
    checkpoint.verify(sealed, view)
    assert checkpoint_state.read_state(sealed)["exported"] == "cr2"
    assert checkpoint_state.read_state(sealed)["step"] == 10


def test_of_attributes_only_members_of_enumerations_are_read(tmp_path: Path) -> None:
    member = Attribute(WriteItemType, "TENSOR")
    readable = write(tmp_path / "member", PLAIN | {".metadata": pickle.dumps(member)})
    reader = checkpoint._MetadataReader(io.BytesIO((readable / ".metadata").read_bytes()))
    assert reader.load() is WriteItemType.TENSOR
    for number, (owner, name) in enumerate(((WriteItemType, "mro"), (Metadata, "__init__"))):
        content = pickle.dumps(Attribute(owner, name))
        folder = write(tmp_path / str(number), PLAIN | {".metadata": content})
        with pytest.raises(CheckpointError, match=f"it takes {name} of"):
            checkpoint.check(folder)
