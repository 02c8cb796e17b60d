"""Costs of chains against the worked examples, loops, and runs with the smaller budget."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from dms_train.evaluation.scaling.budgets import Budget
from dms_train.evaluation.scaling.chains import PromptedDocument, generate
from dms_train.evaluation.scaling.costs import joint_peaks, peak_within, reads_within
from dms_train.evaluation.scaling.voting import ChainScore, pass_at_k, score
from dms_train.evaluation.tasks.base import Aggregate, Document
from dms_train.inference.accounting import KVTrace
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.kernels import dispatch
from dms_train.method.visibility import visible
from tests.unit.hf.conftest import load
from tests.unit.inference.conftest import WINDOW, folder, oracle, random_ids, small_spec

__all__ = ["folder", "load", "oracle"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ENGINES = [
    ({"kernels": "reference"}, 40),
    pytest.param(
        {"kernels": "triton", "decode_steps": 3, "device": DEVICE.type},
        WINDOW + 4,
        marks=pytest.mark.skipif(
            not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
        ),
    ),
]


def engine(directory, **options) -> InferenceEngine:
    return InferenceEngine(directory, EngineOptions(max_num_seqs=8, slab_pages=8, **options))


def chains(directory, prompt, n, tokens, *, temperature=1.0, rows=8, **options):
    asked = PromptedDocument(
        document=Document(id="0", question="q", gold=("a",)),
        prompt=prompt,
        params=SamplingParams(n=n, max_tokens=tokens, temperature=temperature, seed=3),
    )
    (found,) = generate(engine(directory, **options), [asked], rows)
    return found


def test_a_chain_without_tokens_costs_nothing() -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    nothing = KVTrace(kv_reads=empty, live_tokens=empty)
    assert reads_within(nothing, 5) == peak_within(nothing, 5) == 0
    assert joint_peaks([nothing, nothing], [3, 5], window=2)[1][1].separate == 0


def test_the_worked_example_of_a_model_without_compression(folder):
    """Four tokens of prompt, three generated: passes at positions 4 and 5 attend to 5 and 6."""
    found = chains(folder("llama", None), [5, 6, 7, 8], 1, 3, temperature=0.0)
    (chain,) = found.chains
    assert found.prompt_tokens == 4
    assert len(chain.token_ids) == 3
    assert chain.kv.trace.kv_reads.tolist() == [0.0, 5.0, 11.0]
    assert chain.kv.trace.live_tokens.tolist() == [4.0, 5.0, 6.0]
    assert [reads_within(chain.kv.trace, n) for n in (0, 2, 3, 9)] == [0.0, 5.0, 11.0, 11.0]
    assert [peak_within(chain.kv.trace, n) for n in (1, 9)] == [4.0, 6.0]
    assert joint_peaks([chain.kv.trace], [3], 0)[0][0].separate == 6.0
    assert chain.kv.prefill_reads == 10.0


def test_the_worked_example_of_eviction():
    """T = 10, w = 3, shift 1, tokens 0, 1, 2 and 4 evicted, as pure decoding."""
    spec = small_spec("dms").override(window=3)
    decisions = torch.zeros(1, 1, 10, dtype=torch.bool)
    decisions[..., [1, 2, 3, 5]] = True
    counts = visible(decisions, spec).sum(-1)[0, 0].double()
    trace = KVTrace(kv_reads=counts.cumsum(0), live_tokens=counts)
    assert reads_within(trace, 10) == 38.0
    assert joint_peaks([trace], [10], 3)[0][0].separate == 6.0


@pytest.mark.parametrize("spec", [None, small_spec("dms")], ids=["dense", "dms"])
def test_a_smaller_budget_costs_what_generating_it_costs(folder, spec):
    directory, prompt = folder("llama", spec), random_ids(20, seed=4)
    whole = chains(directory, prompt, 4, 40)
    traces = [chain.kv.trace for chain in whole.chains]
    limits = [1, 9, 17, 40]
    joint = joint_peaks(traces, limits, WINDOW)
    for width, (number, limit) in itertools.product((1, 3), enumerate(limits)):
        again = chains(directory, prompt, width, limit)
        for large, small in zip(whole.chains, again.chains, strict=False):
            assert small.token_ids == large.token_ids[:limit]
            assert reads_within(large.kv.trace, limit) == small.kv.kv_reads
        shorter = joint_peaks([c.kv.trace for c in again.chains], [limit], WINDOW)[-1][0]
        assert joint[width - 1][number].separate == pytest.approx(shorter.separate)
        assert joint[width - 1][number].shared == pytest.approx(shorter.shared)


@pytest.mark.parametrize(("how", "tokens"), ENGINES, ids=["torch", "groups"])
def test_traces_equal_the_masked_model(folder, oracle, how, tokens):
    spec = small_spec("dms")
    directory, prompt = folder("llama", spec), random_ids(20, seed=4)
    (chain,) = chains(directory, prompt, 1, tokens, **how).chains
    computed = prompt + chain.token_ids[:-1]
    seen = visible(oracle(directory, computed)[1], spec)
    counts = seen.sum(-1).double().mean((0, 1))
    assert chain.kv.trace.live_tokens.tolist() == pytest.approx(counts[19:].tolist())
    assert chain.kv.trace.kv_reads.tolist() == pytest.approx([0, *counts[20:].cumsum(0).tolist()])
    prompt_held = seen[..., :20].sum(-1).double().mean((0, 1))[19:]
    for step, held in enumerate(prompt_held.tolist()):  # what `shared` counts once
        settled = min(step, WINDOW + 1)
        assert chain.kv.trace.live_tokens[settled].item() - settled == pytest.approx(held)
    assert prompt_held[-1] < prompt_held[0]


def test_joint_peaks_equal_loops():
    rng = random.Random(0)
    for _ in range(50):
        window = rng.randint(0, 4)
        prompt, traces = rng.uniform(3, 9), []
        for _ in range(rng.randint(1, 5)):
            live = [prompt + step for step in range(rng.randint(1, 12))]
            for step in range(window + 2, len(live)):
                live[step] = live[step - 1] + rng.uniform(-1, 1)
            held = torch.tensor(live, dtype=torch.float64)
            traces.append(KVTrace(kv_reads=torch.zeros_like(held), live_tokens=held))
        for limit in (1, 5, 12):
            for width in range(1, len(traces) + 1):
                peak = shared = 0.0
                for step in range(limit):
                    kept = [t.live_tokens.tolist() for t in traces[:width]]
                    alive = [live[step] for live in kept if step < len(live)]
                    peak = max(peak, sum(alive))
                    if alive:
                        shared = max(shared, sum(alive) - (len(alive) - 1) * prompt)
                found = joint_peaks(traces, [limit], window)[width - 1][0]
                assert found.separate == pytest.approx(peak)
                assert found.shared == pytest.approx(shared)
                apart = joint_peaks(traces, [limit], None)[width - 1][0]
                assert apart.shared == apart.separate == found.separate


def test_chains_that_do_not_run_together_are_counted_together(folder):
    """Two rows of the cache for four chains: a schedule changes no number."""
    directory, prompt = folder("llama", small_spec("dms")), random_ids(20, seed=4)
    together = chains(directory, prompt, 4, 20)
    asked = together.prompted
    narrow = InferenceEngine(directory, EngineOptions(max_num_seqs=2, slab_pages=8))
    (apart,) = generate(narrow, [asked], 2)
    for one, other in zip(together.chains, apart.chains, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.equal(one.kv.trace.kv_reads, other.kv.trace.kv_reads)
        assert torch.equal(one.kv.trace.live_tokens, other.kv.trace.live_tokens)


def test_several_documents_run_at_the_same_time_and_each_is_returned_once(folder):
    directory = folder("llama", small_spec("dms"))
    asked = [
        PromptedDocument(
            document=Document(id=str(n), question="q", gold=("a",)),
            prompt=random_ids(5 + n, seed=n),
            params=SamplingParams(n=2, max_tokens=3 + n, temperature=1.0, seed=n),
        )
        for n in range(7)
    ]
    model = engine(directory)
    found = {g.prompted.document.id: g for g in generate(model, iter(asked), 8)}
    assert sorted(found) == [str(n) for n in range(7)]
    assert not model.has_unfinished_requests()
    for number, one in found.items():
        alone = chains_alone(directory, asked[int(number)])
        assert [c.token_ids for c in one.chains] == alone
        assert all(len(c.kv.trace.live_tokens) == 3 + int(number) for c in one.chains)
        assert all(c.seconds > 0 for c in one.chains)


def chains_alone(directory, asked) -> list[list[int]]:
    (found,) = generate(engine(directory), [asked], 8)
    return [chain.token_ids for chain in found.chains]


def test_budgets_are_written_as_in_the_paper():
    assert str(Budget(32, 1, 4.0)) == "32-1-4"
    assert str(Budget(0.75, 4, 2054 / 182)) == "0.75-4-11.3"
    assert Budget(0.25, 2, 1.0).max_tokens == 256


def scores(*answers: str | None, right: str = "a") -> list[ChainScore]:
    return [ChainScore((answer,), (answer == right,)) for answer in answers]


@pytest.mark.parametrize(
    ("answers", "vote", "any_", "mean"),
    [
        (["a"], 1, 1, 1),
        (["b", "a", "a"], 1, 1, 2 / 3),
        (["b", "a"], 0, 1, 1 / 2),  # a tie goes to the first answer
        (["a", "b"], 1, 1, 1 / 2),
        ([None, None, "a"], 1, 1, 1 / 3),  # no answer is no vote
        ([None, None], 0, 0, 0),
        (["b", "c", "b", "a"], 0, 1, 1 / 4),
        (["c", "b", "a", "a"], 1, 1, 1 / 2),
    ],
)
def test_scores_of_several_chains(answers, vote, any_, mean):
    found = [score(scores(*answers), how) for how in Aggregate]
    assert found == pytest.approx([vote, any_, mean])


def test_each_question_of_a_sheet_is_voted_on():
    rows = [("1", "9"), ("1", "2"), ("7", "2")]
    voters = [ChainScore(row, (row[0] == "1", row[1] == "2")) for row in rows]
    assert score(voters, Aggregate.VOTE) == 1.0
    assert score(voters, Aggregate.MEAN) == pytest.approx(4 / 6)
    assert score(voters[:1], Aggregate.VOTE) == 0.5


def test_pass_at_k_counts_all_draws():
    for n in range(1, 7):
        for right in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations(range(n), k))
                hits = sum(any(chain < right for chain in draw) for draw in draws)
                assert pass_at_k(n, right, k) == pytest.approx(hits / len(draws))
