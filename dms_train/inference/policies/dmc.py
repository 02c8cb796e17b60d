"""Dynamic Memory Compression: a token continues the slot of its predecessor or takes a new one.

A token that continues is stored as the merged state of its slot, rotated at its own position. The
previous state is evicted, and its slot is overwritten. The newest tokens of every KV list are kept
unmerged in a ring, from which the state is computed as in training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dms_train.inference.policies.base import NoOptions, PolicyKind, Projected
from dms_train.inference.policies.dms import DMSPolicy
from dms_train.inference.policies.kernel_rules import KernelRule, MergeRule
from dms_train.method.dmc.attention import SMALLEST_WEIGHT, DMCLayer, weights
from dms_train.method.dmc.merge import merge
from dms_train.method.dmc.spec import DMCSpec


class DMCPolicy(DMSPolicy):
    """DMC: the state of token j is evicted for later queries if decision j + 1 continues it.

    Args:
        spec: Spec of the model's training.

    Attributes:
        spec: As given.
    """

    def __init__(self, spec: DMCSpec) -> None:
        super().__init__(spec.window, spec.governing_shift)
        self.spec, self._layer = spec, DMCLayer(spec)

    def kernel_rule(self) -> KernelRule | str:
        """Merge tokens where the model decides so."""
        spec = self.spec
        if spec.heads != "separate" or spec.merge_window < 2:
            return f"merges with heads={spec.heads} merge_window={spec.merge_window}"
        return MergeRule(
            tokens=spec.merge_window,
            shift=self.shift,
            channel=spec.channel,
            scale=spec.alpha_scale,
            offset=spec.alpha_offset,
            importance_offset=spec.importance_offset,
            smallest=SMALLEST_WEIGHT,
            uniform=spec.importance == "uniform",
        )

    def accumulate(self, tokens: Projected, lists: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Merge keys and values, and advance the ring.

        `lists` holds key and value of the ring, [b, h, width - 1, d], and alpha and weight,
        [b, h, width - 1, 2]; the newest token last, and a weight of 0 where there is none.
        """
        b, n, h, d = tokens.key.shape
        size = self.spec.merge_window - 1
        new = self._weighed(tokens)  # [b, h, n, d], likewise, and [b, h, n, 2]
        if "key" not in lists:
            empty = tokens.key.new_zeros(b, h, size, d)
            lists["key"], lists["value"] = empty, empty
            lists["weights"] = new[2].new_zeros(b, h, size, 2)
        old = (lists["key"], lists["value"], lists["weights"])
        key, value, both = (torch.cat(pair, 2) for pair in zip(old, new, strict=True))
        # padding moves to the front of the ring, so that the tokens are adjacent
        order = (both[:, 0, :, 1] > 0).int().argsort(dim=1, stable=True)  # [b, size + n]
        at = order[:, None, :, None]
        key, value, both = (x.gather(2, at.expand_as(x)) for x in (key, value, both))
        last = slice(n, None)
        lists["key"], lists["value"], lists["weights"] = (x[:, :, last] for x in (key, value, both))
        alpha, weight = both.movedim(2, 0).unbind(-1)
        states = merge(key.movedim(2, 0), value.movedim(2, 0), alpha, weight, size + 1)
        index = order.argsort(1)[:, size:].t()[..., None, None]
        stored_key, stored_value = (
            x.gather(0, index.expand(-1, -1, h, d)).transpose(0, 1) for x in states
        )
        return stored_key, stored_value

    def _weighed(self, tokens: Projected) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and merge weights of the arriving tokens, by KV list."""
        _, weighing = self._layer.activations(tokens.query, tokens.key)
        weight = weights(weighing, self.spec)
        alpha = self._layer.hard(tokens.query, tokens.key) & (tokens.position > 0)[..., None]
        weight = weight * (tokens.position >= 0)[..., None]
        _, key = self._layer.cleared(tokens.query, tokens.key)
        both = torch.stack([alpha.to(weight.dtype), weight], -1)
        return key.transpose(1, 2), tokens.value.transpose(1, 2), both.transpose(1, 2)


def _build(options: NoOptions, spec: DMCSpec) -> DMCPolicy:
    return DMCPolicy(spec)


POLICY = PolicyKind(NoOptions, _build, trained=True)
