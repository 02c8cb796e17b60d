"""Interface of the prompt kernels; `lists` and `sparse` describe their arguments.

A prompt comes in chunks:

    state, chunk = kernels.plan_prompt(...)                      # length of each list afterwards
    kernels.allocate_pages(...)                                  # for chunk.lengths
    output = kernels.extend_prompt(tokens, chunk, state, pages, window=window, scale=scale)
    kernels.release_pages(...)                                   # sets the lengths of the lists
    reads = kernels.commit_prefill(chunk, state, ...)            # writes the ring

No function waits for the device.

Shape letters: r cache rows, h KV heads, g query heads per KV head, d head size, b sequences, n
tokens of a chunk, p pages of a full KV list, s slots of a page, w window, k KV lists of a call.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dms_train.kernels.decode.types import Decisions
from dms_train.kernels.prefill.lists import Pages, PrefillChunk, PrefillState, Tokens


class PrefillKernels(Protocol):
    """Attention of prompts, their state in a paged cache, and copies out of and into FP8 pages."""

    def extend_prompt(
        self,
        tokens: Tokens,
        chunk: PrefillChunk,
        state: PrefillState,
        pages: Pages,
        *,
        window: int,
        scale: float,
        evicts: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store the kept tokens of a chunk in the pages of a layer and compute its attention.

        Args:
            tokens: Query [b, h * g, n, d], key and value [b, h, n, d] of the chunk, with RoPE.
            chunk: From `plan_prompt`.
            state: State before the chunk.
            pages: At least `chunk.lengths` slots, in which the tokens of `state` lie; written.
            window: Distance up to which every key is read, in tokens.
            scale: Factor on the scores, above 0.
            evicts: Whether any token may be evicted. If not, torch's faster kernels compute a first
                chunk; they do not read a list.
            sinks: Logits [h * g] in the denominators of the heads; None for none.

        Returns:
            [b, h * g, n, d].
        """
        ...

    def plan_prompt(
        self,
        lengths: Tensor,
        ring: Tensor,
        rows: Tensor,
        position: Tensor,
        signal: Tensor | None,
        rule: Decisions,
        *,
        begins: bool,
    ) -> tuple[PrefillState, PrefillChunk]:
        """Decide which tokens are kept, and how many slots each list needs (`lengths`).

        Args:
            lengths: int32 [r, h].
            ring: int32 [r, h, w + 1], as in `PagedCache`.
            rows: int64 [b].
            position: int64 [b, n], of the chunk; -1 for padding, which comes last.
            signal: bool [b, h, n], decisions of the chunk's tokens; None unless `rule.source` is
                SIGNAL.
            rule: `source` (NEVER, ALWAYS or SIGNAL) and `shift` are read.
            begins: Whether the chunk is the first of these prompts; their lists are empty.

        Raises:
            KernelError: The source is another one, or does not fit `signal`.

        Returns:
            State before the chunk, and the chunk.
        """
        ...

    def commit_prefill(
        self,
        chunk: PrefillChunk,
        before: PrefillState,
        *,
        ring: Tensor,
        rows: Tensor,
        evicts: bool,
    ) -> Tensor:
        """Write the last tokens of a chunk to the ring, and count the slots that it has read.

        Args:
            chunk: The chunk; its lists end with its last tokens.
            before: State before it.
            ring: int32 [r, h, w + 1]; updated.
            rows: int64 [b].
            evicts: Whether any token may be marked; otherwise the ring stays.

        Returns:
            Slots read, int64 [b, h], summed over the queries.
        """
        ...

    def changed_pages(self, lengths: Tensor, slots: Tensor, places: int, page_slots: int) -> Tensor:
        """Return the pages that a chunk writes to, bool [b, h, places].

        Args:
            lengths: int32 [b, h], before the chunk.
            slots: int32 [b, h, any], slots of the last tokens, -1 for none.
            places: Pages of the longest list.
            page_slots: Slots of a page.
        """
        ...

    def read_fp8_pages(
        self, pages: Tensor, table: Tensor, exponents: Tensor, lengths: Tensor, wide: Tensor
    ) -> None:
        """Copy the slots in use of KV lists out of FP8 pages; the rest of `wide` is not written.

        Args:
            pages: FP8 [any, 2, s, d].
            table: int32 [k, p], page numbers.
            exponents: int8 [k, p, 2].
            lengths: int32 [k], slots in use.
            wide: [k, any, 2, s, d] with at least as many pages as are in use; written.
        """
        ...

    def write_fp8_pages(
        self,
        wide: Tensor,
        pages: Tensor,
        table: Tensor,
        exponents: Tensor,
        lengths: Tensor,
        changed: Tensor | None,
    ) -> None:
        """Store KV lists in FP8 pages; slots after the end of a list become 0.

        Args:
            wide: [k, any, 2, s, d], the lists.
            pages: FP8 [any, 2, s, d]; written.
            table: int32 [k, p], page numbers.
            exponents: int8 [k, p, 2]; written for the pages that are stored.
            lengths: int32 [k], slots in use.
            changed: bool [k, p], pages to store; None for all.
        """
        ...
