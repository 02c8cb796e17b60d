"""Token retention as in TRIM-KV: tokens of the lowest decayed retention leave (arXiv:2512.03324).

The model states log beta of each token when the token arrives. At position t the score of token i
is beta_i^(t - i), and the budget's highest scores stay. By default the policy evicts at
the end of a prompt and after every generated token.

Shape letters: b sequences, h KV heads, s slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from dms_train.inference.policies.base import CachePolicy, NewTokens, PolicyKind, Sequences, Slots
from dms_train.inference.policies.dms import signals_by_slot
from dms_train.inference.policies.kernel_rules import (
    LEAST,
    RETENTION,
    BudgetRule,
    KernelRule,
    Limits,
)
from dms_train.inference.policies.score_policy import ScoreOptions, ScorePolicy
from dms_train.limits import AtLeast, Below
from dms_train.method.base import MethodSpec
from dms_train.method.trim_kv.attention import log_retention
from dms_train.method.trim_kv.spec import TrimKVSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimKVPolicyOptions(ScoreOptions):
    """Options of `trim_kv`; without a budget, the model's own applies."""

    interval: Annotated[int | None, AtLeast(1), Below(2**31)] = 1

    def check(self, path: str) -> Iterator[str]:
        """Yield the error lines of the budget, if one is given."""
        if self.budget is not None or self.cr is not None:
            yield from ScoreOptions.check(self, path)


_SCORING = ("kept", "retention", "slot_scores")  # hooks that the kernel rule describes


class TrimKVPolicy(ScorePolicy):
    """Keep the tokens of the highest decayed retention; a slot's state is log beta."""

    state_width = 1

    def __init__(self, options: TrimKVPolicyOptions, spec: TrimKVSpec) -> None:
        super().__init__(options)
        self._spec = spec

    def kernel_rule(self) -> KernelRule | str:
        """Evict the token of the lowest decayed retention after every generated token."""
        if self.options.interval != 1 or self.options.decode_only:
            return "needs interval=1 and no decode_only for the kernels, which evict token by token"
        own = type(self)
        for name in _SCORING:
            if getattr(own, name) is not getattr(TrimKVPolicy, name):
                return f"overrides {name}, and the kernels score as the parent does"
        return BudgetRule(evicts=LEAST, score=RETENTION)

    def limits(self, sequences: Sequences) -> Limits:
        """Return the budget and the protected tokens."""
        budget = self.options.tokens(sequences)
        return Limits(budget, budget.clamp(max=self.protected))

    def retention(self, channel: Tensor) -> Tensor:
        """Return log beta."""
        return log_retention(channel, self._spec).float()

    def on_store(self, slots: Slots, arrival: NewTokens) -> Tensor:
        """Store log beta, [b, h, n], with the arriving tokens."""
        return signals_by_slot(slots, arrival, shift=0)

    def slot_scores(self, slots: Slots, sequences: Sequences) -> Tensor:
        """Return (t - i) log beta_i, [b, h, s], for the newest position t."""
        age = (sequences.end - 1)[:, None, None] - slots.position
        return age * slots.state[..., 0]


def _build(options: TrimKVPolicyOptions, spec: MethodSpec) -> CachePolicy:
    assert isinstance(spec, TrimKVSpec)
    if options.budget is None and options.cr is None:
        options = replace(options, budget=spec.budget)
    return TrimKVPolicy(options, spec)


POLICY = PolicyKind(TrimKVPolicyOptions, _build, trained=True)
