"""Hugging Face model directories: lookup, reading by tensor, writing by shard.

Weights are safetensors only; nothing here unpickles.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from dms_train.hf import durable
from dms_train.hf.adapter import ADAPTER_WEIGHTS, Adapter, replaced_rows
from dms_train.hf.architecture import Architecture, from_hf_config
from dms_train.hf.errors import HFError
from dms_train.hf.formats.registry import read_spec, require_known_format
from dms_train.hf.gguf_directory import cached_gguf, is_gguf
from dms_train.hf.json_files import read_config, read_json, write_json
from dms_train.hf.mxfp4 import BLOCK, BLOCKS, SUFFIXES, dequantise
from dms_train.hf.side_files import ADAPTER_CONFIG, is_adapter, refuse_side_files
from dms_train.hf.stored import StoredPart, stored_parts, stored_shapes
from dms_train.hf.stored_tensors import read_blocks, read_part
from dms_train.hf.tensors import expected_shapes
from dms_train.hf.text_files import refuse_pointer
from dms_train.hf.typed import typed

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5 * 1024**3
"""Maximum size of a weight file, unless a single tensor is larger."""
# README.md is the model card: an export states the licence that it names.
_FILES_OF_INTEREST = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md"]
# Folders of gpt-oss: the same weights for other programs. The patterns above match in all folders.
_OTHER_FORMS = ["original/*", "metal/*"]
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_TIED = _EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = ("F64", "F32", "F16", "BF16")
_HALF = ("F16", "BF16")
# Buffers of older versions of transformers; every program computes them anew.
_LEFTOVER = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
# Prefix of the language model's tensors beside a vision tower, and their prefix without one.
_LANGUAGE_MODEL, _MODEL = "model.language_model.", "model."
_ROWS = 8192  # rows of two matrices that are compared at once


@typed
def resolve(
    path_or_id: str | Path, *, revision: str | None = None, local_files_only: bool = True
) -> Path:
    """Find a model directory.

    Args:
        path_or_id: A directory, which takes precedence, a GGUF file, or a hub id such as
            `Qwen/Qwen3-0.6B`.
        revision: Hub revision; ignored for directories and files.
        local_files_only: Look only into the local hub cache, never at the network.

    Returns:
        The directory; for a GGUF file the one that `cached_gguf` converts it to.

    Raises:
        FileNotFoundError: One line that names what is absent and what to do.
        HFError: An argument has another type, the name is empty, or the path is a file that is
            not GGUF or not supported.
    """
    if not str(path_or_id):
        raise HFError("path_or_id='': give a directory, a GGUF file or a hub id")
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if is_gguf(path):
        return cached_gguf(path)
    if path.is_file():
        with path.open("rb") as file:
            refuse_pointer(path, file.read(64))
        raise HFError(f"{path}: a file, but not a GGUF file; give a model directory")
    name = str(path_or_id)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"{name}: no such directory; correct the path")
    try:
        from huggingface_hub import snapshot_download

        snapshot = snapshot_download(
            name,
            revision=revision,
            local_files_only=local_files_only,
            allow_patterns=_FILES_OF_INTEREST,
            ignore_patterns=_OTHER_FORMS,
        )
    except (ImportError, OSError, ValueError) as error:
        where = "the local hub cache" if local_files_only else "the hub"
        fix = "give a directory, or allow the network with local_files_only=false"
        raise FileNotFoundError(
            f"{name}: neither a directory nor in {where} (revision {revision or 'main'}); {fix}"
        ) from error
    return Path(snapshot)


@typed
def read_architecture(directory: str | Path) -> Architecture:
    """Read the architecture in `config.json`; HFError naming the directory if not supported."""
    require_known_format(Path(directory))
    try:
        return from_hf_config(read_config(directory))
    except HFError as error:
        where = "" if str(directory) in str(error) else f"{directory}: "
        raise HFError(f"{where}{error}") from None


@typed
def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Read the header of a safetensors file and check that the file is complete.

    Returns:
        `{name: {"dtype", "shape", "data_offsets"}}`, without the `__metadata__` entry.

    Raises:
        FileNotFoundError: If the file is absent.
        ValueError: If its header is unreadable, or the length of the file differs from the header.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: weight file is missing; copy the directory again")
    size = path.stat().st_size
    with path.open("rb") as file:
        refuse_pointer(path, file.read(64))
        file.seek(0)
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise HFError(f"{path}: truncated inside its header; copy the file again")
        try:
            header: dict[str, dict[str, Any]] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((_checked_entry(entry) for entry in header.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise HFError(
                f"{path}: not a safetensors file (unreadable header); copy the file again"
            ) from None
    expected = 8 + length + end
    if size != expected:
        raise HFError(f"{path}: {size} bytes, its header states {expected}; copy the file again")
    return header


def _checked_entry(entry: dict[str, Any]) -> int:
    """Return the end of a tensor's bytes; ValueError, TypeError or KeyError if malformed."""
    begin, end = entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (begin, end, *entry["shape"])):
        raise ValueError("malformed entry")
    if not isinstance(entry["dtype"], str):
        raise TypeError("malformed dtype")
    return int(end)


def _weight_files(directory: Path) -> tuple[list[str], dict[str, str] | None]:
    """List the weight files; with shards, also return the index's `weight_map`."""
    if (directory / SINGLE_FILE).is_file():
        return [SINGLE_FILE], None
    if (directory / INDEX_FILE).is_file():
        mapping = read_json(directory / INDEX_FILE).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise HFError(f"{directory / INDEX_FILE}: no weight_map; copy the file again")
        for name, file in mapping.items():
            if not isinstance(file, str):
                raise HFError(
                    f"{directory / INDEX_FILE}: weight_map gives {file!r} for {name}, not a file "
                    "name; copy the file again"
                )
        return sorted(set(mapping.values())), mapping
    if any((directory / name).is_file() for name in _PICKLES):
        raise HFError(
            f"{directory}: has only pytorch_model.bin, which is not read (pickle runs code); "
            "convert it with transformers' save_pretrained(..., safe_serialization=True)"
        )
    raise FileNotFoundError(
        f"{directory}: no {SINGLE_FILE} and no {INDEX_FILE}; copy the directory again"
    )


def _base(adapter: Adapter) -> Path:
    """Find the base model of an adapter; FileNotFoundError or HFError naming both."""
    try:
        return resolve(adapter.base.name, revision=adapter.base.revision)
    except (FileNotFoundError, HFError) as error:
        raise type(error)(
            f"{adapter.directory / ADAPTER_CONFIG}: base_model_name_or_path: {error}"
        ) from None


class WeightReader:
    """Tensors of a directory by name, read from safetensors on access.

    Construction reads every header. It refuses incomplete files, and quantised weights except
    MXFP4 experts, which are read as bfloat16. For an export in format `peft` the tensors are those
    of its base model with the adapter merged. Names, shapes and rows are those of
    `expected_shapes`, also where the files of a family have others. Of a model with a vision tower
    only the language model is read.

    Attributes:
        directory: Directory of the weights, for an adapter that of its base model.

    Raises:
        FileNotFoundError: If weights, a shard or the base model of an adapter are absent.
        ValueError: If a file is truncated, the index and the shards disagree, or the weights are
            stored in another type than F64, F32, F16 and BF16.
    """

    @typed
    def __init__(self, directory: str | Path) -> None:
        self._adapter = Adapter(Path(directory)) if is_adapter(Path(directory)) else None
        self.directory = Path(directory) if self._adapter is None else _base(self._adapter)
        files, mapping = _weight_files(self.directory)
        self._entries: dict[str, tuple[str, dict[str, Any]]] = {}
        for file in files:
            for name, entry in read_header(self.directory / file).items():
                self._entries[name] = (file, entry)
        for name, file in (mapping or {}).items():
            if self._entries.get(name, ("",))[0] != file:
                raise HFError(
                    f"{self.directory / INDEX_FILE}: {name} is not in {file}; copy the directory "
                    "again"
                )
        self._open: tuple[str, Any] | None = None
        self._quantised: dict[str, str] = {}  # file of each tensor of MXFP4 blocks or scales
        self._in_file: dict[str, str] = {}  # names in the files of tensors that are renamed
        self._left_out: list[str] = []
        self._parts = self._split_stored()
        refuse_side_files(self.directory)
        self._refuse_dtypes()
        if self._adapter is not None:
            self._adapter.require_base(self._replaced_rows(self._adapter))

    def _split_stored(self) -> dict[str, StoredPart]:
        """Replace tensors of the files by the tensors that they make up; HFError if one is absent.

        A directory whose config.json is absent or not supported keeps the tensors of the files.
        """
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
            self._require_shape(name, shapes[name])
            stored[name] = self._entries.pop(name)
        for name, part in parts.items():
            file, entry = stored[part.stored]
            inner = entry["shape"][1:] if part.expert is None else entry["shape"][1:-1]
            self._entries[name] = file, {**entry, "shape": [part.rows, *inner]}
        return parts

    def _take_language_model(self, left_out: tuple[str, ...]) -> None:
        """Drop tensors with the prefixes of `left_out`, and rename the language model's."""
        if not left_out:
            return
        for stored in list(self._entries):
            if stored.startswith(left_out):
                self._left_out.append(stored)
                del self._entries[stored]
            elif stored.startswith(_LANGUAGE_MODEL):
                name = _MODEL + stored.removeprefix(_LANGUAGE_MODEL)
                self._in_file[name] = stored
                self._entries[name] = self._entries.pop(stored)

    def _take_quantised(self, name: str, shape: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
        """Replace the blocks and scales of MXFP4 experts by one tensor in bfloat16."""
        experts, inner, rows = shape
        groups = (experts, rows, inner // BLOCK)
        for suffix, expected in zip(SUFFIXES, ((*groups, BLOCK // 2), groups), strict=True):
            self._require_shape(name + suffix, expected)
            self._quantised[name + suffix], _ = self._entries.pop(name + suffix)
        return self._quantised[name + BLOCKS], {"dtype": "BF16", "shape": list(shape)}

    def _replaced_rows(self, adapter: Adapter) -> Iterator[Tensor]:
        """Yield the rows of every layer's q projection that an adapter replaces."""
        a, spec = read_architecture(adapter.directory), read_spec(adapter.directory)
        if spec is None:
            raise HFError(f"{adapter.directory}: config.json has no specification; export it again")
        for layer in a.method_layers:
            name = f"model.layers.{layer}.self_attn.q_proj.weight"
            rows = replaced_rows(a, spec.channel)
            yield torch.cat([self._stored(name, 0, row, row + 1) for row in rows])

    def _refuse_dtypes(self) -> None:
        """Refuse quantised weights, which need scales or codebooks."""
        quantised = [name for name in self.names() if self.dtype(name) not in _DTYPES]
        if quantised:
            raise HFError(
                f"{self.directory}: {len(quantised)} of {len(self._entries)} tensors are stored as "
                f"{self.dtype(quantised[0])}, first {quantised[0]}; quantised weights are not "
                f"supported: use the original model, or convert it to one of {', '.join(_DTYPES)}"
            )

    @typed
    def require(self, architecture: Architecture, extra: Collection[str] = ()) -> str | None:
        """Check that the files hold the tensors of the architecture and no others.

        Reads no tensor, except to compare the output layer of a tied model with its embedding.

        Args:
            architecture: From config.json.
            extra: Names of further tensors that the caller reads.

        Returns:
            A warning that names tensors that are not read, without effect or of another part of
            the model; None without such tensors.

        Raises:
            HFError: A tensor is missing, has another shape, or would be ignored.
        """
        expected = expected_shapes(architecture)
        for name, shape in expected.items():
            self._require_shape(name, shape)
        read = {*expected, *extra}
        unread = [name for name in self.names() if name not in read]
        if architecture.tie_word_embeddings and _HEAD in unread:
            self._require_tied()
            unread.remove(_HEAD)
        return self._leftovers(unread)

    def _require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._entries:
            raise HFError(
                f"{self.directory}: no tensor {name}, which config.json states; "
                "copy the directory again"
            )
        if self.shape(name) != shape:
            raise HFError(
                f"{self.directory}: {name} has shape {self.shape(name)}, config.json states "
                f"{shape}; the weights and config.json do not belong together"
            )

    def _require_tied(self) -> None:
        """Refuse an output layer unlike the embedding, because the embedding would replace it."""
        rows = self.shape(_EMBEDDING)[0]
        same = self.shape(_HEAD) == self.shape(_EMBEDDING) and all(
            torch.equal(*(self.part(n, 0, i, min(i + _ROWS, rows)).double() for n in _TIED))
            for i in range(0, rows, _ROWS)
        )
        if not same:
            raise HFError(
                f"{self.directory}: {_HEAD} differs from {_EMBEDDING}, config.json states "
                "tie_word_embeddings=true; set it to false to use the stored output layer, or "
                f"delete {_HEAD}"
            )

    def _leftovers(self, names: list[str]) -> str | None:
        unknown = [name for name in names if not _LEFTOVER.search(name)]
        if unknown:
            raise HFError(
                f"{self.directory}: {len(unknown)} tensors are not part of the model that "
                f"config.json states, first {unknown[0]}; correct config.json, or delete them if "
                "the model does not need them"
            )
        if self._left_out:
            return (
                f"{self.directory}: only the language model is read; {len(self._left_out)} tensors "
                f"are left out, first {min(self._left_out)}, and exports do not hold them"
            )
        if not names:
            return None
        return (
            f"{self.directory}: {len(names)} tensors are ignored, first {names[0]}; they change "
            "nothing, because such buffers are computed anew"
        )

    @property
    def files(self) -> list[Path]:
        """List the files that hold the tensors, sorted; the last one is that of an adapter."""
        files = [self.directory / name for name in sorted({f for f, _ in self._entries.values()})]
        adapter = [] if self._adapter is None else [self._adapter.directory / ADAPTER_WEIGHTS]
        return [*files, *adapter]

    def names(self) -> list[str]:
        """List all tensor names, sorted."""
        return sorted(self._entries)

    def _entry(self, name: str) -> tuple[str, dict[str, Any]]:
        if name not in self._entries:
            raise KeyError(f"{self.directory}: no tensor {name}")
        return self._entries[name]

    @typed
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape from the header, without reading the tensor; KeyError if absent."""
        return tuple(self._entry(name)[1]["shape"])

    @typed
    def dtype(self, name: str) -> str:
        """Return the dtype in safetensors' notation (`BF16`, `F32`, ...); KeyError if absent."""
        stored = str(self._entry(name)[1]["dtype"])
        if self._adapter is None or not self._adapter.changes(name):
            return stored
        return "BF16" if self._adapter.dtype == torch.bfloat16 else "F32"

    def training_dtype(self) -> str:
        """Return `bf16` if every matrix is stored in 16 bits, else `fp32`."""
        wide = any(self.dtype(n) not in _HALF for n in self.names() if len(self.shape(n)) > 1)
        return "fp32" if wide else "bf16"

    def has_float16(self) -> bool:
        """Return whether a tensor is stored in float16, which bf16 cannot hold exactly."""
        return any(self.dtype(name) == "F16" for name in self.names())

    @typed
    def get(self, name: str) -> Tensor:
        """Read the tensor to the CPU in the dtype that `dtype` returns.

        Raises:
            KeyError: The tensor is absent.
            HFError: The tensor holds NaN or infinite numbers, or cannot be read.
        """
        if name in self._parts:
            return self._stored(name, 0, 0, self.shape(name)[0])
        stored = self._in_file.get(name, name)
        tensor = self._read(name, lambda file: file.get_tensor(stored))
        if self._adapter is None or not self._adapter.changes(name):
            return tensor
        return self._adapter.merge(name, tensor)

    @typed
    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Read the indices from `start` to `stop` of dimension 0 or 1 only; errors as `get`."""
        if self._adapter is not None and self._adapter.changes(name):
            return self.get(name).narrow(dim, start, stop - start)
        return self._stored(name, dim, start, stop)

    def _stored(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        if name in self._parts:
            part = self._parts[name]
            if part.stored + BLOCKS in self._quantised:
                return self._dequantised(part, dim, start, stop)
            whole = self._in_file.get(part.stored, part.stored)
            return self._read(
                name, lambda file: read_part(part, file.get_slice(whole), dim, start, stop)
            )
        cut = (slice(None),) * dim + (slice(start, stop),)
        whole = self._in_file.get(name, name)
        return self._read(name, lambda file: file.get_slice(whole)[cut])

    def _dequantised(self, part: StoredPart, dim: int, start: int, stop: int) -> Tensor:
        """Read indices of a tensor of an expert, from the blocks and scales that hold them."""
        whole, blocks, scales = (part.stored + suffix for suffix in ("", *SUFFIXES))
        wanted = part, dim, start, stop
        packed = self._read(blocks, lambda file: read_blocks(file.get_slice(blocks), *wanted))
        powers = self._read(scales, lambda file: read_blocks(file.get_slice(scales), *wanted))
        numbers = self._checked(whole, dequantise(packed, powers), self._quantised[blocks])
        return numbers.narrow(1, start % BLOCK, stop - start) if dim else numbers

    def _read(self, name: str, read: Callable[[Any], Tensor]) -> Tensor:
        from safetensors import SafetensorError, safe_open

        file = self._quantised.get(name) or self._entry(name)[0]
        try:
            # only the last file stays mapped, so that the pages of the others can be freed
            if self._open is None or self._open[0] != file:
                path = self.directory / file
                self._open = file, safe_open(path, framework="pt", device="cpu")
            tensor = read(self._open[1])
        except SafetensorError as error:
            raise HFError(
                f"{self.directory / file}: cannot be read ({error}); copy the file again"
            ) from None
        return self._checked(name, tensor, file)

    def _checked(self, name: str, tensor: Tensor, file: str) -> Tensor:
        if not is_finite(tensor):
            raise HFError(
                f"{self.directory / file}: {name} holds NaN or infinite numbers; use a sound copy "
                "of the model"
            )
        return tensor


@typed
def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinite numbers; makes no copy of it."""
    return not tensor.numel() or all(bound.isfinite() for bound in torch.aminmax(tensor))


def _temporary_shard(directory: Path, number: int) -> Path:
    return directory / f".shard-{number:05d}.partial"


@typed
def write_shard(directory: Path, number: int, tensors: Mapping[str, Tensor]) -> None:
    """Write a shard under a temporary name, on the storage when this returns.

    Args:
        directory: Existing directory.
        number: Position of the shard, from 0.
        tensors: Its tensors on the CPU; they share no storage.

    Raises:
        HFError: It cannot be written.
    """
    shard = _temporary_shard(directory, number)
    save_tensors(shard, tensors, {"format": "pt"})
    # here and not at the end, where other ranks would wait for all shards with a timeout
    durable.sync_file(shard)


@typed
def name_shards(directory: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Give the files of `write_shard` their final names, and write the index of several shards.

    Args:
        directory: Directory of the shards.
        shards: Names of the tensors of each shard.
        total_bytes: Size of all tensors.
    """
    count = len(shards)
    if count == 1:
        os.replace(_temporary_shard(directory, 0), directory / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        os.replace(_temporary_shard(directory, number), directory / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_json(directory / INDEX_FILE, index)


class WeightWriter:
    """Writer of safetensors shards, as a context manager; tensors are streamed.

    Shards carry temporary names until `close`, so a directory never looks complete early. Memory
    is bounded by one shard.

    Args:
        directory: Existing directory without weights of the same names.
        max_shard_bytes: Maximum size of a shard, unless a single tensor is larger.
    """

    @typed
    def __init__(self, directory: str | Path, max_shard_bytes: int = SHARD_BYTES) -> None:
        self.directory = Path(directory)
        self._max_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._names: set[str] = set()
        self._total_bytes = 0

    def __enter__(self) -> WeightWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        for number in range(len(self._shards) + 1):  # the last one may be half written
            _temporary_shard(self.directory, number).unlink(missing_ok=True)

    @typed
    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor (copied to the CPU); ValueError if the name was already added."""
        if name in self._names:
            raise HFError(f"tensor {name} was already written")
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max_bytes:
            self._flush()
        # A copy: safetensors refuses views and shared storage, and the caller may reuse it.
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size
        self._total_bytes += size
        self._names.add(name)

    def _flush(self) -> None:
        write_shard(self.directory, len(self._shards), self._pending)
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def close(self) -> None:
        """Write the last shard, give the shards their final names and write the index."""
        if self._pending or not self._shards:
            self._flush()
        name_shards(self.directory, self._shards, self._total_bytes)


@typed
def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write one safetensors file; HFError when that fails, for example on a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        path.touch()
        mode = path.stat().st_mode
        save_file(dict(tensors), path, metadata=dict(metadata))
        path.chmod(mode)  # safetensors makes files that only their owner can read
    except SafetensorError as error:
        raise HFError(f"{path}: cannot be written ({error}); make room and try again") from None


@typed
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name in config.json, such as `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
