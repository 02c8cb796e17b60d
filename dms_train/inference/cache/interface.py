"""Interface between a model and a cache.

Shape letters: b sequences, n tokens, g KV heads, r query heads per KV head, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dms_train.inference.cache.base import Attended
from dms_train.inference.cache.linear_states import LinearStates
from dms_train.inference.policies.base import CachePolicy, NewTokens, Projected, RequestSizes
from dms_train.kernels import dispatch
from dms_train.kernels.decode.types import HeadNorms, Step
from dms_train.kernels.layers.types import EvictionChannel
from dms_train.method.base import MethodSpec
from dms_train.method.decisions import eviction_logits, hard_decisions
from dms_train.method.layer import method_layer


def rotation_table(cos: Tensor, sin: Tensor) -> Tensor:
    """Return RoPE in the layout of the prompt kernels, float32 [b * n, 1, 2, d / 2].

    Args:
        cos: [b, n, 1, 1, d], both halves alike.
        sin: Likewise.
    """
    half = cos.shape[-1] // 2
    both = torch.stack([cos[..., :half], sin[..., :half]], -2)
    return both.float().view(-1, 1, 2, half)


class AttentionStep(NamedTuple):
    """Tokens of one layer that enter a cache, before RoPE.

    With one token per sequence, `position` and the inner dimensions of the tensors are contiguous.

    Attributes:
        query: [b, n, g, r, d].
        key: [b, n, g, 1, d].
        value: Likewise.
        cos: [b, n, 1, 1, d], both halves alike.
        sin: Likewise.
        position: int64 [b, n]; -1 for padding.
        rows: Cache rows of the sequences, int64 [b], all different.
        spec: Spec of a model with eviction channels in its heads; None for any other.
        decision_projection: Computes the decisions of a model with a projection for them, bool
            [b, g, n]; called only where decisions are read.
        lengths: Tokens of each sequence without padding; None if there is none.
        begins: Whether the cache is known to hold nothing of these sequences yet.
        table: `rotation_table` of `cos` and `sin`; None to compute it on demand.
        micro_batch: Index among the micro-batches of the pass, each of which visits every layer.
        sinks: Logits [g * r] in the denominators of the softmax; None for none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cos: Tensor
    sin: Tensor
    position: Tensor
    rows: Tensor
    spec: MethodSpec | None = None
    decision_projection: Callable[[], Tensor] | None = None
    lengths: tuple[int, ...] | None = None
    begins: bool = False
    table: Tensor | None = None
    micro_batch: int = 0
    sinks: Tensor | None = None

    def decisions(self) -> Tensor | None:
        """Return the hard decisions by deciding token, bool [b, g, n]; None for a dense model."""
        if self.decision_projection is not None:
            return self.decision_projection()
        if self.spec is None:
            return None
        return method_layer(self.spec).hard(self.query, self.key.squeeze(3)).transpose(1, 2)

    def projected(self) -> Projected:
        """Return the projections of the model, for policies that merge before RoPE."""
        return Projected(self.query, self.key.squeeze(3), self.value.squeeze(3), self.position)

    def replaced(self, key: Tensor, value: Tensor) -> AttentionStep:
        """Return the same tokens and decisions with other keys and values, [b, n, g, d] each."""
        decided = self.decisions()
        decision_projection = None if decided is None else lambda: decided
        return self._replace(
            key=key.unsqueeze(3), value=value.unsqueeze(3), decision_projection=decision_projection
        )

    def some(self, index: Tensor) -> AttentionStep:
        """Select some sequences of a step of one token each, int64 [any]."""
        assert self.lengths is None
        fields = ("query", "key", "value", "cos", "sin", "position", "rows")
        decision_projection = None
        if self.decision_projection is not None:
            decided = self.decision_projection()[index]
            decision_projection = lambda: decided  # noqa: E731
        selected = {name: getattr(self, name)[index] for name in fields}
        return self._replace(**selected, decision_projection=decision_projection, table=None)

    def rotated(self) -> tuple[Tensor, NewTokens]:
        """Apply RoPE and clear the eviction channels, for caches that store rotated keys.

        Returns:
            Query [b, g * r, n, d], and the arriving tokens.
        """
        signal = self.decisions()
        query, key = self.query, self.key.squeeze(3)
        method = None if self.spec is None else method_layer(self.spec)
        if method is not None:
            query, key = method.cleared(query, key)
        query, key = self._rotate(query), self._rotate(key.unsqueeze(3)).squeeze(3)
        if method is not None and self.spec is not None and self.spec.clear_after_rope:
            query, _ = method.cleared(query, key)
        value = self.value.squeeze(3).transpose(1, 2)
        arrival = NewTokens(self.position, key.transpose(1, 2), value, signal)
        return query.flatten(2, 3).transpose(1, 2), arrival

    def rotated_by_kernel(self, *, decides: bool = True) -> tuple[Tensor, NewTokens]:
        """Compute `rotated` in one pass over memory, in float32, where Triton runs.

        Args:
            decides: Whether the arriving tokens get their signal.
        """
        b, n, g, _, d = self.query.shape
        channel = EvictionChannel(0, 1.0, clear_after_rope=False)
        if self.spec is not None:
            clear = self.spec.clear_after_rope
            channel = EvictionChannel(self.spec.channel % d, 0.0, clear_after_rope=clear)
        table = rotation_table(self.cos, self.sin) if self.table is None else self.table
        query, key, activation = dispatch.triton_kernels().rotate(
            self.query.flatten(0, 1).unsqueeze(1),
            self.key.flatten(0, 1).transpose(1, 2),
            table,
            channel,
        )
        signal = None
        if decides and self.spec is not None:
            activation = activation.view(b, n, g)
            signal = hard_decisions(eviction_logits(activation, self.spec)).transpose(1, 2)
        elif decides and self.decision_projection is not None:
            signal = self.decision_projection()
        value = self.value.squeeze(3).transpose(1, 2)
        arrival = NewTokens(self.position, key.view(b, n, g, d).transpose(1, 2), value, signal)
        return query.view(b, n, -1, d).transpose(1, 2), arrival

    def _rotate(self, x: Tensor) -> Tensor:
        """Apply RoPE to x [b, n, g, r, d]."""
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin


class Snapshot(Protocol):
    """Snapshot of one row of a cache."""

    def restore(self, row: int) -> None:
        """Restore the snapshot into an empty row."""
        ...

    def release(self) -> None:
        """Release the snapshot; it cannot be restored any more."""
        ...


class KVCache(Protocol):
    """Keys and values of several sequences ("rows"), all layers.

    `base.HostDrivenCache` has defaults for the methods that only a `CapturableCache` needs.

    Layers are numbered among those with keys and values, `Architecture.cache_layers`.

    Attributes:
        policy: Decides which tokens are kept.
        states: States of the other layers, which have linear attention; None by default.
    """

    policy: CachePolicy
    states: LinearStates | None

    @property
    def capturable(self) -> CapturableCache | None:
        """Return this cache if decode steps can be captured as CUDA graphs; None by default."""
        ...

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of the memory that holds tokens now, and of the tables.

        A pool that is taken from the system once counts with its pages in use.
        """
        ...

    @property
    def peak_bytes(self) -> int:
        """Return the most of these bytes so far."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of one slot of one KV head."""
        ...

    @property
    def max_pages(self) -> int | None:
        """Return the most pages of all sequences together; None where there is no limit."""
        ...

    @property
    def used_pages(self) -> int:
        """Return the pages that rows and snapshots hold, shared ones once; 0 without pages."""
        ...

    def free_pages(self, least: int) -> float:
        """Return the pages that neither a row nor a snapshot holds; infinite without a limit.

        Args:
            least: A lower bound is enough once it reaches this number.
        """
        ...

    def most_copies(self, row: int, tokens: int) -> int:
        """Return the most shared pages of a row that its next tokens cause to be copied.

        A single token is stored in a new page or in a copied one; that page is not counted here.
        """
        ...

    def snapshot(self, row: int, tokens: int) -> Snapshot:
        """Take a snapshot of a row, the policy's state included.

        Args:
            row: The row.
            tokens: Number of its tokens that were computed.
        """
        ...

    def assign(self, row: int, sizes: RequestSizes) -> None:
        """Tell the policy which request takes a row, before the first token and at every turn."""
        ...

    def step(self, layer: int, step: AttentionStep) -> Attended:
        """Store the tokens of a layer and compute their attention; layers are visited in order."""
        ...

    def live(self, rows: Tensor) -> Tensor:
        """Return the number of tokens that later queries may read, int64 [layers, b, kv_heads]."""
        ...

    def held_slots(self, rows: Tensor) -> Tensor:
        """Return the slots reserved, live or not, int64 [layers, b, kv_heads]."""
        ...

    def positions(self, row: int) -> list[list[Tensor]] | None:
        """Return the positions of the live tokens of a row by layer and KV head, on the CPU.

        Each int64 [live], ascending; None where the cache does not keep positions.
        """
        ...

    def free(self, rows: Tensor) -> None:
        """Forget the sequences in these rows, int64 [b]."""
        ...

    def note_empty(self, row: int) -> None:
        """Record on the host that a row was freed; by default there is nothing to record."""
        ...

    def reserved(self, parts: list[tuple[int, int]]) -> AbstractContextManager[None]:
        """Reserve the pages of the forward pass inside; by default there are none.

        Args:
            parts: Row and number of tokens of each sequence.
        """
        ...


class CapturableCache(KVCache, Protocol):
    """KV cache on the device; its decode steps run without the host.

    Memory never moves, so that captured steps stay valid. The host reserves pages before it
    launches steps, and later reads from `status` how many pages they took.

    Attributes:
        captures_prompts: Whether chunks of prompts can be captured as CUDA graphs too.
        decodes_prompts: Whether a prompt's last token can be computed like a generated token.
        eviction_interval: Number of generated tokens after which the policy's hooks evict; the
            last one of them is not computed by captured steps. None if the hooks are not used.
    """

    captures_prompts: bool
    decodes_prompts: bool
    eviction_interval: int | None

    @property
    def device(self) -> torch.device:
        """Return the device of the cache."""
        ...

    @property
    def lists_shape(self) -> tuple[int, int, int]:
        """Return the layers, rows and KV heads."""
        ...

    @property
    def shares_pages(self) -> bool:
        """Return whether any page may belong to several KV lists or snapshots."""
        ...

    @property
    def reserved_pages(self) -> int:
        """Return the pages that were reserved or taken since the beginning."""
        ...

    def pages_of_steps(self, row: int, steps: int) -> int:
        """Return the most pages that steps of one token each of a row take or copy."""
        ...

    def own_changing_pages(self, rows: list[int], spare: float) -> None:
        """Copy the shared pages that decode steps may change, so that bursts need fewer pages.

        Args:
            rows: Rows of the next steps.
            spare: Most pages to take.
        """
        ...

    def prepare_steps(self, rows: list[int], steps: int) -> None:
        """Reserve pages for steps of one token each of rows, in all layers.

        Raises:
            RuntimeError: Too few pages are free.
        """
        ...

    def recording(self) -> AbstractContextManager[None]:
        """Capture the steps inside: they store nothing and reserve no pages."""
        ...

    def decode(
        self, layer: int, token: Step, spec: MethodSpec | None, norms: HeadNorms | None
    ) -> Tensor:
        """Store and attend one token per sequence, inside `recording` or after `prepare`.

        Args:
            layer: Layer number.
            token: The tokens, without signals.
            spec: Spec of a model whose query carries an eviction channel; None for a dense model.
            norms: RMSNorm of every head; None if there is none.

        Returns:
            [b, query heads, d].
        """
        ...

    def status(self) -> list[Tensor]:
        """Return the numbers that the host receives after a step, int32 each.

        Returns:
            Free pages [1], `FreePages.fault` [1], and the lists that `counts` reads.
        """
        ...

    def counts(self, lists: Tensor) -> tuple[Tensor, Tensor]:
        """Return slots read by steps and tokens held after them, [..., layers, rows, h] each.

        Args:
            lists: Rest of `status` on the host, [any, ..., layers, rows, h].
        """
        ...

    def sync_free_count(self, left: int, fault: int, reserved: int) -> None:
        """Update the number of free pages with the one after an earlier step.

        Args:
            left: Free pages on the device after the step.
            fault: `FreePages.fault` after the step.
            reserved: `reserved_pages` when the step was launched.

        Raises:
            RuntimeError: A token found no page, so that the contents of the cache are invalid.
        """
        ...
