"""Gated delta net of the engine, whose states stand in place of keys and values.

Shape letters: t tokens of a pass, b sequences, n tokens of a sequence, c hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dms_train.hf.architecture import Architecture
from dms_train.inference.models.batch import MicroBatch
from dms_train.inference.models.blocks import AttentionInputs
from dms_train.kernels.layers.delta_rule import MixerWeights, mix_tokens


class LinearAttention(nn.Module):
    """Layer that reads and writes a state of fixed size for each sequence.

    Rows of the projection and of the convolution are grouped by key head, as in `mix_tokens`.

    Args:
        a: A model with linear attention.
        layer: Layer number.
    """

    def __init__(self, a: Architecture, layer: int) -> None:
        super().__init__()
        sizes = a.linear
        assert sizes is not None
        self.layer, self._groups, self._epsilon = layer, sizes.key_heads, a.layernorm_epsilon
        rows = sizes.key_heads * sum(sizes.group_rows)
        self.in_proj = nn.Linear(a.hidden_size, rows, bias=False)
        self.conv1d = nn.Parameter(torch.empty(2 * sizes.keys + sizes.values, sizes.taps))
        self.dt_bias = nn.Parameter(torch.empty(sizes.value_heads))
        self.A_log = nn.Parameter(torch.empty(sizes.value_heads))
        self.norm = nn.Parameter(torch.empty(sizes.value_channels))
        self.out_proj = nn.Linear(sizes.values, a.hidden_size, bias=False)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """Map the normalised input [t, c] to the layer's update [t, c]."""
        projected = self.in_proj(x).unflatten(-1, (self._groups, -1))
        outputs = [
            batch.flatten(self._mix(batch.take(projected), batch, inputs))
            for batch in inputs.micro_batches
        ]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        update: Tensor = self.out_proj(joined)
        return update

    def _mix(self, projected: Tensor, batch: MicroBatch, inputs: AttentionInputs) -> Tensor:
        """Return the outputs of the value heads, [b, n, channels]; update the states."""
        weights = MixerWeights(self.conv1d, self.dt_bias, self.A_log, self.norm, self._epsilon)
        states = inputs.cache.states
        before = None if states is None else states.read(self.layer, batch.rows, batch.position)
        real = None if batch.lengths is None else batch.position >= 0
        mixed, after = mix_tokens(projected, weights, state=before, real=real)
        if states is not None:
            states.write(self.layer, batch.rows, after)
        return mixed
