"""Rows of a KV cache for the scheduler, and the snapshots that are taken of them."""

from __future__ import annotations

from functools import partial

import torch

from dms_train.inference.cache.interface import KVCache
from dms_train.inference.options import EngineOptions
from dms_train.inference.prefix_cache import PrefixCache
from dms_train.inference.sequence import Sequence


class KVCacheManager:
    """Manager of cache rows and snapshots; implements `scheduler.CacheMemory`.

    Snapshots are taken at the end of a prompt with several continuations. With prefix caching they
    are also taken where a prompt departs from an earlier one, and when a generated sequence has
    finished.

    Args:
        cache: The cache.
        options: Options of the engine.
    """

    def __init__(self, cache: KVCache, options: EngineOptions) -> None:
        self._cache = cache
        # slices of it replace tensors made on the host, whose copy would wait for the GPU
        self._rows = torch.arange(options.max_num_seqs, device=options.device)
        self._shared = options.enable_prefix_caching and cache.policy.shareable
        self._prefixes = PrefixCache(options.max_num_seqs)
        self._placed: dict[int, Sequence] = {}  # by row

    def free_pages(self, least: int) -> float:
        """Return the number of pages that neither a row nor a snapshot holds."""
        return self._cache.free_pages(least)

    def most_copies(self, row: int, tokens: int) -> int:
        """Return the most pages of a row that are copied for its next tokens."""
        return self._cache.most_copies(row, tokens)

    def pages_of_steps(self, steps: int) -> int:
        """Return the most pages of a KV list that steps of one token take or copy."""
        return self._cache.pages_of_steps(steps)

    def free(self, row: int) -> None:
        """Empty a row."""
        self._cache.free(self._rows[row : row + 1])
        self._placed.pop(row, None)  # absent if `restore` has failed
        self._cache.note_empty(row)

    def cached_tokens(self, sequence: Sequence) -> int:
        """Return the length of the longest snapshot that a sequence can start from."""
        return self._prefixes.length(sequence.shareable, sequence.request_id)

    def awaited(self, sequence: Sequence) -> Sequence | None:
        """Return a running sequence about to take a snapshot worth waiting for.

        The snapshot must cover at least half of the tokens that the waiting sequence must compute.
        """
        if not self._shared:
            return None
        tokens = sequence.shareable
        cached = self.cached_tokens(sequence)
        least = (len(tokens) + cached) / 2
        for other in self._placed.values():
            for cut in other.cuts:
                begun = other.computed < cut < len(tokens) and cut >= least
                if begun and other.tokens[:cut] == tokens[:cut]:
                    return other
        return None

    def restore(self, sequence: Sequence) -> None:
        """Restore the longest snapshot into the row of a sequence, and plan its own snapshots."""
        assert sequence.row is not None
        self.assign(sequence)
        self._placed[sequence.row] = sequence
        restored = self._prefixes.restore(sequence.shareable, sequence.request_id, sequence.row)
        sequence.computed = restored
        if not sequence.output or sequence.given_only:
            sequence.meter.cached_tokens = max(0, restored - sequence.prompt_start)
            sequence.cuts = self._cuts(sequence)

    def max_tokens(self, sequence: Sequence) -> int | None:
        """Return the most tokens that the policy takes in the next step; None for any number."""
        return self._cache.policy.max_tokens(sequence.sizes, sequence.computed)

    def assign(self, sequence: Sequence) -> None:
        """Tell the policy about the request of a sequence with a row."""
        assert sequence.row is not None
        self._cache.assign(sequence.row, sequence.sizes)

    def reclaim(self, keep_for: Sequence | None = None) -> bool:
        """Release the least recently used snapshot, except the one for `keep_for`."""
        if keep_for is None:
            return self._prefixes.reclaim(None, None)
        return self._prefixes.reclaim(keep_for.shareable, keep_for.request_id)

    def take_planned(self, sequence: Sequence) -> None:
        """Take a snapshot if one is planned after the tokens computed so far."""
        if sequence.computed in sequence.cuts:
            self._take(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a snapshot of a finished sequence, for prompts that continue it."""
        generated = sequence.computed and not sequence.given_only
        if self._shared and sequence.row is not None and generated:
            self._take(sequence)

    def forget(self, request_id: str) -> None:
        """Release the snapshots that only this request may use."""
        self._prefixes.forget(request_id)

    def _cuts(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the lengths at which snapshots of a prompt are taken.

        A snapshot leaves out the last token, because computing it gives the first logits.
        """
        if sequence.index:
            return ()  # the first continuation takes them
        cuts = {sequence.prompt_end - 1} if sequence.params.n > 1 else set()
        if self._shared:
            common = self._prefixes.common_prefix(sequence.tokens[: sequence.prompt_end])
            if not self._is_planned(sequence.tokens[:common], sequence):
                cuts.add(common)
        return tuple(cut for cut in sorted(cuts) if cut > sequence.computed)

    def _is_planned(self, tokens: list[int], sequence: Sequence) -> bool:
        """Return whether another sequence with a row will take a snapshot of these tokens."""
        count = len(tokens)
        return any(
            count in other.cuts and other.computed < count and other.tokens[:count] == tokens
            for other in self._placed.values()
            if other is not sequence
        )

    def _take(self, sequence: Sequence) -> None:
        """Take a snapshot of a row; other requests may use it with prefix caching only.

        The snapshot at the end of a scored prompt is always reserved for its own continuations.
        """
        assert sequence.row is not None
        take = partial(self._cache.snapshot, sequence.row)
        own = sequence.given_only and sequence.computed == sequence.prompt_end - 1
        owner = None if self._shared and not own else sequence.request_id
        self._prefixes.add(sequence.tokens[: sequence.computed], take, owner)
