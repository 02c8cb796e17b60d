"""The rows of a cache as the scheduler sees them, and when snapshots are taken of them."""

from __future__ import annotations

from functools import partial

import torch

from dms_train.inference.cache.interface import KVCache
from dms_train.inference.options import EngineOptions
from dms_train.inference.prefix_cache import PrefixCache
from dms_train.inference.sequence import Sequence


class RowMemory:
    """A `CacheMemory`.

    Snapshots are taken at the end of a prompt with several continuations. With prefix caching they
    are also taken where a prompt departs from an earlier one, and when a sequence has finished
    that was generated.

    Args:
        cache: Whose rows they are.
        options: Of the engine.
    """

    def __init__(self, cache: KVCache, options: EngineOptions) -> None:
        self._cache = cache
        # a copy of one number from the host would wait for the GPU
        self._rows = torch.arange(options.max_num_seqs, device=options.device)
        self._shared = options.enable_prefix_caching and cache.policy.shareable
        self._prefixes = PrefixCache(options.max_num_seqs)
        self._placed: dict[int, Sequence] = {}  # by row

    def free_pages(self, least: int) -> float:
        """Pages that neither a row nor a snapshot holds; infinite without a limit."""
        return self._cache.free_pages(least)

    def most_copies(self, row: int, tokens: int) -> int:
        """Most pages of a row that are copied for its next tokens."""
        return self._cache.most_copies(row, tokens)

    def pages_of_steps(self, steps: int) -> int:
        """Most pages of a KV list that steps of one token take or copy; groups have kernels."""
        return self._cache.pages_of_steps(steps)

    def free(self, row: int) -> None:
        """Empty a row."""
        self._cache.free(self._rows[row : row + 1])
        self._placed.pop(row, None)  # absent if placing it has failed
        self._cache.note_empty(row)

    def cached_tokens(self, sequence: Sequence) -> int:
        """Tokens of the longest snapshot that a sequence can start from."""
        return self._prefixes.length(sequence.shareable, sequence.request_id)

    def awaited(self, sequence: Sequence) -> Sequence | None:
        """Who takes a snapshot before long that saves a waiting sequence half of its tokens."""
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
        """Put that snapshot into the row of a sequence, and plan the snapshots of its prompt."""
        assert sequence.row is not None
        self.assign(sequence)
        self._placed[sequence.row] = sequence
        found = self._prefixes.restore(sequence.shareable, sequence.request_id, sequence.row)
        sequence.computed = found
        if not sequence.output or sequence.given_only:
            sequence.meter.cached_tokens = max(0, found - sequence.prompt_start)
            sequence.cuts = self._cuts(sequence)

    def max_tokens(self, sequence: Sequence) -> int | None:
        """Most tokens of a sequence that the policy takes in its next step; None for any number."""
        return self._cache.policy.max_tokens(sequence.sizes, sequence.computed)

    def assign(self, sequence: Sequence) -> None:
        """Have the policy know the request of a sequence with a row."""
        assert sequence.row is not None
        self._cache.assign(sequence.row, sequence.sizes)

    def reclaim(self, keep_for: Sequence | None = None) -> bool:
        """Release the least recently used snapshot but that for a sequence."""
        if keep_for is None:
            return self._prefixes.reclaim(None, None)
        return self._prefixes.reclaim(keep_for.shareable, keep_for.request_id)

    def note(self, sequence: Sequence) -> None:
        """Take a snapshot if the next tokens of a sequence are cut here."""
        if sequence.computed in sequence.cuts:
            self._take(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a snapshot of a sequence that has ended, for prompts that continue it."""
        generated = sequence.computed and not sequence.given_only
        if self._shared and sequence.row is not None and generated:
            self._take(sequence)

    def forget(self, request_id: str) -> None:
        """Release the snapshots that only this request may use."""
        self._prefixes.forget(request_id)

    def _cuts(self, sequence: Sequence) -> tuple[int, ...]:
        """Where snapshots of a prompt are taken; its last token gives the first logits."""
        if sequence.index:
            return ()  # the first continuation takes them
        cuts = {sequence.prompt_end - 1} if sequence.params.n > 1 else set()
        if self._shared:
            common = self._prefixes.common_prefix(sequence.tokens[: sequence.prompt_end])
            if not self._is_planned(sequence.tokens[:common], sequence):
                cuts.add(common)
        return tuple(cut for cut in sorted(cuts) if cut > sequence.computed)

    def _is_planned(self, tokens: list[int], sequence: Sequence) -> bool:
        """Whether another sequence with a row will take a snapshot of these tokens."""
        count = len(tokens)
        return any(
            count in other.cuts and other.computed < count and other.tokens[:count] == tokens
            for other in self._placed.values()
            if other is not sequence
        )

    def _take(self, sequence: Sequence) -> None:
        """Snapshot a row; other requests may use it with prefix caching only.

        That at the end of a scored prompt is for its own continuations in any case.
        """
        assert sequence.row is not None
        take = partial(self._cache.snapshot, sequence.row)
        own = sequence.given_only and sequence.computed == sequence.prompt_end - 1
        owner = None if self._shared and not own else sequence.request_id
        self._prefixes.add(sequence.tokens[: sequence.computed], take, owner)
