"""Statistics of the decisions of a model; no torch.

Layers add them up, pipeline stages exchange them and the loss reads them as one tensor with a
column for each name. The columns are defined here alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class EvictionStats(NamedTuple):
    """Sums over layers and KV heads, tensors float32 [b], in the order of the columns.

    Attributes:
        alpha: Decisions as the compression loss counts them.
        live: Live slots at the last token, by the inference rule.
        reads: KV reads divided by the length, by the inference rule.
        own_loss: Further loss of the method, times the number of decisions.
    """

    alpha: Any
    live: Any
    reads: Any
    own_loss: Any

    @classmethod
    def of(cls, columns: Any) -> EvictionStats:
        """View the columns [b, EVICTION_STATS] by name."""
        # selected one by one: unbinding would give every unused column a gradient of zeros
        return cls(*(columns[:, index] for index in range(EVICTION_STATS)))


EVICTION_STATS = len(EvictionStats._fields)
"""Number of columns; a method without a loss of its own leaves out the last one."""
