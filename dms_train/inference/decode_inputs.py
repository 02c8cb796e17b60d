"""Inputs of decode steps, packed by the host into one array of fields.

Shape letters: b sequences of a step, k steps of a burst.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dms_train.kernels.layers.types import SamplingLimits

Integers: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

ROWS = 2  # index of the field
FIELDS = 5
LIMITED_FIELDS = 8


class DecodeInputs(NamedTuple):
    """Inputs of a decode step, each [b] on the device.

    Attributes:
        tokens: int64; -1 for the newest token of the cache row, which the previous step sampled.
        position: int64.
        rows: int64, cache rows; -1 for an unused entry.
        keys: int64, streams of random numbers.
        temperature: float64.
        limits: Top-k, top-p and min-p; None if no sequence has any.
    """

    tokens: Tensor
    position: Tensor
    rows: Tensor
    keys: Tensor
    temperature: Tensor
    limits: SamplingLimits | None = None

    @classmethod
    def of(cls, packed: Tensor) -> DecodeInputs:
        """Return the fields of one step, from int64 [5 or with limits 8, b]."""
        tokens, position, rows, keys, temperature, *rest = packed.unbind()
        limits = None
        if rest:
            top_k, *shares = rest
            limits = SamplingLimits(top_k, *(share.view(torch.float64) for share in shares))
        return cls(tokens, position, rows, keys, temperature.view(torch.float64), limits)


@dataclass(frozen=True, slots=True, eq=False)
class PackedInputs:
    """Inputs of a burst of steps on the host.

    Attributes:
        fields: int64 [k, 5 or with limits 8, b], fields in the order of `DecodeInputs`.
    """

    fields: Integers

    @classmethod
    def of(
        cls,
        tokens: Integers,
        position: Integers,
        rows: Integers,
        keys: Integers,
        temperature: Floats,
        limits: tuple[Integers, Floats, Floats] | None = None,
    ) -> PackedInputs:
        """Pack fields.

        Args:
            tokens: As in `DecodeInputs`, [k, b].
            position: As in `DecodeInputs`, [k, b].
            rows: As in `DecodeInputs`, [k, b].
            keys: As in `DecodeInputs`, broadcastable to [k, b].
            temperature: [b].
            limits: Top-k, top-p and log min-p of all steps, each [b].
        """
        count = FIELDS if limits is None else LIMITED_FIELDS
        fields = np.empty((len(tokens), count, tokens.shape[1]), np.int64)
        arrays = (tokens, position, rows, keys, temperature, *(limits or ()))
        for number, array in enumerate(arrays):
            fields[:, number] = array.view(np.int64)
        return cls(fields)

    @property
    def limited(self) -> bool:
        """True if there are limits."""
        return self.fields.shape[1] == LIMITED_FIELDS

    @property
    def position(self) -> Integers:
        """Positions of the tokens, [k, b]."""
        return self.fields[:, 1]

    @property
    def rows(self) -> Integers:
        """Cache rows, [k, b]."""
        return self.fields[:, ROWS]
