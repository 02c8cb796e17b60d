"""`PREFIX.manifest.json`: the expected content of `.bin/.idx` files, and their tokenizer.

If the loss counts only some tokens, the shard has a second pair, `PREFIX.loss_mask.bin` and `.idx`.
It has one byte for each token: 1 where the token counts as a label, else 0.

Megatron's files record no tokenizer, no vocabulary size and no checksum. The manifest lets a run
refuse a truncated file, or a file of another tokenizer, before the training.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any

from dms_train.data.errors import DataError, refuse_pointer
from dms_train.data.index_file import bin_path, idx_path, read_index
from dms_train.data.origins import UNKNOWN_TERMS, Origin, counted

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One input file of a shard.

    Attributes:
        name: File name without its directory.
        sha256: Hash of its bytes.
        rows: Documents taken from it.
    """

    name: str
    sha256: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMask:
    """Mask files of a shard; their documents are as long as the shard's.

    Attributes:
        loss_tokens: Tokens that count in the loss.
        bin_sha256: Hash of `PREFIX.loss_mask.bin`.
        idx_sha256: Hash of `PREFIX.loss_mask.idx`.
    """

    loss_tokens: int
    bin_sha256: str
    idx_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of one shard.

    Attributes:
        format_version: Version of this record, `FORMAT_VERSION`.
        tokenizer_sha256: Hash of the bytes of `tokenizer.json`.
        vocab_size: Number of tokenizer entries, including added tokens. For generated documents,
            the number of rows of the model's embedding if it is larger.
        eod_id: Token that ends every document; None when none was appended.
        max_token_id: Largest token id in the data.
        documents: Documents in the shard.
        tokens: Tokens in the shard.
        bin_bytes: Size of `PREFIX.bin`.
        idx_bytes: Size of `PREFIX.idx`.
        idx_sha256: Hash of `PREFIX.idx`.
        bin_sha256: Hash of `PREFIX.bin`.
        dtype: `uint16` or `int32`.
        sources: Input files in order.
        created_with: Version of each program that wrote it.
        loss_mask: The mask files; None when every token counts in the loss.
        preparation: Settings of the choice and rendering of documents, for commands that do both.
        origins: Source, licence and tokens of each part; empty in a manifest that does not state
            them (see `origins_of`).
    """

    format_version: int = FORMAT_VERSION
    tokenizer_sha256: str
    vocab_size: int
    eod_id: int | None
    max_token_id: int
    documents: int
    tokens: int
    bin_bytes: int
    idx_bytes: int
    idx_sha256: str
    bin_sha256: str
    dtype: str
    sources: tuple[Source, ...]
    created_with: dict[str, str]
    loss_mask: LossMask | None = None
    preparation: dict[str, Any] | None = None
    origins: tuple[Origin, ...] = ()


_OPTIONAL = ("loss_mask", "preparation", "origins")  # not written when absent
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "int | None": (int, NoneType),
    "tuple[Source, ...]": (list,),
    "dict[str, str]": (dict,),
    "LossMask | None": (dict, NoneType),
    "dict[str, Any] | None": (dict, NoneType),
    "str | None": (str, NoneType),
    "tuple[Origin, ...]": (list,),
}


def manifest_path(prefix: str | Path) -> Path:
    """Return the path of the manifest of a shard."""
    return Path(f"{prefix}.manifest.json")


def mask_prefix(prefix: str | Path) -> Path:
    """Return the prefix of the mask files of a shard."""
    return Path(f"{prefix}.loss_mask")


def file_sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file, read in blocks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_manifest(prefix: str | Path, manifest: Manifest) -> None:
    """Write the manifest atomically: a reader sees the old file, the new one or none."""
    path = manifest_path(prefix)
    partial = path.with_name(path.name + ".partial")
    record = asdict(manifest)
    for name in _OPTIONAL:
        if not record[name]:
            del record[name]
    try:
        with partial.open("w", encoding="utf-8") as stream:
            json.dump(record, stream, indent=2)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_manifest(prefix: str | Path) -> Manifest:
    """Read the manifest of a shard.

    Raises:
        DataError: It is missing, is a Git LFS pointer, is not valid JSON, or has other fields than
            this version writes.
    """
    path = manifest_path(prefix)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: missing; {_advice(prefix)}") from None
    except ValueError as error:
        refuse_pointer(path)
        raise DataError(f"{path}: not valid JSON ({error}); tokenise the data again") from None
    version = record.get("format_version") if isinstance(record, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path}: manifest version {version}, this program reads {FORMAT_VERSION}; "
            "tokenise the data again"
        )
    _check_fields(path, record, Manifest)
    for source in record["sources"]:
        _check_fields(path, source, Source)
    for origin in record.get("origins", ()):
        _check_fields(path, origin, Origin)
    mask = record.get("loss_mask")
    if mask is not None:
        _check_fields(path, mask, LossMask)
        mask = LossMask(**mask)
    sources = tuple(Source(**source) for source in record["sources"])
    origins = tuple(Origin(**origin) for origin in record.get("origins", ()))
    return Manifest(**{**record, "sources": sources, "loss_mask": mask, "origins": origins})


def origins_of(manifest: Manifest) -> tuple[Origin, ...]:
    """Return the origins of a shard; one unknown origin if its manifest states none."""
    unknown = counted(UNKNOWN_TERMS, manifest.bin_sha256, manifest.tokens)
    return manifest.origins or (unknown,)


def check_layout(prefix: str | Path, manifest: Manifest) -> None:
    """Check sizes, header and numbers of a shard; reads no file whole.

    Raises:
        DataError: A file is missing or a Git LFS pointer, its size or header is wrong, or its
            numbers of documents or tokens differ.
    """
    _check_sizes(prefix, manifest)
    _check_counts(prefix, manifest)


def check_shard(prefix: str | Path, manifest: Manifest) -> None:
    """Check that the files on disk are the ones the manifest describes.

    Reads the whole index but only the size of the token file; see `check_bin_hash`.

    Raises:
        DataError: As `check_layout`, or the hash of an index differs.
    """
    _check_sizes(prefix, manifest)
    for path, sha256 in idx_hashes(prefix, manifest).items():
        check_hash(path, sha256)
    _check_counts(prefix, manifest)


def _check_sizes(prefix: str | Path, manifest: Manifest) -> None:
    _check_size(prefix, bin_path(prefix), manifest.bin_bytes)
    _check_size(prefix, idx_path(prefix), manifest.idx_bytes)
    if manifest.loss_mask is not None:
        mask = mask_prefix(prefix)
        _check_size(prefix, bin_path(mask), manifest.tokens)
        _check_size(prefix, idx_path(mask), manifest.idx_bytes)


def _check_counts(prefix: str | Path, manifest: Manifest) -> None:
    index = read_index(prefix)
    actual = {
        "documents": len(index.lengths),
        "tokens": index.tokens,
        "dtype": index.dtype,
        "bin_bytes": index.bin_bytes,
    }
    for name, value in actual.items():
        if value != getattr(manifest, name):
            raise DataError(
                f"{idx_path(prefix)}: {name} is {value}, the manifest says "
                f"{getattr(manifest, name)}; tokenise the data again"
            )


def check_bin_hash(prefix: str | Path, manifest: Manifest) -> None:
    """Check every byte of tokens and mask against the manifest; takes time on large files.

    Raises:
        DataError: The hash differs.
    """
    for path, sha256 in bin_hashes(prefix, manifest).items():
        check_hash(path, sha256)


def idx_hashes(prefix: str | Path, manifest: Manifest) -> dict[Path, str]:
    """Map the index and the index of the mask to their expected SHA-256."""
    hashes = {idx_path(prefix): manifest.idx_sha256}
    if manifest.loss_mask is not None:
        hashes[idx_path(mask_prefix(prefix))] = manifest.loss_mask.idx_sha256
    return hashes


def bin_hashes(prefix: str | Path, manifest: Manifest) -> dict[Path, str]:
    """Map the token file and the mask file to their expected SHA-256."""
    hashes = {bin_path(prefix): manifest.bin_sha256}
    if manifest.loss_mask is not None:
        hashes[bin_path(mask_prefix(prefix))] = manifest.loss_mask.bin_sha256
    return hashes


def check_run(manifest: Manifest, *, vocab_size: int, tokenizer_sha256: str | None) -> None:
    """Check that a model can train on the shard.

    Args:
        manifest: The shard's manifest.
        vocab_size: Number of embedding rows of the model, without padding.
        tokenizer_sha256: Hash of the model's `tokenizer.json`; None when the model has none.

    Raises:
        DataError: A token id lies outside the vocabulary, or the tokenizer differs.
    """
    names = ", ".join(source.name for source in manifest.sources)
    if manifest.max_token_id >= vocab_size:
        raise DataError(
            f"data from {names}: token id {manifest.max_token_id} is outside the model's "
            f"vocabulary of {vocab_size}; tokenise with the model's own tokenizer"
        )
    if tokenizer_sha256 is not None and manifest.tokenizer_sha256 != tokenizer_sha256:
        raise DataError(
            f"data from {names}: made with tokenizer {manifest.tokenizer_sha256[:12]}, the model "
            f"has {tokenizer_sha256[:12]}; tokenise with the model's own tokenizer"
        )


def _check_size(prefix: str | Path, path: Path, size: int) -> None:
    if not path.is_file():
        raise DataError(f"{path}: missing; {_advice(prefix)}")
    if path.stat().st_size != size:
        refuse_pointer(path)
        raise DataError(
            f"{path}: {path.stat().st_size} bytes, the manifest says {size}; "
            "the file is truncated or damaged: copy it or tokenise the data again"
        )


def check_hash(path: Path, sha256: str) -> None:
    """Check every byte of a file.

    Raises:
        DataError: The hash differs.
        OSError: The file cannot be read.
    """
    sha256_of_file = file_sha256(path)
    if sha256_of_file != sha256:
        raise DataError(
            f"{path}: SHA-256 {sha256_of_file[:12]}, the manifest says {sha256[:12]}; "
            "the file is damaged: copy it or tokenise the data again"
        )


def _check_fields(
    path: Path, record: Any, kind: type[Manifest | Source | LossMask | Origin]
) -> None:
    kinds = {field.name: _KINDS[str(field.type)] for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    if not isinstance(record, dict) or not needed <= set(record) <= set(kinds):
        raise DataError(f"{path}: a {kind.__name__} needs {', '.join(sorted(needed))}")
    for name in record:
        accepted = kinds[name]
        if not isinstance(record[name], accepted) or isinstance(record[name], bool):
            raise DataError(f"{path}: {name} is {record[name]!r}; tokenise the data again")


def _advice(prefix: str | Path) -> str:
    stem = str(prefix)
    if stem.endswith((".bin", ".idx", ".manifest.json")):
        return "name the files by their common prefix, without an extension"
    return "make the files with dms-data tokenize, or correct data.paths"
