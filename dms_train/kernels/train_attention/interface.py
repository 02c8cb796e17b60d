"""Interface of the training attention."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class DMSAttention(Protocol):
    """Causal attention with a soft eviction bias; differentiable.

    Shape letters: b samples, s tokens, hq query heads, hk KV heads, d head size.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_keep: Tensor | None,
        window: int | None,
        scale: float,
        cu_seqlens: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute softmax(q k^T * scale + causal + [i - j > window] log(1 - alpha_j)) v.

        Without a window, the bias of key j is (i - j) log(1 - alpha_j).

        Args:
            query: [b, s, hq, d].
            key: [b, s, hk, d]; hq is a multiple of hk.
            value: [b, s, hk, d].
            log_keep: log(1 - alpha) [b, hk, s] by key, at least float32; None evicts nothing.
            window: Distance up to which a key is always visible, in tokens; None lets the bias
                grow with the distance.
            scale: Factor on the scores.
            cu_seqlens: Bounds of the documents packed into the sample (b = 1), int32
                [documents + 1]; a query sees its own document only. None is one document per
                sample.
            sinks: Logits [hq], at least float32. exp(sink) is added to the denominator of every
                softmax of the head. None adds nothing.

        Returns:
            [b, s, hq, d] in the dtype of `query`; scores and softmax are at least float32.

        Raises:
            KernelError: Packed documents in more than one sample, or no window where the backend
                needs one.
        """
        ...
