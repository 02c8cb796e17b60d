"""Index of the tensors of a model directory, from the headers of its files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dms_train.hf.directory import read_architecture
from dms_train.hf.errors import HFError
from dms_train.hf.mxfp4 import BLOCK, BLOCKS, SUFFIXES
from dms_train.hf.safetensors_files import INDEX_FILE, read_header, weight_files
from dms_train.hf.stored import StoredPart, stored_parts, stored_shapes

# Prefix of the language model's tensors beside a vision tower, and their prefix without one.
_LANGUAGE_MODEL, _MODEL = "model.language_model.", "model."


class Entry(NamedTuple):
    """Tensor in the header of a file.

    Attributes:
        file: Name of the file.
        dtype: Dtype in the notation of safetensors.
        shape: Shape.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]


class WeightIndex:
    """File, dtype and shape of every tensor of a directory.

    Names and shapes are those of `expected_shapes`, also where the files of a family have others.
    A directory whose config.json is absent or not supported keeps those of the files.

    Attributes:
        directory: The directory.
        left_out: Names of tensors in the files that do not belong to the language model.

    Raises:
        FileNotFoundError: Weights or a shard are absent.
        HFError: A file is truncated, or the index file, the shards and config.json disagree.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.left_out: list[str] = []
        self._entries = _read_entries(directory)
        self._quantised: dict[str, str] = {}  # file of each tensor of MXFP4 blocks or scales
        self._in_file: dict[str, str] = {}  # names in the files of tensors that are renamed
        self._parts = self._split_stored()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> Entry:
        """Return the entry of a tensor; KeyError if absent."""
        if name not in self._entries:
            raise KeyError(f"{self.directory}: no tensor {name}")
        return self._entries[name]

    @property
    def files(self) -> list[Path]:
        """List the files that hold the tensors, sorted."""
        return [self.directory / name for name in sorted({e.file for e in self._entries.values()})]

    def names(self) -> list[str]:
        """List all tensor names, sorted."""
        return sorted(self._entries)

    def part(self, name: str) -> StoredPart | None:
        """Return where a tensor lies in a tensor of the files; None if the files hold it whole."""
        return self._parts.get(name)

    def is_quantised(self, part: StoredPart) -> bool:
        """Return whether the files hold a part as MXFP4 blocks and scales."""
        return part.stored + BLOCKS in self._quantised

    def file(self, name: str) -> str:
        """Return the file of a tensor, or of MXFP4 blocks or scales; KeyError if absent."""
        return self._quantised.get(name) or self[name].file

    def name_in_file(self, name: str) -> str:
        """Return the name in the files of a tensor that they hold whole."""
        return self._in_file.get(name, name)

    def require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise HFError if a tensor is absent or has another shape."""
        if name not in self._entries:
            raise HFError(
                f"{self.directory}: no tensor {name}, which config.json states; "
                "copy the directory again"
            )
        stored = self._entries[name].shape
        if stored != shape:
            raise HFError(
                f"{self.directory}: {name} has shape {stored}, config.json states "
                f"{shape}; the weights and config.json do not belong together"
            )

    def _split_stored(self) -> dict[str, StoredPart]:
        """Replace tensors of the files by those that they make up; HFError if one is absent."""
        try:
            architecture = read_architecture(self.directory)
        except (FileNotFoundError, HFError):
            return {}
        self._take_language_model(architecture.described.left_out)
        parts, shapes = stored_parts(architecture), stored_shapes(architecture)
        stored = {}
        for name in dict.fromkeys(part.stored for part in parts.values()):
            if name + BLOCKS in self._entries:
                stored[name] = self._take_quantised(name, shapes[name])
                continue
            self.require_shape(name, shapes[name])
            stored[name] = self._entries.pop(name)
        for name, part in parts.items():
            entry = stored[part.stored]
            inner = entry.shape[1:] if part.expert is None else entry.shape[1:-1]
            self._entries[name] = entry._replace(shape=(part.rows, *inner))
        return parts

    def _take_language_model(self, left_out: tuple[str, ...]) -> None:
        """Drop tensors with the prefixes of `left_out`, and rename the language model's."""
        if not left_out:
            return
        for stored in list(self._entries):
            if stored.startswith(left_out):
                self.left_out.append(stored)
                del self._entries[stored]
            elif stored.startswith(_LANGUAGE_MODEL):
                name = _MODEL + stored.removeprefix(_LANGUAGE_MODEL)
                self._in_file[name] = stored
                self._entries[name] = self._entries.pop(stored)

    def _take_quantised(self, name: str, shape: tuple[int, ...]) -> Entry:
        """Replace the blocks and scales of MXFP4 experts by one tensor in bfloat16."""
        experts, inner, rows = shape
        groups = (experts, rows, inner // BLOCK)
        for suffix, expected in zip(SUFFIXES, ((*groups, BLOCK // 2), groups), strict=True):
            self.require_shape(name + suffix, expected)
            self._quantised[name + suffix] = self._entries.pop(name + suffix).file
        return Entry(self._quantised[name + BLOCKS], "BF16", shape)


def _read_entries(directory: Path) -> dict[str, Entry]:
    """Read the headers of all files, and compare them with the index file."""
    files, mapping = weight_files(directory)
    entries = {
        name: Entry(file, header["dtype"], tuple(header["shape"]))
        for file in files
        for name, header in read_header(directory / file).items()
    }
    for name, file in (mapping or {}).items():
        if name not in entries or entries[name].file != file:
            raise HFError(
                f"{directory / INDEX_FILE}: {name} is not in {file}; copy the directory again"
            )
    return entries
