"""States of the layers with linear attention, of fixed size for every row of a cache.

Shape letters: l layers with linear attention, b sequences, n tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.hf.architecture import Architecture
from dms_train.kernels.layers.delta_rule import MixerState


def state_bytes(a: Architecture, dtype: torch.dtype) -> int:
    """Return the bytes of the states of one sequence; 0 without linear attention."""
    if a.linear is None:
        return 0
    return LinearStates(a, 1, dtype, torch.device("meta")).nbytes


class LinearStates:
    """Memory of the states; a row starts anew when its sequence has position 0.

    Args:
        a: A model with linear attention.
        rows: Number of rows.
        dtype: Dtype of the computation.
        device: Device of the model.
    """

    def __init__(
        self, a: Architecture, rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        sizes = a.linear
        assert sizes is not None
        layers = [number for number, layer in enumerate(a.attention_layers) if layer.linear]
        self._index = {number: index for index, number in enumerate(layers)}
        groups, values = sizes.key_heads, sizes.value_heads // sizes.key_heads
        inputs = (len(layers), rows, sizes.taps - 1, 2 * sizes.keys + sizes.values)
        heads = (len(layers), rows, groups, values, sizes.key_channels, sizes.value_channels)
        wide = torch.promote_types(dtype, torch.float32)
        self._inputs = torch.zeros(inputs, dtype=dtype, device=device)
        self._heads = torch.zeros(heads, dtype=wide, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return self._inputs.nbytes + self._heads.nbytes

    def read(self, layer: int, rows: Tensor, position: Tensor) -> MixerState:
        """Return the states of sequences before their next tokens.

        Args:
            layer: Number of the layer in the model.
            rows: Rows of the sequences, int64 [b].
            position: Positions of these tokens, int64 [b, n].
        """
        begins = position[:, 0] == 0
        inputs, heads = (x[self._index[layer], rows] for x in (self._inputs, self._heads))
        return MixerState(
            inputs.masked_fill(begins.view(-1, 1, 1), 0),
            heads.masked_fill(begins.view(-1, 1, 1, 1, 1), 0),
        )

    def write(self, layer: int, rows: Tensor, state: MixerState) -> None:
        """Replace the states of sequences; arguments are those of `read`."""
        index = self._index[layer]
        self._inputs[index].index_copy_(0, rows, state.inputs.to(self._inputs.dtype))
        self._heads[index].index_copy_(0, rows, state.heads)

    def copy(self, row: int) -> tuple[Tensor, Tensor]:
        """Return a copy of the states of a row, for `restore`."""
        return self._inputs[:, row].clone(), self._heads[:, row].clone()

    def restore(self, row: int, states: tuple[Tensor, Tensor]) -> None:
        """Give a row the states that `copy` returned."""
        self._inputs[:, row], self._heads[:, row] = states
