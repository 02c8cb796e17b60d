"""State of a policy: request sizes, and its tensors for each KV list; owned by a cache.

Shape letters: b sequences, h KV heads, r query heads per KV head, n arriving tokens, m recent
queries, d head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.inference.cache.base import UnrotatedTokens
from dms_train.inference.policies.base import CachePolicy, RequestSizes, Sequences

_QUERY = "recent queries"  # the cache's own entry among the policy's tensors


class PolicyState:
    """Request sizes of every row, and the policy's tensors of every (layer, row, KV head).

    Args:
        policy: Policy that uses the state.
        layers: Attention layers.
        rows: Sequences held at the same time.
        device: Device of the tensors.
        frequency: RoPE frequencies of the layers, [layers, d / 2]; as in `Sequences`.
    """

    def __init__(
        self,
        policy: CachePolicy,
        *,
        layers: int,
        rows: int,
        device: torch.device,
        frequency: Tensor | None = None,
    ) -> None:
        self._frequency = frequency
        self._policy, self._recent = policy, policy.recent_queries
        self._sizes = torch.zeros(rows, len(RequestSizes._fields), dtype=torch.int64, device=device)
        self._lists: list[dict[str, Tensor]] = [{} for _ in range(layers)]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the policy's tensors."""
        return sum(tensor.nbytes for lists in self._lists for tensor in lists.values())

    def assign(self, row: int, sizes: RequestSizes) -> None:
        """Store the sizes of the request, or turn, that takes a row; keep the cached tokens."""
        self._sizes[row] = torch.tensor(sizes, device=self._sizes.device)

    def reset(self, rows: Tensor) -> None:
        """Forget the requests of these rows, int64 [b]."""
        self._sizes[rows] = 0
        for lists in self._lists:
            for tensor in lists.values():
                tensor[rows] = 0

    def sequences(self, layer: int, rows: Tensor, position: Tensor, query: Tensor) -> Sequences:
        """Return the sequences of a pass; their recent queries include those of the pass.

        Args:
            layer: Layer number.
            rows: int64 [b].
            position: int64 [b, n], of the arriving tokens; -1 for padding.
            query: [b, h, r, n, d], of the same tokens.
        """
        prompt, limit, seed = self._sizes[rows].unbind(1)
        lists = {name: tensor[rows] for name, tensor in self._lists[layer].items()}
        if self._recent:
            lists[_QUERY] = self._newest(lists.get(_QUERY), position >= 0, query.transpose(2, 3))
        end = position.amax(1) + 1
        return Sequences(
            layers=len(self._lists),
            start=end - (position >= 0).sum(1),
            end=end,
            prompt=prompt,
            limit=limit,
            seed=seed,
            lists=lists,
            query=lists.get(_QUERY),
            frequency=self.frequency(layer),
        )

    def frequency(self, layer: int) -> Tensor | None:
        """Return the RoPE frequencies of a layer, [d / 2]."""
        return None if self._frequency is None else self._frequency[layer]

    def accumulated(self, layer: int, step: UnrotatedTokens) -> UnrotatedTokens:
        """Return the tokens of a pass as the policy stores them."""
        if type(self._policy).accumulate is CachePolicy.accumulate:
            return step
        lists = {name: tensor[step.rows] for name, tensor in self._lists[layer].items()}
        content = self._policy.accumulate(step.projected(), lists)
        if content is None:
            return step
        self.store(layer, step.rows, lists)
        return step.replaced(*content)

    def _newest(self, before: Tensor | None, real: Tensor, query: Tensor) -> Tensor:
        """Return the newest queries, [b, h, m, r, d].

        Args:
            before: The newest ones before the pass; None for none.
            real: bool [b, n], False for padding.
            query: [b, h, n, r, d].
        """
        b, h, n, r, d = query.shape
        m, count = self._recent, real.sum(1, keepdim=True)
        if before is None:
            before = query.new_zeros(b, h, m, r, d)
        order = real.int().argsort(dim=1, stable=True)  # padding first
        query = query.gather(2, order[:, None, :, None, None].expand_as(query))
        index = count + torch.arange(m, device=query.device)  # without the padding
        index = torch.where(index < m, index, index + n - count)
        both = torch.cat([before, query], 2)
        return both.gather(2, index[:, None, :, None, None].expand(b, h, m, r, d))

    def store(self, layer: int, rows: Tensor, lists: dict[str, Tensor]) -> None:
        """Keep the policy's tensors, [b, h, ...] each, of these rows."""
        known = self._lists[layer]
        for name, values in lists.items():
            stored = known.get(name)
            if stored is None:
                stored = values.new_zeros(len(self._sizes), *values.shape[1:])
            if values.dim() > 2:
                stored, values = _widened(stored, values)
            stored[rows] = values
            known[name] = stored

    def layers(self, rows: Tensor) -> list[dict[str, Tensor]]:
        """Return the copies of the policy's tensors of these rows, by layer, [b, h, ...] each."""
        return [{name: tensor[rows] for name, tensor in lists.items()} for lists in self._lists]

    def snapshot(self, row: int) -> list[dict[str, Tensor]]:
        """Return the copies of the tensors of a row, by layer."""
        return [
            {name: tensor[row].clone() for name, tensor in lists.items()} for lists in self._lists
        ]

    def restore(self, row: int, stored: list[dict[str, Tensor]]) -> None:
        """Write copies to an empty row; its request sizes do not change."""
        rows = self._sizes.new_tensor([row])
        for layer, lists in enumerate(stored):
            self.store(layer, rows, {name: tensor[None] for name, tensor in lists.items()})


def _widened(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Pad the third dimension of the shorter one with zeros."""
    size = max(first.shape[2], second.shape[2])
    after = (0, 0) * (first.dim() - 3)
    first, second = (
        F.pad(x, (*after, 0, size - x.shape[2])) if x.shape[2] < size else x
        for x in (first, second)
    )
    return first, second
