"""Sizes of a mixture of experts, and their keys in config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dms_train.families import ModelFamily
from dms_train.families.base import ExpertKeys
from dms_train.hf.values import Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts in place of the MLP of every layer.

    Attributes:
        count: Number of experts of a layer.
        topk: Number of experts that a token passes through.
        ffn_hidden_size: Width of an expert.
        normalize: Whether the weights of a token's experts are divided by their sum.
        shared_ffn_hidden_size: Width of an expert through which every token passes; 0 without.
    """

    count: int
    topk: int
    ffn_hidden_size: int
    normalize: bool
    shared_ffn_hidden_size: int = 0


def read_experts(config: Values, family: ModelFamily) -> Experts | None:
    """Read the mixture of experts; transformers 5 writes the number of experts under a new key."""
    keys = family.expert_keys
    if keys is None:
        return None
    new = "num_local_experts" in config.values
    experts = Experts(
        count=config.whole("num_local_experts" if new else keys.number, keys.experts),
        topk=config.whole("num_experts_per_tok", keys.topk),
        ffn_hidden_size=config.whole(keys.width, keys.expert_width),
        normalize=keys.normalize is None or config.flag(keys.normalize, default=keys.normalizes),
        shared_ffn_hidden_size=config.whole(keys.shared, keys.expert_width) if keys.shared else 0,
    )
    if experts.topk > experts.count:
        fix = f"state at most the number of experts, {experts.count}"
        raise config.refusal("num_experts_per_tok", experts.topk, fix)
    if experts.topk == 1 and experts.normalize:
        fix = "the router has no effect on training with normalised weights; use another model"
        raise config.refusal("num_experts_per_tok", 1, fix)
    return experts


def expert_keys(experts: Experts, keys: ExpertKeys) -> dict[str, Any]:
    """Return the keys of a mixture of experts in config.json."""
    return {
        keys.number: experts.count,
        "num_experts_per_tok": experts.topk,
        keys.width: experts.ffn_hidden_size,
        **({} if keys.normalize is None else {keys.normalize: experts.normalize}),
        **({} if keys.shared is None else {keys.shared: experts.shared_ffn_hidden_size}),
    }
