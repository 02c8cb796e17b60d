"""The full-size baseline: every token keeps its slot, the dead are masked.

Shape letters: b sequences, h KV heads, n arriving tokens, t slots, w state width, d head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.cache.base import Attended
from dms_train.inference.errors import InferenceError
from dms_train.inference.policies.base import Arrival, CachePolicy, Slots
from dms_train.kernels.slots import attend_slots

_BLOCK = 64  # slots by which a layer grows


class DenseCache:
    """Same answers as `CompactCache`, same policies except those that merge; memory only grows.

    Args:
        policy: Who is masked.
        layers: Attention layers.
        rows: Sequences held at the same time.
        heads: KV heads.
        like: An empty tensor [0, head size] with the dtype and device of keys and values.
    """

    def __init__(
        self, policy: CachePolicy, *, layers: int, rows: int, heads: int, like: Tensor
    ) -> None:
        if type(policy).merge is not CachePolicy.merge:
            raise InferenceError(f"{type(policy).__name__} merges tokens; use the compact cache")
        self.policy = policy
        self.peak_bytes = 0
        size, device = like.shape[-1], like.device
        self.slot_bytes = 2 * size * like.dtype.itemsize + 8 + 4 * policy.state_width + 1
        content = like.new_zeros(rows, heads, 0, size)
        position = torch.zeros(rows, heads, 0, dtype=torch.int64, device=device)
        state = torch.zeros(rows, heads, 0, policy.state_width, device=device)
        dead = torch.zeros(rows, heads, 0, dtype=torch.bool, device=device)
        self._dead = [dead] * layers
        self._slots = [Slots(i, position, state, content, content) for i in range(layers)]
        self._used = torch.zeros(layers, rows, dtype=torch.int64, device=device)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all layers now."""
        return sum(dead.numel() for dead in self._dead) * self.slot_bytes

    def live(self, rows: Tensor) -> Tensor:
        """Tokens that are not masked for good, int64 [layers, b, h]."""
        counts = [
            ((slots.position[rows] >= 0) & ~dead[rows]).sum(-1)
            for slots, dead in zip(self._slots, self._dead, strict=True)
        ]
        return torch.stack(counts)

    def held_slots(self, rows: Tensor) -> Tensor:
        """Slots of the rows, int64 [layers, b, h]."""
        return torch.stack([self._used.new_full(d[rows].shape[:2], d.shape[2]) for d in self._dead])

    def free(self, rows: Tensor) -> None:
        """Mark the rows as empty; memory returns when all are."""
        self._used[:, rows] = 0
        for layer, slots in enumerate(self._slots):
            slots.position[rows] = -1
            slots.state[rows] = 0
            self._dead[layer][rows] = False
        if not bool(self._used.any()):
            self._slots = [
                Slots(s.layer, *(t[:, :, :0].clone() for t in s[1:] if isinstance(t, Tensor)))
                for s in self._slots
            ]
            self._dead = [dead[:, :, :0].clone() for dead in self._dead]

    def attend(self, layer: int, rows: Tensor, query: Tensor, arrival: Arrival) -> Attended:
        """As `CompactCache.attend`."""
        n = arrival.position.shape[1]
        self._append(layer, rows, arrival)
        stored = Slots(layer, *(t[rows] for t in self._slots[layer][1:] if isinstance(t, Tensor)))
        stored = stored._replace(state=self.policy.admit(stored, arrival))
        dead = self._dead[layer][rows]
        mask = (stored.position >= 0)[:, :, None] & ~dead[:, :, None]
        mask = mask & (stored.position[:, :, None, :] <= arrival.position[:, None, :, None])
        if not self.policy.scored:
            mask = mask & ~self.policy.expired(stored, arrival.position)
        chosen = self.policy.select(stored, query) if n == 1 else None
        wide = mask.unsqueeze(2) if chosen is None else mask.unsqueeze(2) & chosen
        assert stored.key is not None
        assert stored.value is not None
        output, weights = attend_slots(query, stored.key, stored.value, wide)
        if self.policy.scored:
            stored = stored._replace(state=self.policy.observe(stored, weights))
        newest = arrival.position.amax(1, keepdim=True)
        gone = self.policy.expired(stored, newest)[:, :, 0]
        self._dead[layer][rows] = dead | (gone & (stored.position >= 0))
        self._slots[layer].state[rows] = stored.state
        return Attended(output, wide.any(2).sum((2, 3)))

    def _append(self, layer: int, rows: Tensor, arrival: Arrival) -> None:
        """Write the arrival behind what is there."""
        real = arrival.position >= 0
        before = self._used[layer, rows]
        after = before + real.sum(1)
        self._reserve(layer, int(after.max()))
        b, token = real.nonzero(as_tuple=True)
        place = before[b] + real.cumsum(1)[b, token] - 1
        slots = self._slots[layer]
        slots.position[rows[b], :, place] = arrival.position[b, token][:, None]
        slots.state[rows[b], :, place] = 0
        self._dead[layer][rows[b], :, place] = False
        for field in ("key", "value"):
            stored = getattr(slots, field)
            stored[rows[b], :, place] = getattr(arrival, field)[b, :, token].to(stored.dtype)
        self._used[layer, rows] = after

    def _reserve(self, layer: int, size: int) -> None:
        have = self._dead[layer].shape[2]
        if size <= have:
            return
        more = -(-(size - have) // _BLOCK) * _BLOCK
        slots = self._slots[layer]
        assert slots.key is not None
        assert slots.value is not None
        self._slots[layer] = Slots(
            layer,
            F.pad(slots.position, (0, more), value=-1),
            *(F.pad(t, (0, 0, 0, more)) for t in (slots.state, slots.key, slots.value)),
        )
        self._dead[layer] = F.pad(self._dead[layer], (0, more))
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
