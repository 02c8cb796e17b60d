"""A checkpoint and an export get their names when the storage has their content."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dms_train.export.writer import write_export
from dms_train.hf import durable
from dms_train.hf.tensors import expected_shapes
from dms_train.hf.weight_writer import WeightWriter
from dms_train.mcore.engine import McoreEngine

Journal = Callable[[], list[tuple[str, ...]]]


@pytest.fixture
def engine(build: Callable[..., McoreEngine]) -> McoreEngine:
    return build("llama", "dms")


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    """Record what is synchronised and renamed, in order, also by the processes that write."""
    file = tmp_path / "journal"
    fsync, replace = os.fsync, os.replace

    def note(*words: str) -> None:
        with file.open("a") as lines:
            lines.write("\t".join(words) + "\n")

    def noted_fsync(number: int) -> None:
        fsync(number)
        note("synchronised", os.readlink(f"/proc/self/fd/{number}"))

    def noted_replace(source: Any, target: Any, **folders: Any) -> None:
        replace(source, target, **folders)
        note("renamed", str(source), str(target))

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    return lambda: [tuple(line.split("\t")) for line in file.read_text().splitlines()]


def check(lines: list[tuple[str, ...]], published: Path) -> None:
    (named,) = (i for i, line in enumerate(lines) if line[-1] == str(published) and len(line) == 3)
    before = {line[1] for line in lines[:named] if line[0] == "synchronised"}
    after = {line[1] for line in lines[named:] if line[0] == "synchronised"}
    partial = lines[named][1]
    for folder, _, files in os.walk(published):
        inside = os.path.join(partial, os.path.relpath(folder, published))
        for file in files:
            names = {
                os.path.normpath(os.path.join(inside, name)) for name in (file, f"{file}.partial")
            }
            assert names & before, file
        assert os.path.normpath(inside) in before
    assert {str(published.parent), str(published.parent.parent)} <= after


def test_a_checkpoint(engine: McoreEngine, tmp_path: Path, journal: Journal) -> None:
    path = tmp_path / "run" / "checkpoints" / "step_00000001"
    engine.save(path, {"step": 1})
    check(journal(), path)
    engine.annotate(path, {"exported": "cr2"})
    assert journal()[-1] == ("synchronised", str(path))


def test_an_export(engine: McoreEngine, tmp_path: Path, journal: Journal) -> None:
    path = tmp_path / "run" / "exports" / "hf"
    shapes = expected_shapes(engine.architecture)
    write_export(
        path,
        architecture=engine.architecture,
        spec=engine.spec,
        cr_factor=None,
        target_cr=2.0,
        dtype=torch.float32,
        export_format="dms",
        weights=((name, torch.zeros(shape)) for name, shape in shapes.items()),
        source_dir=None,
        selftest=None,
        provenance={},
    )
    check(journal(), path)


def test_a_shard_is_synchronised_before_the_next_one(tmp_path: Path, journal: Journal) -> None:
    with WeightWriter(tmp_path, max_shard_bytes=16) as writer:
        for number in range(3):
            writer.add(str(number), torch.zeros(4))
            written = sorted(map(str, tmp_path.glob(".shard-*")))
            if number:
                assert [line[1] for line in journal()] == written
                assert len(written) == number


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_folders_of_file_systems_that_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(_file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    durable.sync_folder(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=f"{os.strerror(number)}: '{tmp_path}/file'"):
        durable.sync_file(tmp_path / "file")


def test_a_folder_that_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output"):
        durable.sync_folder(tmp_path)
