"""Hard-KV: calibrated top-p, votes, hidden tokens and merges, against loops over the rule."""

from __future__ import annotations

import pytest
import torch

from dms_train.inference.cache.compact import CompactCache
from dms_train.inference.cache.dense import DenseCache
from dms_train.inference.cache.policy_hooks import merged
from dms_train.inference.cache.pool import PagePool
from dms_train.inference.policies.base import CachePolicy, NewTokens, RequestSizes, Sequences, Slots
from dms_train.inference.policies.calibration import temperature, top_p
from dms_train.inference.policies.eviction import beyond_shared_budget
from dms_train.inference.policies.hard_kv import HardKVOptions, HardKVPolicy
from dms_train.inference.policies.registry import build_policy
from tests.unit.inference.policies.rules import (
    GROUP,
    HEADS,
    LENGTH,
    SCALE,
    compact,
    dense,
    run,
    text,
)
from tests.unit.inference.policies.test_rules import RKV

REAL = torch.ones(1, 1).bool()


def test_tokens_for_a_threshold():
    """Probabilities .5, .25, .15, .1 and p = .75: two tokens of mass .75."""
    weights = torch.tensor([[0.15, 0.5, 0.1, 0.25]]).double()
    chosen, count, mass = top_p(weights.log(), 0.75)
    assert chosen.tolist() == [[False, True, False, True]]
    assert (count.item(), mass.item()) == (2, pytest.approx(0.75))


@pytest.mark.parametrize(
    ("scores", "tau"), [([8, 3, 1, 0], 5.0686), ([4, 3, 1, 0], 2.7307), (None, 1.0)]
)
def test_temperatures(scores, tau):
    """Without it 8, 3, 1, 0 take one token; raw logits need no temperature."""
    raw = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).double().log()
    shifted = raw if scores is None else torch.tensor([scores]).double()
    if scores == [8, 3, 1, 0]:
        assert top_p(shifted, 0.75)[1].item() == 1
        assert shifted.softmax(-1)[0, :2].sum().item() == pytest.approx(0.9988, abs=1e-4)
    found = temperature(raw, shifted, REAL, p=0.75, solver="binary")
    assert found.item() == pytest.approx(tau, abs=1e-4)
    assert top_p(shifted / found, 0.75)[1].item() == 2


def test_the_gradient_is_that_of_adam():
    """50 steps of torch's Adam on the mean squared error of the rows, masked ones apart."""
    draw = torch.Generator().manual_seed(0)
    raw, shifted = torch.randn(2, 3, 5, 20, generator=draw, dtype=torch.float64)
    shifted = 3 * shifted
    real = torch.tensor([False, True, True, True, True])[:, None]
    found = temperature(raw, shifted, real, p=0.8, solver="gradient")
    for one in range(3):
        tau = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        adam = torch.optim.Adam([tau], lr=0.01)
        _, count, mass = top_p(raw[one], 0.8)
        ranked = shifted[one].sort(-1, descending=True).values
        for _ in range(50):
            weights = (ranked / tau).softmax(-1)
            top = torch.stack([w[: int(n)].sum() for w, n in zip(weights, count, strict=True)])
            error = (top - mass[:, 0])[1:]
            if error.abs().max() <= 1e-2:
                break
            adam.zero_grad()
            error.square().mean().backward()
            adam.step()
        assert found[one].item() == pytest.approx(tau.item(), abs=1e-6)
        assert found[one].item() != 0.5


def test_order_does_not_change_with_the_temperature():
    shifted = torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    for tau in (0.1, 1.0, 7.0):
        assert torch.equal(
            (shifted / tau).topk(9).indices.sort().values, shifted.topk(9).indices.sort().values
        )


class HardKV(RKV):
    """Python loops in float64, with the temperature by bisection."""

    def __init__(self, data, row, request, **options):
        super().__init__(data, row, request, **options)
        self.hidden, self.tau = [set() for _ in range(HEADS)], [None] * HEADS

    def visible(self, t, head):
        g = head // GROUP
        hidden = self.hidden[g] if t >= self.request.prompt else set()
        return sorted(self.held[g] - hidden)

    def evict(self, t):
        o, prompt = self.options, self.request.prompt
        if t + 1 < prompt or (t + 1 - prompt) % o["interval"]:
            return
        layout = o.get("layout", "ha")
        sizes = [len(held) for held in self.held]
        if layout == "hs":
            sizes = [sum(sizes) / HEADS] * HEADS
        votes, forced = {}, {}
        for g in [g for g in range(HEADS) if sizes[g] >= self.budget]:
            window = min(o["window"], self.budget - o["sinks"])
            forced[g] = set(range(o["sinks"])) | set(range(t + 1 - window, t + 1))
            free = sorted(self.held[g] - forced[g])
            votes[g] = self.votes(g, t, free)
        if layout in ("la", "ls"):
            votes = {g: {j: sum(v[j] for v in votes.values()) for j in votes[g]} for g in votes}
        for g in votes:
            self.hidden[g] = {j for j, count in votes[g].items() if not count}
        self.fill(layout, votes, forced)
        for g in votes:
            if sizes[g] + o["interval"] > 2 * self.budget:
                self.held[g] -= self.hidden[g]
                if layout in ("ha", "la"):
                    self.cut(g, votes[g], forced[g], self.budget)
                self.hidden[g] = set()

    def fill(self, layout, votes, forced):
        """With fixed budgets, the most voted tokens of a list, or of all lists, stay visible."""
        groups = {"ls": [[g] for g in votes], "hs": [list(votes)]}.get(layout, [])
        for group in groups:
            left = self.budget * len(group) - sum(len(forced[g] & self.held[g]) for g in group)
            ranked = sorted((-count, j, g) for g in group for j, count in votes[g].items())
            for g in group:
                self.hidden[g] = {j for _, j, own in ranked[left:] if own == g}

    def votes(self, g, t, free):
        p, votes = self.options["p"], dict.fromkeys(free, 0)
        if not free:
            return votes
        rows = []
        for query in range(max(0, t + 1 - self.options["window"]), t + 1):
            own = self.query[g * GROUP : (g + 1) * GROUP, query]
            raw = (own @ self.key[g, free].T * SCALE).amax(0)
            if free[0] > query:
                continue
            raw[[j > query for j in free]] = -torch.inf
            rows.append((raw, self.shifted(g, raw, free)))
        if self.tau[g] is None:
            self.tau[g] = self.solved(rows, p)
        for _, shifted in rows:
            for place in self.smallest_set((shifted / self.tau[g]).softmax(0).tolist(), p):
                votes[free[place]] += 1
        return votes

    def shifted(self, g, raw, free):
        if self.options["base"] == "snapkv":
            half = self.options["kernel"] // 2
            return torch.stack(
                [raw[max(0, i - half) : i + half + 1].max() for i in range(len(free))]
            )
        if self.options["base"] == "vanilla":
            return raw
        places = sorted(self.held[g])
        repeated = dict(zip(places, self.redundancy(g, places), strict=True))
        weight = self.options["importance"]
        cost = torch.tensor([repeated[j] for j in free], dtype=torch.float64)
        score = weight * raw.softmax(0) - (1 - weight) * cost
        score = score - score.min()
        return (score / score.sum()).clamp(min=1e-307).log()

    @staticmethod
    def smallest_set(weights, p):
        """Places of the largest weights until their sum reaches p; of equal ones the first."""
        chosen, total = [], 0.0
        for place in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
            if total >= p - 1e-6:
                break
            chosen.append(place)
            total += weights[place]
        return chosen

    def solved(self, rows, p):
        wanted, counts = 0.0, []
        for raw, _ in rows:
            weights = raw.softmax(0).tolist()
            counts.append(len(self.smallest_set(weights, p)))
            wanted += sum(sorted(weights, reverse=True)[: counts[-1]])
        low, high = 1e-3, 10.0
        for _ in range(60):
            tau = (low + high) / 2
            found = sum(
                float((s / tau).softmax(0).sort(descending=True).values[:n].sum())
                for (_, s), n in zip(rows, counts, strict=True)
            )
            low, high = (tau, high) if found > wanted else (low, tau)
        return low


REQUESTS = [RequestSizes(24, LENGTH, 0), RequestSizes(11, LENGTH + 8, 1), RequestSizes(40, 40, 2)]
OWN = {"window": 4, "sinks": 1, "interval": 3, "solver": "binary", "p": 0.8}
CASES = [
    {"budget": 16, "base": "vanilla", "p": 0.6},
    {"budget": 10, "base": "snapkv", "kernel": 3},
    {"budget": 10, "base": "vanilla", "window": 14},  # longer than a prompt
    {"budget": 12, "base": "r_kv", "importance": 0.3, "p": 0.5},
    {"budget": 12, "base": "vanilla", "layout": "hs"},
    {"budget": 12, "base": "vanilla", "layout": "la", "p": 0.5},
    {"budget": 12, "base": "snapkv", "kernel": 3, "layout": "ls"},
]


@pytest.mark.parametrize("build", [compact, dense])
@pytest.mark.parametrize("chunk", [40, 7])
@pytest.mark.parametrize("options", CASES, ids=lambda x: "-".join(map(str, x.values())))
def test_the_rule_is_kept_in_mixed_batches(build, chunk, options):
    data, options = text(len(REQUESTS)), OWN | options
    policy = build_policy("hard_kv", options, None)
    outputs, reads, kept = run(build(policy, len(REQUESTS)), data, REQUESTS, chunk=chunk)
    for row, request in enumerate(REQUESTS):
        rule = HardKV(data, row, request, **options)
        expected, read, after = rule.go()
        torch.testing.assert_close(outputs[row], expected)
        assert torch.equal(reads[row], read)
        for tokens, held in kept[row]:
            assert held == after[tokens - 1]
    assert min(len(held) for held in after[-1]) < 40


def selected(position, votes, budget):
    """Return the tokens that a policy with a full cache keeps, given their votes."""
    end = len(position)
    one = [torch.tensor([x]) for x in (end - 1, end, end, 99, 0)]
    state = torch.zeros(1, 1, end, 3)
    state[0, 0, :, 1] = torch.tensor(votes)
    policy = HardKVPolicy(HardKVOptions(budget=budget, window=1, sinks=0, upper=1.0))
    slots = Slots(0, torch.tensor(position)[None, None], state, sequences=Sequences(1, *one, {}))
    evicted = policy.evict_mask(slots, one[1][None] - 1)[0, 0, 0]
    return {p for p, out in zip(position, evicted.tolist(), strict=True) if not out}


def test_most_votes_stay_and_of_equal_ones_the_first():
    """Rows {0, 2}, {2, 3} and {2}: votes 3, 1 and 1 for 2, 0 and 3; a budget of two is {0, 2}."""
    rows = [{0, 2}, {2, 3}, {2}]
    votes = [float(sum(j in row for row in rows)) for j in range(5)]
    assert votes == [1, 0, 3, 1, 0]
    assert selected([0, 1, 2, 3, 4], votes, 3) == {0, 2, 4}  # 4 is the newest
    assert selected([4, 3, 2, 1, 0], votes[::-1], 3) == {0, 2, 4}
    assert selected([0, 1, 2, 3, 4], votes, 5) == {0, 2, 3, 4}  # no vote


@pytest.mark.parametrize(
    ("score", "position", "left"),
    [
        ([[2, 1, 0], [1, 0, 0]], [[0, 1, 2], [0, 1, 2]], [{0, 1}, {0, 1}]),  # four: 2, 1, 1, and 1
        ([[5, 4, 3], [2, 1, 0]], [[0, 1, 2], [0, 1, 2]], [{0, 1, 2}, {0}]),
        ([[9, 1, 1], [9, 1, 9]], [[0, 3, 5], [0, 2, 4]], [{0}, {0, 2, 4}]),  # 2 before 3
        ([[9, 1, 1], [9, 1, 9]], [[5, 3, 0], [0, 3, 4]], [{5, 0}, {0, 4}]),
        ([[7, 1, 1], [7, 1, 7]], [[0, 3, -1], [0, 3, 4]], [{0, 3}, {0, 4}]),  # the lower head
    ],
)
def test_heads_that_share_their_budgets_of_two(score, position, left):
    """The zero at position 1 of the second head wins over those at position 2."""
    score, position = torch.tensor(score)[None].float(), torch.tensor(position)[None]
    beyond = beyond_shared_budget(score, position, torch.tensor([2]))[0]
    found = [
        {p for p, out in zip(*row, strict=True) if p >= 0 and not out}
        for row in zip(position[0].tolist(), beyond.tolist(), strict=True)
    ]
    assert found == left


class FirstOfEachHead(CachePolicy):
    """Leaves 3, 5 and 8 tokens to three heads when the ninth arrives."""

    def evict_mask(self, slots, at):
        count = torch.tensor([3, 5, 8])[:, None, None]
        late = (at[:, None, :, None] >= 8) & (slots.position[:, :, None] < 8)
        return late & (slots.position[:, :, None] >= count)


def test_tokens_that_are_masked_padded_or_packed_give_the_same_attention():
    """16 slots where every list has its own, 24 where they are padded, of which 0.667 are used."""
    draw, heads, size = torch.Generator().manual_seed(0), 3, 4
    query, key, value = torch.randn(3, 1, heads, 9, size, generator=draw, dtype=torch.float64)
    outputs, held = [], []
    like, cpu = torch.zeros(0, size, dtype=torch.float64), torch.device("cpu")
    pool = PagePool(head_size=size, state_width=0, dtype=torch.float64, device=cpu, page_slots=1)
    sizes = {"layers": 1, "rows": 1, "heads": heads}
    policy, row = FirstOfEachHead(), torch.tensor([0])
    for cache in (CompactCache(pool, policy, **sizes), DenseCache(policy, like=like, **sizes)):
        cache.assign(0, RequestSizes(8, 9, 0))
        for part in (slice(0, 8), slice(8, 9)):
            position = torch.arange(9)[None, part]
            arrival = NewTokens(position, key[:, :, part], value[:, :, part], None)
            found = cache.attend(0, row, query[:, :, part], arrival)
        outputs.append(found.output)
        held.append(cache.live(row)[0, 0] - 1)  # without the ninth
    assert [x.tolist() for x in held] == [[3, 5, 8]] * 2
    padded = torch.zeros(2, heads, 9, size, dtype=torch.float64)
    behind = torch.zeros(heads, 1, 9, dtype=torch.bool)
    for head, count in enumerate(held[0].tolist()):
        kept = [*range(count), 8]
        padded[:, head, : len(kept)] = torch.stack([key[0, head, kept], value[0, head, kept]])
        behind[head, 0, len(kept) :] = True
    logits = query[0, :, 8:] @ padded[0].transpose(-1, -2) / size**0.5
    expected = logits.masked_fill(behind, -torch.inf).softmax(-1) @ padded[1]
    for output in outputs:
        torch.testing.assert_close(output[0], expected)
    assert int(held[0].sum()) == 16
    assert heads * int(held[0].max()) == 24
    assert float(held[0].double().mean() / held[0].max()) == pytest.approx(0.667, abs=1e-3)


@pytest.mark.parametrize(("start", "read"), [(5, [True] * 3), (6, [True, False, True])])
def test_hidden_tokens_are_read_inside_a_prompt(start, read):
    """The second turn of a conversation, whose prompt has six tokens in all."""
    one = [torch.tensor([x]) for x in (start, start + 1, 6, 99, 0)]
    state = torch.tensor([0.0, 1, 0]).view(1, 1, 3, 1).expand(-1, -1, -1, 3)
    slots = Slots(0, torch.arange(3)[None, None], state, sequences=Sequences(1, *one, {}))
    policy = build_policy("hard_kv", {"budget": 4}, None)
    assert policy.select(slots, torch.zeros(1, 1, 2, 4)).tolist() == [[[read, read]]]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("fixed_budget", [1.0, (0.4 * 2 + 0.1 * 8) / 0.5, (0.3 * 4 + 0.2 * 16) / 0.5, 32.0]),
        ("multi_to_one", [1.0, (0.4 * 2 + 0.1 * 8 + 0.2 * 16) / 0.7, 4.0, 32.0]),
    ],
)
def test_what_leaves_is_merged_by_its_attention(how, expected):
    """The weakest goes to the strongest; tokens that always stay have no attention here."""
    attention = torch.tensor([0, 0.4, 0.3, 0.1, 0.2, 0]).double()
    value = torch.tensor([1.0, 2, 4, 8, 16, 32]).double()[None, None, :, None]
    state = torch.zeros(1, 1, 6, 3, dtype=torch.float64)
    state[0, 0, :, 2] = attention
    slots = Slots(0, torch.arange(6)[None, None], state, value, value)
    evicted = torch.tensor([[[False, False, False, True, True, False]]])
    policy = build_policy("hard_kv", {"budget": 4, "merge": how}, None)
    found = merged(slots, policy.merge(slots, evicted))[0]
    assert found.key.flatten()[[0, 1, 2, 5]].tolist() == pytest.approx(expected)
    assert torch.equal(found.key, found.value)
