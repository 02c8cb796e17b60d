"""Files of a shard that is prepared row by row; an interrupted call can be continued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dms_train.data.errors import DataError
from dms_train.data.manifest import (
    Manifest,
    Source,
    file_sha256,
    manifest_path,
    read_manifest,
    write_manifest,
)
from dms_train.data.origins import UNKNOWN_TERMS, Terms, counted
from dms_train.data.writer import ShardWriter
from dms_train.data_prep.journal import Journal
from dms_train.data_prep.rows import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedShard:
    """Description of a shard to make.

    Attributes:
        prefix: Prefix of its files.
        sources: Inputs of the rows.
        settings: All settings that affect the documents, as JSON returns them; `tokenizer_sha256`
            is the hash of `tokenizer.json`.
        vocab_size: Token ids are below this number.
        eod_id: Token that ends every document; None when none was appended.
        loss_mask: True if the loss counts only some tokens.
        counted: Names of the groups of counts for the manifest, besides the outcomes of the rows.
        terms: Source and licence of the rows.
        rows_per_commit: Largest number of rows that a kill can lose.
        overwrite: Replace an existing shard or unfinished work with other settings.
    """

    prefix: Path
    sources: tuple[Source, ...]
    settings: dict[str, Any]
    vocab_size: int
    eod_id: int | None
    loss_mask: bool
    counted: tuple[str, ...]
    terms: Terms = UNKNOWN_TERMS
    rows_per_commit: int = 256
    overwrite: bool = False


def shard_prefix(output: Path, shard: Shard) -> Path:
    """Return `output` itself for one shard, else with the shard's number."""
    if shard.count == 1:
        return output
    return output.with_name(f"{output.name}-{shard.index:05d}-of-{shard.count:05d}")


def verdicts_path(prefix: Path) -> Path:
    """Return the file with the outcome of every row."""
    return prefix.with_name(prefix.name + ".verdicts.jsonl")


def write_shard(shard: PreparedShard, fill: Callable[[Journal], None]) -> Manifest:
    """Make a shard, or continue an interrupted call.

    A shard that exists with the same settings keeps its documents; its manifest gets the terms of
    this call.

    Args:
        shard: Shard to make.
        fill: Function that adds rows from `Journal.next_row` on to the journal. It counts `rows`,
            `rows: OUTCOME`, `documents`, `documents of NUMBER` for each source, `loss_tokens` and
            `GROUP: NAME` for the groups that the manifest holds.

    Raises:
        DataError: The output exists with other settings, no row is kept, or the output cannot be
            written.
    """
    prefix = shard.prefix
    if manifest_path(prefix).exists() and not shard.overwrite:
        manifest = read_manifest(prefix)
        if manifest.preparation is not None and manifest.preparation["settings"] == shard.settings:
            return _with_terms(prefix, manifest, shard.terms)
        raise DataError(
            f"{prefix}: exists already, made with other settings; pass --overwrite to replace it"
        )
    folder = prefix.with_name(prefix.name + ".work")
    with Journal(
        folder,
        shard.settings,
        rows_per_commit=shard.rows_per_commit,
        overwrite=shard.overwrite,
    ) as journal:
        fill(journal)
        journal.commit()
        manifest = _finish(journal, shard)
        journal.remove()
    return manifest


def _with_terms(prefix: Path, manifest: Manifest, terms: Terms) -> Manifest:
    """Return the manifest with these terms, and store it if they have changed."""
    stated = (counted(terms, manifest.bin_sha256, manifest.tokens),)
    if stated == manifest.origins:
        return manifest
    changed = replace(manifest, origins=stated)
    write_manifest(prefix, changed)
    return changed


def _finish(journal: Journal, shard: PreparedShard) -> Manifest:
    verdicts = verdicts_path(shard.prefix)
    journal.copy_verdicts(verdicts)
    if not journal.counts["documents"]:
        why = ", ".join(f"{count} {name}" for name, count in _part(journal, "rows").items())
        raise DataError(
            f"{shard.prefix}: no row is kept ({why or 'there are none'}); see {verdicts}"
        )
    with ShardWriter(
        shard.prefix,
        vocab_size=shard.vocab_size,
        eod_id=shard.eod_id,
        tokenizer_sha256=shard.settings["tokenizer_sha256"],
        loss_mask=shard.loss_mask,
        overwrite=shard.overwrite,
    ) as writer:
        for tokens, mask in journal.documents():
            writer.add(tokens, mask if shard.loss_mask else None)
        preparation = {
            "settings": shard.settings,
            "rows": {"read": journal.counts["rows"], **_part(journal, "rows")},
            **{name: _part(journal, name) for name in shard.counted},
            "loss_tokens": journal.counts["loss_tokens"],
            "verdicts_sha256": file_sha256(verdicts),
        }
        return writer.finish(_sources(journal, shard), preparation, shard.terms)


def _part(journal: Journal, kind: str) -> dict[str, int]:
    """Return the counts whose names begin with `kind`, largest first."""
    counts = {
        name.removeprefix(f"{kind}: "): count
        for name, count in journal.counts.items()
        if name.startswith(f"{kind}: ")
    }
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _sources(journal: Journal, shard: PreparedShard) -> tuple[Source, ...]:
    return tuple(
        replace(source, rows=journal.counts[f"documents of {number}"])
        for number, source in enumerate(shard.sources)
    )
