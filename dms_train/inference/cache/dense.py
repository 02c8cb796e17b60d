"""Full-size baseline: every token keeps its slot, and evicted tokens are masked.

Shape letters: b sequences, h KV heads, n arriving tokens, t slots, w state width, d head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.cache.base import Attended, HostDrivenCache, UnrotatedTokens
from dms_train.inference.cache.policy_hooks import (
    balances,
    by_group,
    narrowed,
    observes,
    received,
    second_query,
)
from dms_train.inference.cache.policy_state import PolicyState
from dms_train.inference.errors import InferenceError
from dms_train.inference.policies.base import CachePolicy, NewTokens, RequestSizes, Slots
from dms_train.kernels.decode.slots import SecondQuery, attend_slots

_BLOCK = 64  # slots by which a layer grows


class DenseCache(HostDrivenCache):
    """Cache with the results of `CompactCache`, for policies that do not merge; memory only grows.

    Args:
        policy: Policy; the tokens that it evicts are masked.
        layers: Attention layers.
        rows: Sequences held at the same time.
        heads: KV heads.
        like: An empty tensor [0, head size] with the dtype and device of keys and values.
        frequency: RoPE frequencies of the layers, [layers, d / 2]; for policies that move keys.
    """

    def __init__(
        self,
        policy: CachePolicy,
        *,
        layers: int,
        rows: int,
        heads: int,
        like: Tensor,
        frequency: Tensor | None = None,
    ) -> None:
        if type(policy).merge is not CachePolicy.merge:
            raise InferenceError(f"{type(policy).__name__} merges tokens; use the compact cache")
        if balances(policy):
            raise InferenceError(f"{type(policy).__name__} balances layers; use the compact cache")
        self.policy = policy
        self._peak_bytes = 0
        size, device = like.shape[-1], like.device
        self.slot_bytes = 2 * size * like.dtype.itemsize + 8 + 4 * policy.state_width + 1
        content = like.new_zeros(rows, heads, 0, size)
        position = torch.zeros(rows, heads, 0, dtype=torch.int64, device=device)
        state = torch.zeros(rows, heads, 0, policy.state_width, device=device)
        evicted = torch.zeros(rows, heads, 0, dtype=torch.bool, device=device)
        self._evicted = [evicted] * layers
        self._slots = [Slots(i, position, state, content, content) for i in range(layers)]
        self._used = torch.zeros(layers, rows, dtype=torch.int64, device=device)
        self._live = torch.zeros(layers, rows, heads, dtype=torch.int64, device=device)
        self._state = PolicyState(
            policy, layers=layers, rows=rows, device=device, frequency=frequency
        )

    @property
    def max_pages(self) -> int | None:
        """Return None: memory has no limit."""
        return None

    @property
    def used_pages(self) -> int:
        """Return 0: there are no pages."""
        return 0

    def free_pages(self, least: int) -> float:
        """Return the pages that neither a row nor a snapshot holds; infinite without a limit."""
        return float("inf")

    def most_copies(self, row: int, tokens: int) -> int:
        """Return 0: there are no pages."""
        return 0

    def snapshot(self, row: int, tokens: int) -> DenseSnapshot:
        """Take a snapshot of a row: a copy."""
        return DenseSnapshot(self, row)

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of all layers and of the policy's state now."""
        slots = sum(evicted.numel() for evicted in self._evicted)
        return slots * self.slot_bytes + self._state.nbytes

    @property
    def peak_bytes(self) -> int:
        """Return the most of these bytes after any pass."""
        return self._peak_bytes

    def live(self, rows: Tensor) -> Tensor:
        """Return the tokens that later queries may read, int64 [layers, b, h]."""
        return self._live[:, rows]

    def held_slots(self, rows: Tensor) -> Tensor:
        """Return the slots of the rows, int64 [layers, b, h]."""
        size = self._used.new_tensor([evicted.shape[2] for evicted in self._evicted])
        return size[:, None, None].expand_as(self._live[:, rows])

    def positions(self, row: int) -> list[list[Tensor]]:
        """Return the positions that later queries read, by layer and head, int64 [live]."""
        by_layer = []
        for slots, evicted in zip(self._slots, self._evicted, strict=True):
            kept = (slots.position[row] >= 0) & ~evicted[row]
            heads = zip(slots.position[row], kept, strict=True)
            by_layer.append([position[mask].cpu() for position, mask in heads])
        return by_layer

    def assign(self, row: int, sizes: RequestSizes) -> None:
        """Store the sizes of the request, or turn, that takes a row; keep the cached tokens."""
        self._state.assign(row, sizes)

    def free(self, rows: Tensor) -> None:
        """Mark the rows as empty; the memory is freed once all rows are."""
        self._state.reset(rows)
        self._used[:, rows] = 0
        self._live[:, rows] = 0
        for layer, slots in enumerate(self._slots):
            slots.position[rows] = -1
            slots.state[rows] = 0
            self._evicted[layer][rows] = False
        if not bool(self._used.any()):
            for layer in range(len(self._slots)):
                _, *content = self._tensors(layer)
                position, state, key, value = (t[:, :, :0].clone() for t in content)
                self._slots[layer] = Slots(layer, position, state, key, value)
            self._evicted = [evicted[:, :, :0].clone() for evicted in self._evicted]

    def step(self, layer: int, step: UnrotatedTokens) -> Attended:
        """Run `attend` on tokens before RoPE."""
        query, arrival = self._state.accumulated(layer, step).rotated()
        return self.attend(layer, step.rows, query, arrival, step.sinks)

    def attend(
        self,
        layer: int,
        rows: Tensor,
        query: Tensor,
        arrival: NewTokens,
        sinks: Tensor | None = None,
    ) -> Attended:
        """Store the arriving tokens, mask the evicted ones and compute attention."""
        grouped = by_group(query, arrival.key.shape[1])
        sequences = self._state.sequences(layer, rows, arrival.position, grouped)
        self._append(layer, rows, arrival)
        stored = self._stored(layer, rows)._replace(sequences=sequences)
        evicted = self._evicted[layer][rows]
        position = stored.position.masked_fill(evicted, -1)  # empty slots to the policy
        stored = stored._replace(position=position)
        stored = stored._replace(state=self.policy.on_store(stored, arrival))
        held = (position >= 0)[:, :, None]
        mask = held & (position[:, :, None, :] <= arrival.position[:, None, :, None])
        if not self.policy.scored:
            mask = mask & ~self.policy.evict_mask(stored, arrival.position)
        wide = narrowed(self.policy, stored, mask, grouped)
        assert stored.key is not None
        assert stored.value is not None
        second = second_query(self.policy, stored, query, arrival.position)
        content = stored.key, stored.value
        output, weights = _attend(query, content, wide, second, sinks)
        if observes(self.policy):
            attention = received(weights, mask)
            stored = stored._replace(state=self.policy.observe(stored, attention))
        newest = arrival.position.amax(1, keepdim=True)
        expired = held & self.policy.evict_mask(stored, newest)
        self._evicted[layer][rows] = evicted | expired[:, :, 0]
        self._live[layer, rows] = (held & ~expired)[:, :, 0].sum(-1)
        self._slots[layer].state[rows] = stored.state
        self._state.store(layer, rows, sequences.lists)
        self._peak_bytes = max(self._peak_bytes, self.allocated_bytes)
        return Attended(output, wide.any(2).sum((2, 3)))

    def _stored(self, layer: int, rows: Tensor) -> Slots:
        """Return the slots of these rows, without a copy if they are all rows in order."""
        slots = self._slots[layer]
        assert slots.key is not None
        assert slots.value is not None
        position, state = slots.position[rows], slots.state[rows]
        if torch.equal(rows, torch.arange(len(slots.key), device=rows.device)):
            return Slots(layer, position, state, slots.key, slots.value)
        content = (slots.key.index_select(0, rows), slots.value.index_select(0, rows))
        return Slots(layer, position, state, *content)

    def _append(self, layer: int, rows: Tensor, arrival: NewTokens) -> None:
        """Write the arriving tokens after the stored ones."""
        real = arrival.position >= 0
        before = self._used[layer, rows]
        after = before + real.sum(1)
        self._reserve(layer, int(after.max()))
        b, token = real.nonzero(as_tuple=True)
        slot = before[b] + real.cumsum(1)[b, token] - 1
        slots = self._slots[layer]
        slots.position[rows[b], :, slot] = arrival.position[b, token][:, None]
        slots.state[rows[b], :, slot] = 0
        self._evicted[layer][rows[b], :, slot] = False
        for field in ("key", "value"):
            stored = getattr(slots, field)
            stored[rows[b], :, slot] = getattr(arrival, field)[b, :, token].to(stored.dtype)
        self._used[layer, rows] = after

    def _tensors(self, layer: int) -> list[Tensor]:
        """Return all slot tensors of a layer, each [rows, h, t, ...]."""
        slots = self._slots[layer]
        assert slots.key is not None
        assert slots.value is not None
        return [self._evicted[layer], slots.position, slots.state, slots.key, slots.value]

    def _reserve(self, layer: int, size: int) -> None:
        have = self._evicted[layer].shape[2]
        if size <= have:
            return
        more = -(-(size - have) // _BLOCK) * _BLOCK
        evicted, position, *content = self._tensors(layer)
        state, key, value = (F.pad(t, (0, 0, 0, more)) for t in content)
        position = F.pad(position, (0, more), value=-1)
        self._slots[layer] = Slots(layer, position, state, key, value)
        self._evicted[layer] = F.pad(evicted, (0, more))


class DenseSnapshot:
    """A copy of a row.

    Args:
        cache: Cache of the row.
        row: The row.
    """

    def __init__(self, cache: DenseCache, row: int) -> None:
        self._cache = cache
        self._used = cache._used[:, row].clone()
        self._live = cache._live[:, row].clone()
        self._content = [
            [t[row, :, :used].clone() for t in cache._tensors(layer)]
            for layer, used in enumerate(self._used.tolist())
        ]
        self._state = cache._state.snapshot(row)

    def restore(self, row: int) -> None:
        """Copy the snapshot into an empty row."""
        cache = self._cache
        for layer, content in enumerate(self._content):
            used = content[0].shape[1]
            cache._reserve(layer, used)
            for tensor, stored in zip(cache._tensors(layer), content, strict=True):
                tensor[row, :, :used] = stored
        cache._used[:, row], cache._live[:, row] = self._used, self._live
        cache._state.restore(row, self._state)

    def release(self) -> None:
        """Free the copy."""
        self._content, self._state = [], []


def _attend(
    query: Tensor,
    content: tuple[Tensor, Tensor],
    mask: Tensor,
    second: SecondQuery | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run `attend_slots` with a group's heads folded into its queries, so that no key is copied.

    Args:
        query: [b, h * r, n, d].
        content: Keys and values, [b, h, t, d] each.
        mask: bool, [b, h, 1, n, t] or [b, h, r, n, t].
        second: Other queries for some of the slots; None for none.
        sinks: Logits [h * r] in the denominators; None for none.
    """
    b, heads, n, d = query.shape
    if n > 1 or sinks is not None:
        return attend_slots(query, *content, mask, second, sinks)
    h = content[0].shape[1]
    if second is not None:
        second = second._replace(query=second.query.view(b, h, -1, d))
    mask = mask.transpose(2, 3)
    output, weights = attend_slots(query.view(b, h, -1, d), *content, mask, second)
    return output.reshape(b, heads, n, d), weights.reshape(b, heads, n, -1)
