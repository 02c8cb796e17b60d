"""Named statistics of a step, carried in one tensor.

One collective and one copy to the host bring all of them. The slots of the names are defined here
alone: the terms of the token loss, `_MEASURED`, `_COUNTED` and the memory of every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dms_train.data.batches import Batch
from dms_train.mcore.footprint import own_memory
from dms_train.mcore.groups import ParallelView
from dms_train.method.plan import StepResult

# Measured by the last pipeline stage in every micro-batch, after the terms of the token loss.
_MEASURED = ("aux_loss", "alpha", "live", "reads")
# Counted on the host.
_COUNTED = ("samples", "positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTotals:
    """Sums over all samples of a pass, the same on every rank.

    Attributes:
        terms: Terms of the token loss by name; each is a mean over the loss positions.
        aux_loss: Compression loss.
        alpha: Mean decision of a sample, summed over samples.
        live: Mean live slots of a KV head at the last token, summed over samples.
        reads: Mean KV reads of a KV head divided by the length, summed over samples.
        samples: Number of samples.
        positions: Number of positions without the padding of packed samples.
        memory_bytes: Memory of the fullest process.
    """

    terms: dict[str, float]
    aux_loss: float
    alpha: float
    live: float
    reads: float
    samples: float
    positions: float
    memory_bytes: float

    @property
    def token_loss(self) -> float:
        """Sum of the terms of the token loss."""
        return sum(self.terms.values())

    @property
    def loss(self) -> float:
        """The objective."""
        return self.token_loss + self.aux_loss

    def result(self, length: int, **values: Any) -> StepResult:
        """Return the result of the pass over samples of `length` tokens, with further values."""
        return StepResult(
            loss=self.loss,
            terms=self.terms,
            aux_loss=self.aux_loss,
            alpha=self.alpha / self.samples,
            cr_factor=self.positions / self.live if self.live else math.nan,
            kv_reads=length * self.reads / self.samples,
            **values,
        )


class StepStatistics(NamedTuple):
    """Slots of the statistics of a step whose token loss has these terms."""

    terms: tuple[str, ...]

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the slots that a micro-batch reports, in order."""
        return (*self.terms, *_MEASURED)

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the report of a micro-batch, float64 [len(measured)], from all its scalars."""
        return torch.stack([values[name] for name in self.measured])

    def reduce(
        self, reports: Sequence[Tensor], batches: Sequence[Batch], view: ParallelView
    ) -> DeviceTotals:
        """Add up the reports of all ranks without waiting for the device; all ranks call it."""
        measured = len(self.measured)
        memory = measured + len(_COUNTED)  # first slot of the ranks' memory
        slot_values = torch.zeros(memory + view.world_size, dtype=torch.float64, device=view.device)
        if view.reports and reports:
            slot_values[:measured] = torch.stack(list(reports)).sum(0)
            counts = {
                "samples": sum(len(batch.samples) for batch in batches),
                "positions": sum(batch.positions for batch in batches),
            }
            for slot, name in enumerate(_COUNTED, measured):
                slot_values[slot] = counts[name]
            if view.cp_rank:  # every rank of a sample has its own terms, and the same of the rest
                slot_values[len(self.terms) :] = 0
        slot_values[memory + view.rank] = own_memory(view.device)
        dist.all_reduce(slot_values)
        losses = len(self.terms) + 1  # the terms and aux_loss are means over micro-batches
        slot_values[:losses] /= len(batches) * view.dp_size
        slot_values[memory] = slot_values[memory:].max()
        return DeviceTotals(self, slot_values[: memory + 1])


class DeviceTotals(NamedTuple):
    """Statistics over all ranks that are still on the device."""

    slots: StepStatistics
    values: Tensor

    def read(self) -> PassTotals:
        """Wait for the device and name the numbers."""
        names = (*self.slots.measured, *_COUNTED, "memory_bytes")
        numbers = dict(zip(names, self.values.tolist(), strict=True))
        terms = {name: numbers.pop(name) for name in self.slots.terms}
        return PassTotals(terms=terms, **numbers)
