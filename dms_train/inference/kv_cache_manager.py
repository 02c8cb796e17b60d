"""Manager of the KV cache for the scheduler: batch slots and snapshots of them."""

from __future__ import annotations

from functools import partial

import torch

from dms_train.inference.cache.interface import KVCache, Snapshot
from dms_train.inference.cache.linear_states import LinearStates
from dms_train.inference.options import EngineOptions
from dms_train.inference.prefix_cache import PrefixCache
from dms_train.inference.sequence import Sequence


class _StatefulSnapshot:
    """Snapshot of a row with the states of its linear attention; implements `Snapshot`."""

    def __init__(self, inner: Snapshot, states: LinearStates, row: int) -> None:
        self._inner, self._states, self._copy = inner, states, states.copy(row)

    def restore(self, row: int) -> None:
        """Restore the snapshot into an empty row."""
        self._inner.restore(row)
        self._states.restore(row, self._copy)

    def release(self) -> None:
        """Release the snapshot."""
        self._inner.release()


class KVCacheManager:
    """Manager of batch slots and snapshots; implements `scheduler.CacheManager`.

    A batch slot is a row of the cache.

    Snapshots are taken at the end of a prompt with several continuations. With prefix caching they
    are also taken where a prompt departs from an earlier one, and when a generated sequence has
    finished, unless the policy shares prompts only.

    Args:
        cache: The cache.
        options: Options of the engine.
    """

    def __init__(self, cache: KVCache, options: EngineOptions) -> None:
        self._cache = cache
        # `free` takes slices of it, because a tensor made on the host would wait for the GPU
        self._rows = torch.arange(options.max_num_seqs, device=options.device)
        policy, caching = cache.policy, options.enable_prefix_caching
        self._shares = caching and policy.shareable
        self._shares_prompts = caching and (policy.shareable or policy.shareable_prompts)
        self._prefixes = PrefixCache(options.max_num_seqs)
        self._admitted: dict[int, Sequence] = {}  # key: batch slot

    def free_pages(self, least: int) -> float:
        """Return the number of pages that neither a batch slot nor a snapshot holds."""
        return self._cache.free_pages(least)

    def most_copies(self, batch_slot: int, tokens: int) -> int:
        """Return the most shared pages of a batch slot that its next tokens cause to be copied."""
        return self._cache.most_copies(batch_slot, tokens)

    def prepare_burst(self, batch_slots: list[int], steps: int, spare: float) -> int:
        """Copy shared pages, and return the most pages that decode steps take afterwards."""
        cache = self._cache.capturable
        assert cache is not None
        cache.own_changing_pages(batch_slots, spare)
        return sum(cache.pages_of_steps(row, steps) for row in batch_slots)

    def free(self, batch_slot: int) -> None:
        """Free the cache of a batch slot."""
        self._cache.free(self._rows[batch_slot : batch_slot + 1])
        self._admitted.pop(batch_slot, None)  # absent if `restore` has failed
        self._cache.note_empty(batch_slot)

    def cached_tokens(self, sequence: Sequence) -> int:
        """Return the length of the longest snapshot that a sequence can start from."""
        return self._prefixes.length(self._shareable(sequence), sequence.request_id)

    def find_prefix_leader(self, sequence: Sequence) -> Sequence | None:
        """Return an admitted sequence about to take a snapshot worth waiting for, if any.

        The snapshot must cover at least half of the tokens that the waiting sequence must compute.
        """
        if not self._shares_prompts:
            return None
        tokens = self._shareable(sequence)
        cached = self.cached_tokens(sequence)
        least = (len(tokens) + cached) / 2
        for other in self._admitted.values():
            for point in other.snapshot_points:
                useful = other.num_computed_tokens < point < len(tokens) and point >= least
                if useful and other.tokens[:point] == tokens[:point]:
                    return other
        return None

    def restore(self, sequence: Sequence) -> None:
        """Restore the longest snapshot into the batch slot, and plan snapshots of the sequence."""
        assert sequence.batch_slot is not None
        self.assign(sequence)
        self._admitted[sequence.batch_slot] = sequence
        restored = self._prefixes.restore(
            self._shareable(sequence), sequence.request_id, sequence.batch_slot
        )
        sequence.num_computed_tokens = restored
        if not sequence.output or sequence.score_only:
            sequence.meter.cached_tokens = max(0, restored - sequence.prompt_start)
            sequence.snapshot_points = self._snapshot_points(sequence)

    def max_tokens(self, sequence: Sequence) -> int | None:
        """Return the most tokens that the policy takes in the next step; None for no limit."""
        return self._cache.policy.max_tokens(sequence.sizes, sequence.num_computed_tokens)

    def assign(self, sequence: Sequence) -> None:
        """Tell the policy about the request of an admitted sequence."""
        assert sequence.batch_slot is not None
        self._cache.assign(sequence.batch_slot, sequence.sizes)

    def reclaim(self, keep_for: Sequence | None = None) -> bool:
        """Release the least recently used snapshot, except the one that `keep_for` starts from.

        Returns:
            False if there was no snapshot to release.
        """
        if keep_for is None:
            return self._prefixes.reclaim(None, None)
        return self._prefixes.reclaim(self._shareable(keep_for), keep_for.request_id)

    def take_planned(self, sequence: Sequence) -> None:
        """Take a snapshot if one is planned after the tokens computed so far."""
        if sequence.num_computed_tokens in sequence.snapshot_points:
            self._take(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a snapshot of a finished sequence, for prompts that continue it."""
        generated = sequence.num_computed_tokens and not sequence.score_only
        if self._shares and sequence.batch_slot is not None and generated:
            self._take(sequence)

    def forget(self, request_id: str) -> None:
        """Release the snapshots that only this request may use."""
        self._prefixes.forget(request_id)

    def _shareable(self, sequence: Sequence) -> list[int]:
        """Return the first tokens that a snapshot may provide, followed by one token to compute."""
        tokens = sequence.shareable
        return tokens if self._shares else tokens[: sequence.prompt_end]

    def _snapshot_points(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the lengths at which snapshots of a prompt are taken.

        A snapshot leaves out the last token, because computing it gives the first logits.
        """
        if sequence.index:
            return ()  # the first continuation takes them
        points = {sequence.prompt_end - 1} if sequence.params.n > 1 else set()
        if self._shares_prompts:
            common = self._prefixes.common_prefix(sequence.tokens[: sequence.prompt_end])
            if not self._is_planned(sequence.tokens[:common], sequence):
                points.add(common)
        return tuple(point for point in sorted(points) if point > sequence.num_computed_tokens)

    def _is_planned(self, tokens: list[int], sequence: Sequence) -> bool:
        """Return whether another admitted sequence will take a snapshot of these tokens."""
        count = len(tokens)
        return any(
            count in other.snapshot_points
            and other.num_computed_tokens < count
            and other.tokens[:count] == tokens
            for other in self._admitted.values()
            if other is not sequence
        )

    def _take(self, sequence: Sequence) -> None:
        """Take a snapshot of a batch slot; with prefix caching, other requests may use it.

        A snapshot at the end of a scored prompt stays reserved for its own continuations.
        """
        assert sequence.batch_slot is not None
        take = partial(self._snapshot, sequence.batch_slot, sequence.num_computed_tokens)
        own = sequence.score_only and sequence.num_computed_tokens == sequence.prompt_end - 1
        owner = None if self._shares_prompts and not own else sequence.request_id
        self._prefixes.add(sequence.tokens[: sequence.num_computed_tokens], take, owner)

    def _snapshot(self, batch_slot: int, tokens: int) -> Snapshot:
        """Return a snapshot of a batch slot with this many computed tokens, with its states."""
        snapshot, states = self._cache.snapshot(batch_slot, tokens), self._cache.states
        return snapshot if states is None else _StatefulSnapshot(snapshot, states, batch_slot)
