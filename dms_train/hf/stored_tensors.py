"""Conversion of tensors between `expected_shapes` and the files of a family; see `hf.stored`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dms_train.hf.architecture import Architecture
from dms_train.hf.mxfp4 import BLOCK
from dms_train.hf.stored import StoredPart, stored_parts, stored_shapes


def _rows(part: StoredPart) -> Tensor:
    """Return the rows in the files, in the order of the tensor that they make up."""
    rows = torch.arange(part.rows)
    if part.block:
        rows = rows // part.block * part.stride + rows % part.block
    rows = rows + part.first
    if not part.order:
        return rows
    return rows.unflatten(0, (-1, len(part.order)))[:, part.order].flatten()


def expert_rows(part: StoredPart, matrix: Tensor) -> Tensor:
    """View the rows of a part in its expert's matrix in the files, [..., all rows]."""
    return matrix.movedim(-1, 0)[part.first :: part.step]


def read_part(part: StoredPart, tensor: Any, dim: int, start: int, stop: int) -> Tensor:
    """Return the indices from `start` to `stop` of dimension 0 or 1 of a tensor.

    Args:
        part: Rows that make up the tensor.
        tensor: Slice of safetensors over the tensor in the files; only the rows needed are read.
        dim: The dimension.
        start: First index.
        stop: Index after the last one.
    """
    if part.expert is not None:
        return expert_rows(part, tensor[part.expert]).narrow(dim, start, stop - start)
    rows = _rows(part) if dim else _rows(part)[start:stop]
    first, last = int(rows.min()), int(rows.max())
    columns = (slice(start, stop),) if dim else ()
    block: Tensor = tensor[(slice(first, last + 1), *columns)]
    return block[rows - first] if part.order or part.block else block


def read_blocks(tensor: Any, part: StoredPart, dim: int, start: int, stop: int) -> Tensor:
    """Return the MXFP4 blocks, or their scales, that hold some indices of an expert's matrix.

    Args:
        tensor: Slice of safetensors over the blocks or scales of all experts. Its tensors are views
            of the file, so only the result is read.
        part: Rows of the expert.
        dim: 0 for rows, 1 for inputs.
        start: First index.
        stop: Index after the last one.
    """
    own: Tensor = tensor[part.expert][part.first :: part.step]
    return own[:, start // BLOCK : -(-stop // BLOCK)] if dim else own[start:stop]


def to_stored(
    a: Architecture, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the files, each as soon as all its parts are there.

    Args:
        a: The model.
        tensors: Names of `expected_shapes`, and tensors.
    """
    parts, shapes = stored_parts(a), stored_shapes(a)
    incomplete: dict[str, tuple[Tensor, int]] = {}
    for name, tensor in tensors:
        if name not in parts:
            yield name, tensor
            continue
        part = parts[name]
        stored = part.stored
        whole, filled = incomplete.pop(stored, (tensor.new_empty(shapes[stored]), 0))
        if part.expert is None:
            whole[_rows(part)] = tensor
        else:
            expert_rows(part, whole[part.expert]).copy_(tensor)
        filled += tensor.numel()
        if filled == whole.numel():
            yield stored, whole
        else:
            incomplete[stored] = whole, filled
