"""Packed documents: every number against a loop over the documents alone."""

from __future__ import annotations

import pytest
import torch

from dms_train.method.accounting import live_slots, slots_held_and_read
from dms_train.method.dms.spec import DMSSpec
from dms_train.method.documents import PackedDocuments
from dms_train.method.spec import PRESETS
from dms_train.method.visibility import align_to_keys

LENGTH, HEADS = 24, 3
# Full samples, padding, documents of one token, one document.
LENGTHS = [[9, 1, 14], [3, 5], [24], [1, 1, 1, 20]]
SPECS = [
    PRESETS["dms"].override(window=window, eviction=eviction, decision_shift=shift)
    for window, eviction, shift in [
        (3, "delayed", 1),
        (3, "delayed", 0),
        (2, "immediate", 1),
        (30, "delayed", 1),
    ]
]


def packed() -> PackedDocuments:
    return PackedDocuments.of([torch.tensor(own) for own in LENGTHS], LENGTH)


def places() -> list[tuple[int, int, int]]:
    """(sample, first position, end) of every document."""
    return [
        (n, sum(own[:k]), sum(own[: k + 1]))
        for n, own in enumerate(LENGTHS)
        for k in range(len(own))
    ]


def test_bounds_positions_and_padding() -> None:
    documents = packed()
    numbers = torch.zeros(len(LENGTHS), LENGTH, dtype=torch.int64)
    edges = set()
    token, last = (torch.zeros(len(LENGTHS), LENGTH, dtype=torch.bool) for _ in range(2))
    for n, first, end in places():
        numbers[n, first:end] = torch.arange(end - first)
        token[n, first:end] = True
        last[n, end - 1] = True
        edges |= {n * LENGTH + first, n * LENGTH + end}
    for n, own in enumerate(LENGTHS):
        numbers[n, sum(own) :] = torch.arange(LENGTH - sum(own))
        edges |= {n * LENGTH, (n + 1) * LENGTH}
    assert documents.cu_seqlens.tolist() == sorted(edges)
    assert documents.cu_seqlens.dtype == torch.int32
    assert torch.equal(documents.positions, numbers)
    assert torch.equal(documents.is_token, token)
    assert torch.equal(documents.is_last, last)
    assert documents.tokens.tolist() == [sum(own) for own in LENGTHS]


def test_slots_without_evictions() -> None:
    reads = [sum(n * (n + 1) / 2 for n in own) / LENGTH for own in LENGTHS]
    expected = [[0.0, 2.0 * sum(own), 2 * r] for own, r in zip(LENGTHS, reads, strict=True)]
    assert torch.allclose(packed().dense_eviction_stats(2), torch.tensor(expected))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.window}{s.eviction}{s.decision_shift}")
def test_decisions_and_slots_are_those_of_documents_alone(spec: DMSSpec) -> None:
    generator = torch.Generator().manual_seed(0)
    decisions = torch.rand(len(LENGTHS), HEADS, LENGTH, generator=generator) < 0.7
    documents = packed()
    aligned = align_to_keys(decisions, spec, keep=False, documents=documents)
    live = live_slots(decisions, spec, documents)
    held, read = (torch.zeros(len(LENGTHS), HEADS, dtype=torch.int64) for _ in range(2))
    for n, first, end in places():
        alone = decisions[n, :, first:end]
        assert torch.equal(aligned[n, :, first:end], align_to_keys(alone, spec, keep=False))
        slots = live_slots(alone, spec)
        assert torch.equal(live[n, :, first:end], slots)
        held[n] += slots[:, -1]
        read[n] += slots.sum(-1)
    found = slots_held_and_read(decisions, spec, documents)
    assert torch.equal(found[0], held)
    assert torch.equal(found[1], read)
    assert (held < documents.tokens[:, None]).any() == (spec.window < LENGTH)
