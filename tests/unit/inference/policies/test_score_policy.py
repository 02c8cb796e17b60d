"""A score policy of another distribution, against loops in plain torch; on a CPU and in kernels."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

from dms_train.inference.errors import InferenceError
from dms_train.inference.policies import registry
from dms_train.inference.policies.attention_scores import window_attention
from dms_train.inference.policies.base import RequestSizes, Sequences, Slots
from dms_train.inference.policies.registry import build_policy
from dms_train.inference.policies.score_policy import ScoreOptions, ScorePolicy
from dms_train.kernels import dispatch
from tests.support import policy_cases as cases
from tests.support.policy_cases import GROUP, HEADS, SIZE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODULE = '''
"""Keep tokens with large values that the newest queries attend."""

from dms_train.inference.policies.base import PolicyKind
from dms_train.inference.policies.score_policy import ScoreOptions, ScorePolicy


class AttendedValuesPolicy(ScorePolicy):
    """Score a token by the norm of its value times the attention of the last two queries."""

    recent_queries = 2
    protected = 1

    def score(self, keys, values, attention):
        """[b, h, s]; the highest scores stay."""
        return attention.mean(2) * values.norm(dim=-1)


POLICY = PolicyKind(ScoreOptions, lambda options, spec: AttendedValuesPolicy(options))
'''


@pytest.fixture
def other_distribution(tmp_path, monkeypatch):
    """Install the policy `attended_values` as another distribution would."""
    info = tmp_path / "attended-1.0.dist-info"
    info.mkdir()
    (tmp_path / "attended_values.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attended\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[dms_train.policies]\nattended_values = attended_values:POLICY\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    registry._entry_points.cache_clear()
    yield
    registry._entry_points.cache_clear()


class BruteForce:
    """One row, token by token, in float64; evicts at the ends that the options name."""

    def __init__(self, passes, row, request, budget, interval=None, block=None, decode_only=False):
        self.query, self.key, self.value = (
            x[row].double() for x in (passes.query, passes.key, passes.value)
        )
        self.prompt, self.budget = request.prompt, budget
        self.interval, self.block, self.decode_only = interval, block, decode_only
        self.held = [[] for _ in range(HEADS)]

    def weights(self, t, head, member, places):
        scores = self.key[places, head, 0] @ self.query[t, head, member] / math.sqrt(SIZE)
        return scores.softmax(0)

    def token(self, t):
        """Output [HEADS * GROUP, SIZE], reads and what is held afterwards."""
        output = []
        for head in range(HEADS):
            self.held[head].append(t)
            for member in range(GROUP):
                weights = self.weights(t, head, member, self.held[head])
                output.append(weights @ self.value[self.held[head], head, 0])
        reads = [len(held) for held in self.held]
        if self.due(t + 1):
            self.held = [self.left(t, head) for head in range(HEADS)]
        return torch.stack(output), reads, [list(held) for held in self.held]

    def due(self, end):
        if end < self.prompt:
            return self.block is not None and end % self.block == 0
        if end == self.prompt:
            return not self.decode_only
        return self.interval is not None and (end - self.prompt) % self.interval == 0

    def left(self, t, head):
        held, seen = self.held[head], dict.fromkeys(self.held[head], 0.0)
        queries = [q for q in (t - 1, t) if q >= 0]
        for query in queries:
            places = [j for j in held if j <= query]
            for member in range(GROUP):
                weights = self.weights(query, head, member, places)
                for place, weight in zip(places, weights.tolist(), strict=True):
                    seen[place] += weight / len(queries) / GROUP
        score = {j: seen[j] * self.value[j, head, 0].norm().item() for j in held}
        score[t] = math.inf
        best = sorted(held, key=lambda j: (-score[j], j))[: self.budget]
        return sorted(best)


WAYS = {
    "prompt": {"budget": 5},
    "interval": {"budget": 4, "interval": 3},
    "block": {"budget": 3, "block": 4},
    "block of two passes": {"budget": 3, "block": 6},
    "decode_only": {"budget": 6, "interval": 2, "decode_only": True},
    "all": {"budget": 4, "interval": 1, "block": 3},
}


@pytest.mark.usefixtures("other_distribution")
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("own", WAYS.values(), ids=WAYS)
def test_equals_brute_force(own, kernels):
    """Two rows with unequal prompts, in chunks of four tokens, then token by token."""
    if kernels and not dispatch.is_supported(DEVICE):
        pytest.skip("needs triton's interpreter")
    policy = build_policy("attended_values", own, None)
    device = DEVICE if kernels else torch.device("cpu")
    passes = cases.Passes(
        cases.paged(policy, device) if kernels else cases.readable(policy), device
    )
    requests = [RequestSizes(11, 20, 0), RequestSizes(6, 14, 0)]
    for row, request in enumerate(requests):
        passes.assign(row, request)
    passes.go({0: 20, 1: 14})
    loops = [BruteForce(passes, row, request, **own) for row, request in enumerate(requests)]
    evicted = 0
    for output, (row, done, reads, live, held) in passes.seen:
        tokens = range(done - output.shape[1], done)
        expected, counts, after = zip(*(loops[row].token(t) for t in tokens), strict=True)
        torch.testing.assert_close(output.double(), torch.stack(expected, 1), rtol=1e-4, atol=1e-4)
        assert reads == torch.tensor(counts).sum(0).tolist()
        assert held == after[-1]
        assert live == [len(head) for head in held]
        evicted += live[0] < reads[0]
    assert evicted


@pytest.mark.parametrize("empty", [0, 5])
def test_a_query_older_than_all_tokens_left_gives_nothing(empty):
    """Queries 2, 3 and 4, of which tokens 3 and 4 are left; empty slots do not matter."""
    draw = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, n, SIZE, generator=draw) for n in (3, 2))
    slots = Slots(
        layer=0,
        position=torch.tensor([[[3, 4, *[-1] * empty]]]),
        state=torch.zeros(1, 1, 2 + empty, 0),
        key=torch.cat([key, torch.zeros(1, 1, empty, SIZE)], 2),
    )
    start, end, prompt, limit, seed = torch.tensor([[4], [5], [2], [9], [0]])
    sequences = Sequences(1, start, end, prompt, limit, seed, {}, query[:, :, :, None])
    found = window_attention(slots, sequences)[0, 0, 0, :2]
    both = (key[0, 0] @ query[0, 0, 2] / math.sqrt(SIZE)).softmax(0)
    torch.testing.assert_close(found, (torch.tensor([1.0, 0.0]) + both) / 3)


def test_options_that_exclude_each_other_are_refused():
    for own, message in (
        ({"budget": 4, "decode_only": True}, "evicts nothing without interval"),
        ({"budget": 4, "decode_only": True, "interval": 2, "block": 4}, "drop block=4"),
    ):
        with pytest.raises(InferenceError, match=message):
            build_policy("knorm", own, None)


def test_prompts_are_shared_only_if_nothing_is_evicted_before_their_end() -> None:
    class Early(ScorePolicy):
        def evicts_after(self, sequences: Sequences) -> torch.Tensor:
            return sequences.end > 16

    class Unasked(ScorePolicy):
        def evict_mask(self, slots: Slots, at: torch.Tensor) -> torch.Tensor:
            return slots.position[:, :, None] < at[:, None, :, None] - 16

    class Narrow(ScorePolicy):
        def select(self, slots: Slots, query: torch.Tensor) -> torch.Tensor:
            return slots.position[:, :, None].expand(*query.shape[:3], -1) % 2 == 0

    class Private(ScorePolicy):
        shareable_prompts = False

    request = RequestSizes(prompt=20, limit=40, seed=0)
    assert ScorePolicy(ScoreOptions(cr=2)).shareable_prompts
    assert ScorePolicy(ScoreOptions(cr=2)).max_tokens(request, 20) is None
    assert not ScorePolicy(ScoreOptions(cr=2, block=4)).shareable_prompts
    for kind in (Early, Unasked, Narrow, Private):
        assert not kind(ScoreOptions(cr=2)).shareable_prompts
    for kind in (Early, Unasked, Narrow):
        assert kind(ScoreOptions(cr=2)).max_tokens(request, 20) == 1
