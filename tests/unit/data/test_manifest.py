"""Damaged, missing or foreign token files are refused with one clear line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dms_train.data.errors import DataError
from dms_train.data.index_file import idx_path, read_index
from dms_train.data.manifest import (
    check_bin_hash,
    check_layout,
    check_run,
    check_shard,
    file_sha256,
    manifest_path,
    read_manifest,
    write_manifest,
)

MakeShard = Callable[..., str]


def refused(check: Callable[[], Any], *parts: str) -> None:
    """The check fails with one line that holds all parts."""
    with pytest.raises(DataError) as caught:
        check()
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


def flip(path: str, position: int) -> None:
    data = bytearray(Path(path).read_bytes())
    data[position] ^= 1
    Path(path).write_bytes(data)


def restamp(prefix: str) -> None:
    """Store the hash of a changed index in the manifest, so that later checks are reached."""
    index = idx_path(prefix)
    changed = replace(
        read_manifest(prefix), idx_bytes=index.stat().st_size, idx_sha256=file_sha256(index)
    )
    write_manifest(prefix, changed)


def test_round_trip(make_shard: MakeShard) -> None:
    prefix = make_shard()
    manifest = read_manifest(prefix)
    write_manifest(prefix, manifest)
    assert read_manifest(prefix) == manifest
    check_shard(prefix, manifest)
    check_bin_hash(prefix, manifest)
    check_run(manifest, vocab_size=61, tokenizer_sha256="a" * 64)
    check_run(manifest, vocab_size=64, tokenizer_sha256=None)
    assert not list(Path(prefix).parent.glob("*.partial"))


def test_truncated_tokens(make_shard: MakeShard) -> None:
    prefix = make_shard()
    data = Path(prefix + ".bin").read_bytes()
    Path(prefix + ".bin").write_bytes(data[:-1])
    size = f"{len(data) - 1} bytes, the manifest says {len(data)}"
    refused(lambda: check_shard(prefix, read_manifest(prefix)), prefix + ".bin", size, "again")


@pytest.mark.parametrize("position", [0, 9, 17, 20, 40, -1])
def test_one_flipped_byte_of_the_index(make_shard: MakeShard, position: int) -> None:
    prefix = make_shard()
    flip(prefix + ".idx", position)
    refused(lambda: check_shard(prefix, read_manifest(prefix)), prefix + ".idx", "SHA-256")


@pytest.mark.parametrize("position", [0, 9, 17, 20, 40])
def test_the_layout_alone_shows_damage_of_header_and_lengths(
    make_shard: MakeShard, position: int
) -> None:
    prefix = make_shard()
    check_layout(prefix, read_manifest(prefix))
    flip(prefix + ".idx", position)
    refused(lambda: check_layout(prefix, read_manifest(prefix)), prefix + ".idx")


def test_one_flipped_token_is_found_by_the_full_check_alone(make_shard: MakeShard) -> None:
    prefix = make_shard()
    flip(prefix + ".bin", 100)
    manifest = read_manifest(prefix)
    check_shard(prefix, manifest)
    refused(lambda: check_bin_hash(prefix, manifest), prefix + ".bin", "SHA-256")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".manifest.json"])
def test_a_file_that_git_lfs_left_out(make_shard: MakeShard, suffix: str) -> None:
    prefix = make_shard()
    Path(prefix + suffix).write_text(POINTER)
    fix = "a Git LFS pointer, not the file itself; run `git lfs pull`"
    refused(lambda: check_shard(prefix, read_manifest(prefix)), prefix + suffix, fix)


def test_an_index_that_git_lfs_left_out_and_no_manifest_describes(make_shard: MakeShard) -> None:
    prefix = make_shard()
    idx_path(prefix).write_text(POINTER)
    refused(lambda: read_index(prefix), prefix + ".idx", "a Git LFS pointer")


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".manifest.json"])
def test_missing_file(make_shard: MakeShard, suffix: str) -> None:
    prefix = make_shard()
    Path(prefix + suffix).unlink()
    refused(
        lambda: check_shard(prefix, read_manifest(prefix)),
        prefix + suffix,
        "missing",
        "dms-data tokenize",
    )


def test_prefix_given_with_an_extension(make_shard: MakeShard) -> None:
    prefix = make_shard()
    refused(lambda: read_manifest(prefix + ".bin"), "common prefix")


@pytest.mark.parametrize(
    ("position", "message"),
    [(0, "not a Megatron index"), (9, "index version 0"), (17, "token type code 9")],
)
def test_invalid_header_with_the_recorded_hash(
    make_shard: MakeShard, position: int, message: str
) -> None:
    prefix = make_shard()
    flip(prefix + ".idx", position)
    restamp(prefix)
    refused(lambda: check_shard(prefix, read_manifest(prefix)), message)


@pytest.mark.parametrize(
    ("position", "message"), [(18, "its header says"), (26, "its header says")]
)
def test_header_counts_that_do_not_fit_the_file(
    make_shard: MakeShard, position: int, message: str
) -> None:
    prefix = make_shard()
    flip(prefix + ".idx", position)
    refused(lambda: read_index(prefix), message)


def test_cut_index(make_shard: MakeShard) -> None:
    prefix = make_shard()
    Path(prefix + ".idx").write_bytes(Path(prefix + ".idx").read_bytes()[:20])
    refused(lambda: check_shard(prefix, read_manifest(prefix)), "20 bytes")
    refused(lambda: read_index(prefix), "not a Megatron index")


@pytest.mark.parametrize("change", [{"documents": 3}, {"tokens": 3}, {"dtype": "int32"}])
def test_counts_that_differ(make_shard: MakeShard, change: dict[str, Any]) -> None:
    prefix = make_shard()
    manifest = replace(read_manifest(prefix), **change)
    refused(lambda: check_shard(prefix, manifest), next(iter(change)), "the manifest says")


def test_model_with_a_smaller_vocabulary(make_shard: MakeShard) -> None:
    manifest = read_manifest(make_shard())
    refused(
        lambda: check_run(manifest, vocab_size=60, tokenizer_sha256=None), "token id 60", "of 60"
    )


def test_model_with_another_tokenizer(make_shard: MakeShard) -> None:
    manifest = read_manifest(make_shard())
    refused(
        lambda: check_run(manifest, vocab_size=61, tokenizer_sha256="d" * 64),
        "aaaaaaaaaaaa",
        "dddddddddddd",
        "own tokenizer",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "manifest version 2"),
        ({"tokens": "many"}, "tokens is 'many'"),
        ({"tokens": True}, "tokens is True"),
        ({"sources": [{"name": "x"}]}, "a Source needs"),
        ({"extra": 1}, "a Manifest needs"),
    ],
)
def test_damaged_manifest(make_shard: MakeShard, change: dict[str, Any], message: str) -> None:
    prefix = make_shard()
    path = manifest_path(prefix)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    refused(lambda: read_manifest(prefix), str(path), message)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_manifest_that_is_not_a_record(make_shard: MakeShard, text: str) -> None:
    prefix = make_shard()
    manifest_path(prefix).write_text(text)
    refused(lambda: read_manifest(prefix), "again")
