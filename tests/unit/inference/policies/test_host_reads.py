"""Prompts with a budget: the host reads from the device once per step, not once per layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import dms_train.inference
from dms_train.inference.cache.interface import AttentionStep
from dms_train.inference.policies.registry import build_policy
from dms_train.kernels import dispatch
from tests.support import policy_cases as cases
from tests.support.host_reads import HostReads
from tests.support.matrix import FULL_MATRIX
from tests.unit.inference import test_paged_dmc as merging

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
)
INFERENCE = str(Path(dms_train.inference.__file__).parent)
LAYERS = 2
# PyramidKV keeps another number of tokens in every layer
POLICIES = [*cases.POLICIES, ("pyramidkv", {"cr": 2.0, "window": 3, "kernel": 3}), *cases.SELECTING]
if not FULL_MATRIX:
    POLICIES = list(dict(POLICIES).items())  # each policy once


class Counted:
    """A cache whose steps pass through all layers.

    Attributes:
        reads: Places of the reads of each step, by kind of step: one token per sequence, or more.
    """

    def __init__(self, cache) -> None:
        self._cache = cache
        self.reads: dict[bool, list[list[str]]] = {True: [], False: []}

    def __getattr__(self, name):
        return getattr(self._cache, name)

    def step(self, _: int, step: AttentionStep):
        counted = HostReads(INFERENCE)
        with counted:
            attended = [self._cache.step(layer, step) for layer in range(LAYERS)]
        self.reads[step.position.shape[1] == 1].append(counted.places)
        return attended[0]


@pytest.mark.parametrize(("policy", "own"), POLICIES, ids=lambda x: x if type(x) is str else "")
def test_the_host_reads_at_most_once_per_step(policy, own):
    """Prompts in parts, ends of one token beside generated ones, and a second turn."""
    cache = Counted(cases.paged(build_policy(policy, own, None), DEVICE, 300, LAYERS))
    passes = cases.Passes(cache, DEVICE)
    passes.positions = False
    for row, request in enumerate(cases.REQUESTS):
        passes.assign(row, request)
    passes.go({0: 8, 2: 9})
    passes.go({0: 9, 2: 10})  # row 2 ends its prompt
    passes.assign(0, cases.TURN)
    passes.go({0: 13})
    assert len(cache.reads[False]) > 0
    assert [places for places in cache.reads[False] if len(places) > 1] == []
    assert [places for places in cache.reads[True] if len(places) > 1] == []


def test_merging_reads_nothing():
    spec = merging.dmc(0.0)
    counted = HostReads(INFERENCE)
    cache = merging.empty(spec)
    with counted:
        merging.feed(cache, spec, 0, 7)
        merging.feed(cache, spec, 7, 4)
    assert counted.places == []


def test_reads_are_found():
    """The instrument itself: each operation that waits counts, others do not."""
    numbers, mask = torch.arange(4), torch.tensor([True, False, True, False])
    counted = HostReads(__file__)
    with counted:
        numbers[mask], numbers[[0, 1]]
        numbers[mask] = 0
        int(numbers[0]), bool(mask.any()), numbers.tolist(), numbers[0].item()
        mask.nonzero(), torch.where(mask), torch.tensor([1]), numbers.repeat_interleave(mask.long())
        waits = len(counted.places)
        numbers[numbers], numbers[:2], torch.where(mask, numbers, 0), numbers.sum()
        numbers.repeat_interleave(2, output_size=8)
    assert (waits, len(counted.places)) == (11, 11)
