"""Sizes of a step in which hooks of a policy evict: the host reads them once, before layer 0.

With these numbers, the layers of a prompt launch their work without waiting for the device.

Shape letters: b sequences, h KV heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class HookSizes(NamedTuple):
    """Sizes of the sequences of a step, on the host.

    Attributes:
        before: [layers][b], slots in use of the longest KV list before the step.
        after: [layers][b], the same when the tokens of the step are stored, before any eviction.
        pending: [layers][b], whether a token awaits its eviction since an earlier step.
        by_hooks: [b], whether hooks decide after the step, not kernels.
        due: [b], whether hooks may evict tokens after the step.
        kept: [b], most tokens that a KV list keeps after the step.
    """

    before: list[list[int]]
    after: list[list[int]]
    pending: list[list[int]]
    by_hooks: list[int]
    due: list[int]
    kept: list[int]

    @classmethod
    def read(
        cls, lengths: Tensor, pending: Tensor, added: Tensor, by_sequence: list[Tensor]
    ) -> HookSizes:
        """Read the sizes from the device; waits once.

        Args:
            lengths: Slots in use, integers [layers, b, h].
            pending: 1 for each KV list with a pending eviction, integers [layers, b, h].
            added: Tokens of the step, int64 [b].
            by_sequence: `by_hooks`, `due` and `kept`, integers [b] each.
        """
        layers = len(lengths)
        after = (lengths - pending).amax(-1) + added
        parts = [lengths.amax(-1), after, pending.amax(-1), torch.stack(by_sequence)]
        rows = torch.cat([part.long() for part in parts]).tolist()
        by_layer = (rows[i * layers : (i + 1) * layers] for i in range(3))
        return cls(*by_layer, *rows[3 * layers :])

    def of(self, index: list[int]) -> HookSizes:
        """Return the sizes of some sequences of the step."""

        def chosen(row: list[int]) -> list[int]:
            return [row[i] for i in index]

        before, after, pending = ([chosen(row) for row in rows] for rows in self[:3])
        by_hooks, due, kept = (chosen(row) for row in self[3:])
        return HookSizes(before, after, pending, by_hooks, due, kept)


class HookPlan(NamedTuple):
    """Decision makers of a micro-batch.

    Attributes:
        sizes: Sizes of the sequences for which hooks decide; None if kernels decide for all.
        mixed: Sequences of kernels and of hooks, int64 [any] each; None if there is one kind only.
    """

    sizes: HookSizes | None = None
    mixed: tuple[Tensor, Tensor] | None = None
