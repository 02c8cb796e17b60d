"""Writing the weights of a model directory, shard by shard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from torch import Tensor

from dms_train.hf import durable
from dms_train.hf.errors import HFError
from dms_train.hf.json_files import write_json
from dms_train.hf.safetensors_files import INDEX_FILE, SINGLE_FILE, save_tensors
from dms_train.hf.typed import typed

SHARD_BYTES = 5 * 1024**3
"""Maximum size of a weight file, unless a single tensor is larger."""


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
