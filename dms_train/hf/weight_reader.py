"""Reading the weights of a model directory, tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dms_train.hf.adapter import ADAPTER_WEIGHTS, Adapter, replaced_rows
from dms_train.hf.architecture import Architecture
from dms_train.hf.directory import read_architecture, resolve
from dms_train.hf.errors import HFError
from dms_train.hf.formats.registry import read_spec
from dms_train.hf.mxfp4 import BLOCK, SUFFIXES, dequantise
from dms_train.hf.side_files import ADAPTER_CONFIG, is_adapter, refuse_side_files
from dms_train.hf.stored import StoredPart
from dms_train.hf.stored_tensors import read_blocks, read_part
from dms_train.hf.tensor_values import is_finite
from dms_train.hf.tensors import expected_shapes
from dms_train.hf.typed import typed
from dms_train.hf.weight_index import WeightIndex

_TIED = _EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = ("F64", "F32", "F16", "BF16")
_HALF = ("F16", "BF16")
# Buffers of older versions of transformers; every program computes them anew.
_LEFTOVER = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_ROWS = 8192  # rows of two matrices that are compared at once


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
        self._index = WeightIndex(self.directory)
        self._open: tuple[str, Any] | None = None
        refuse_side_files(self.directory)
        self._refuse_dtypes()
        if self._adapter is not None:
            self._adapter.require_base(self._replaced_rows(self._adapter))

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
                f"{self.directory}: {len(quantised)} of {len(self._index)} tensors are stored as "
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
            self._index.require_shape(name, shape)
        read = {*expected, *extra}
        unread = [name for name in self.names() if name not in read]
        if architecture.tie_word_embeddings and _HEAD in unread:
            self._require_tied()
            unread.remove(_HEAD)
        return self._leftovers(unread)

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
        left_out = self._index.left_out
        if left_out:
            return (
                f"{self.directory}: only the language model is read; {len(left_out)} tensors "
                f"are left out, first {min(left_out)}, and exports do not hold them"
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
        adapter = [] if self._adapter is None else [self._adapter.directory / ADAPTER_WEIGHTS]
        return [*self._index.files, *adapter]

    def names(self) -> list[str]:
        """List all tensor names, sorted."""
        return self._index.names()

    @typed
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape from the header, without reading the tensor; KeyError if absent."""
        return self._index[name].shape

    @typed
    def dtype(self, name: str) -> str:
        """Return the dtype in safetensors' notation (`BF16`, `F32`, ...); KeyError if absent."""
        stored = self._index[name].dtype
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
        if self._index.part(name) is not None:
            return self._stored(name, 0, 0, self.shape(name)[0])
        stored = self._index.name_in_file(name)
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
        part = self._index.part(name)
        if part is not None:
            if self._index.is_quantised(part):
                return self._dequantised(part, dim, start, stop)
            whole = self._index.name_in_file(part.stored)
            return self._read(
                name, lambda file: read_part(part, file.get_slice(whole), dim, start, stop)
            )
        cut = (slice(None),) * dim + (slice(start, stop),)
        whole = self._index.name_in_file(name)
        return self._read(name, lambda file: file.get_slice(whole)[cut])

    def _dequantised(self, part: StoredPart, dim: int, start: int, stop: int) -> Tensor:
        """Read indices of a tensor of an expert, from the blocks and scales that hold them."""
        whole, blocks, scales = (part.stored + suffix for suffix in ("", *SUFFIXES))
        wanted = part, dim, start, stop
        packed = self._read(blocks, lambda file: read_blocks(file.get_slice(blocks), *wanted))
        powers = self._read(scales, lambda file: read_blocks(file.get_slice(scales), *wanted))
        numbers = self._checked(whole, dequantise(packed, powers), self._index.file(blocks))
        return numbers.narrow(1, start % BLOCK, stop - start) if dim else numbers

    def _read(self, name: str, read: Callable[[Any], Tensor]) -> Tensor:
        from safetensors import SafetensorError, safe_open

        file = self._index.file(name)
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
