"""Experts of the tiny models."""

from __future__ import annotations

from dms_train.families import FAMILIES
from dms_train.hf.experts import Experts


def experts_of(family: str) -> Experts | None:
    """Four small experts in families that have them."""
    if family not in FAMILIES or not FAMILIES[family].has_experts:
        return None
    shared = 20 if FAMILIES[family].shares_expert else 0
    return Experts(
        count=4, topk=2, ffn_hidden_size=24, normalize=True, shared_ffn_hidden_size=shared
    )
