"""Interface of the decode kernels; `types` describes their arguments.

No function waits for the device. Each may be captured in a CUDA graph after one call that compiles
its kernels.

Shape letters: r cache rows, h KV heads, g query heads per KV head, d head size, b sequences, p
pages of a full KV list, s slots of a page, n pages of a slab, k KV lists of a call.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dms_train.kernels.decode.types import (
    AttentionTuning,
    AttentionWorkspace,
    Choice,
    Decisions,
    FreePages,
    HeadNorms,
    MergeRule,
    NewestTokens,
    PageBudget,
    PagedCache,
    PageSelection,
    SlotLogits,
    Step,
)


class PagedAttention(Protocol):
    """Decode attention over compact pages: store one token per sequence, then attend.

    Backends: `dispatch.triton_kernels()` on a GPU or in Triton's interpreter, and
    `dispatch.reference_kernels()`, plain loops in float64.
    """

    def append(
        self,
        step: Step,
        cache: PagedCache,
        rule: Decisions,
        *,
        norms: HeadNorms | None = None,
        rotated: Tensor | None = None,
    ) -> Tensor:
        """Evict the token that leaves the window if it is marked, then store one token.

        The cache is updated in place: pages, table, lengths and ring; exponents, positions and
        bounds if it has them. A token that finds no page is not stored and sets `cache.free.fault`.

        Args:
            step: One token per sequence.
            cache: Cache of the layer.
            rule: Source of the decisions.
            norms: RMSNorm of every head before RoPE and decisions; None if there is none.
            rotated: Receives the result; None allocates it.

        Returns:
            Query with RoPE, [b, h * g, d], contiguous.
        """
        ...

    def attention_workspace(
        self,
        query: Tensor,
        cache: PagedCache,
        tuning: AttentionTuning | None = None,
        *,
        evicts: bool = False,
    ) -> AttentionWorkspace:
        """Allocate the scratch memory of `attend`; it depends on the number of sequences.

        Args:
            query: [b, h * g, d], like the queries of a step.
            cache: Cache that is attended.
            tuning: Launch parameters; None takes the default.
            evicts: Whether a policy keeps KV lists shorter than their sequences.
        """
        ...

    def attend(
        self,
        query: Tensor,
        cache: PagedCache,
        rows: Tensor,
        scale: float,
        memory: AttentionWorkspace,
        output: Tensor | None = None,
        logits: SlotLogits | None = None,
        readers: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute softmax(q k^T * scale) v over the live slots, in float32.

        Args:
            query: [b, h * g, d] with RoPE, contiguous.
            cache: Cache that is attended; its pages have the query's dtype or FP8.
            rows: Integers [b], cache rows; -1 for an unused batch slot, whose output is 0.
            scale: Factor on the scores.
            memory: From `attention_workspace`.
            output: Receives the result; None allocates it.
            logits: Receives the scores; None keeps none. Entries after the end of a KV list stay
                as they are.
            readers: int32 [r, h, p], heads of a query group that read a page of the table, as bits;
                None for all. Not with FP8.
            sinks: Logits [h * g] in the denominators of the heads; None for none.

        Returns:
            [b, h * g, d].
        """
        ...


class DecodeKernels(PagedAttention, Protocol):
    """Decode attention, selection of tokens and pages, and management of pages.

    The KV lists of all layers and rows are numbered: (layer * r + row) * h + head. The functions
    that manage pages take `table` and `lengths` of all KV lists, flattened.
    """

    def choose(
        self,
        cache: PagedCache,
        choice: Choice,
        rows: Tensor,
        time: Tensor,
        *,
        logits: SlotLogits | None = None,
        scores: Tensor | None = None,
        brought: Tensor | None = None,
    ) -> None:
        """Mark the token of each KV list that the next step evicts.

        SUMMED adds to the scores, and DECAYED stores the number of the newest token there.

        Args:
            cache: With positions, and with a ring of one entry, which is written.
            choice: Selects the token.
            rows: Integers [b]; -1 for an unused batch slot.
            time: Integers [b], position of the newest token.
            logits: Scores of the newest token, for SUMMED and LEAST.
            scores: float32 [r, h, p * s], for SUMMED the attention received by the token in a slot,
                for DECAYED the number that it brought.
            brought: float32 [b, h], number of the newest token; for DECAYED.
        """
        ...

    def select_pages(
        self,
        query: Tensor,
        cache: PagedCache,
        bounds: Tensor,
        rows: Tensor,
        wanted: PageBudget,
        memory: PageSelection,
        read: Tensor,
    ) -> None:
        """Select the pages that each query head reads; of equal bounds, the lower page wins.

        `cache` with the table and lengths of `memory` can be given to `attend`, with `memory.heads`
        as `readers` and the batch slots as rows.

        Args:
            query: [b, h * g, d] with RoPE, contiguous.
            cache: Cache that is read.
            bounds: [n, 2, d], minimum and maximum of each channel of the keys of a page.
            rows: Integers [b]; -1 for an unused batch slot.
            wanted: Number of pages.
            memory: Receives the selection.
            read: int32 [r, h], slots that are read; written for these rows.
        """
        ...

    def accumulate(
        self, step: Step, newest: NewestTokens, merging: MergeRule, norms: HeadNorms | None = None
    ) -> Step:
        """Merge one token per sequence with the tokens before it, as DMC does.

        Args:
            step: Tokens before their norms.
            newest: Newest tokens of the layer; the tokens are added.
            merging: Decides about merges and weighs the tokens.
            norms: RMSNorm of every head; None if there is none.

        Returns:
            Step to append, with norms applied and `signal` int8 [b, h].
        """
        ...

    def report_status(self, parts: list[Tensor], out: Tensor) -> None:
        """Concatenate up to five tensors in memory that the host reads.

        Args:
            parts: int32, one-dimensional, on the device.
            out: int32 [sum of their lengths], contiguous; pinned on the host, or on the device.
        """
        ...

    def allocate_pages(
        self,
        table: Tensor,
        lengths: Tensor,
        after: Tensor,
        lists: Tensor,
        free: FreePages,
        page_slots: int,
    ) -> None:
        """Give KV lists the pages that they need for more slots.

        Args:
            table: int32 [any, p], page numbers; updated.
            lengths: int32 [any], slots in use; not changed.
            after: int32 [k], slots that are needed.
            lists: int64 [k], numbers of the KV lists, all different.
            free: Source of the pages; `fault` is set if there are too few.
            page_slots: Slots of a page.
        """
        ...

    def release_pages(
        self,
        table: Tensor,
        lengths: Tensor,
        after: Tensor,
        lists: Tensor,
        free: FreePages,
        page_slots: int,
    ) -> None:
        """Set the lengths of KV lists and release the pages that they no longer need.

        A page without another holder becomes free.

        Args:
            table: int32 [any, p], page numbers.
            lengths: int32 [any], slots in use; updated.
            after: int32 [k], slots that stay. If the number grows, the pages must already be
                allocated.
            lists: int64 [k], numbers of the KV lists, all different.
            free: Receives the pages; with `holders`.
            page_slots: Slots of a page.
        """
        ...

    def copy_shared_pages(
        self,
        table: Tensor,
        lengths: Tensor,
        changed: Tensor,
        lists: Tensor,
        pages: Tensor,
        free: FreePages,
    ) -> None:
        """Copy changed pages that other KV lists hold too.

        Args:
            table: int32 [any, p], page numbers; updated.
            lengths: int32 [any], slots in use.
            changed: bool [k, p], pages that change; entries after the end of a list are ignored.
            lists: int64 [k], numbers of the KV lists, all different.
            pages: All pages, [any, 2, s, d]; the copies are written.
            free: Source of the copies; with `holders`. `fault` is set if there are too few.
        """
        ...
