"""Log-probabilities of given tokens equal those of a float64 model that masks evicted tokens."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dms_train.inference import scoring
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.llm import LLM
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.token_scores import HostScores, token_scores
from dms_train.kernels import dispatch
from tests.unit.hf import conftest as hf
from tests.unit.inference.conftest import (
    random_ids,
    small_spec,
    tiny_architecture,
    varied_weights,
)
from tests.unit.inference.test_prefix_cache import computed, leaks

SIZES = {"page_slots": 4, "slab_pages": 8, "prefill_chunk": 16}
DMS = small_spec("dms")
NEEDS_TRITON = pytest.mark.skipif(
    not dispatch.is_supported(torch.device("cpu")), reason="needs triton's interpreter"
)
PROMPT_ONLY = SamplingParams(max_tokens=0, prompt_logprobs=1)
REGULAR = {"budget": 9, "window": 4, "interval": 5}
CHOICES = [random_ids(n, seed=90 + n) for n in (1, 7, 3, 20)]


def exact(ids: list[int], family: str = "llama") -> torch.Tensor:
    """Return the log-probabilities at every token, [T, vocab], by a float64 loop over heads."""
    a = tiny_architecture(family)
    logits, decisions = hf._forward(varied_weights(a, 0), a, DMS, torch.tensor(ids))
    assert (decisions > 0).any() or len(ids) < 2
    return logits.log_softmax(-1)


def assert_scores(found, ids: list[int], first: int) -> None:
    """Check that scores from position `first` on are those of the exact model."""
    wanted = exact(ids)[first - 1 : -1]
    assert len(found.logprobs) == len(found.greedy) == len(ids) - first
    exactly = [row[token].item() for row, token in zip(wanted, ids[first:], strict=True)]
    assert found.logprobs == pytest.approx(exactly, abs=1e-4)
    assert found.greedy == [
        t == best for t, best in zip(ids[first:], wanted.argmax(-1), strict=True)
    ]


def assert_entries(found, ids: list[int], first: int) -> None:
    """Check that entries from position `first` on are those of the exact model."""
    wanted = exact(ids)
    assert len(found) == len(ids) - first
    for position, entry in enumerate(found, first):
        row = wanted[position - 1]
        assert entry.logprob == pytest.approx(row[ids[position]].item(), abs=1e-4)
        ((token, value),) = entry.top.items()
        assert token == int(row.argmax())
        assert value == pytest.approx(row.max().item(), abs=1e-4)


def run(engine: InferenceEngine) -> dict[str, object]:
    found = {}
    while engine.has_unfinished_requests():
        found |= {o.request_id: o for o in engine.step() if o.finished}
    return found


def score(engine: InferenceEngine, prompt: list[int], continuations: list[list[int]]):
    request = engine.add_scoring(prompt, continuations)
    return run(engine)[request]


@pytest.mark.parametrize("length", [1, 2, 16, 17, 60])
def test_prompt_logprobs(folder, length):
    llm, ids = LLM(folder("llama", DMS), **SIZES), random_ids(length)
    output = llm.generate(ids, PROMPT_ONLY)[0]
    assert output.prompt_logprobs[0] is None
    assert_entries(output.prompt_logprobs[1:], ids, 1)
    (done,) = output.outputs
    assert (done.token_ids, done.finish_reason, done.logprobs) == ([], "length", None)
    # nothing follows the last token, so that it is not computed
    assert (llm.kv.tokens, llm.kv.kv_reads) == (max(1, length - 1), 0)


@pytest.mark.parametrize("chunk", [1, 16, 512])
def test_continuations_share_a_prompt_that_is_computed_once(folder, chunk):
    engine = InferenceEngine(
        folder("llama", DMS), EngineOptions(**{**SIZES, "prefill_chunk": chunk})
    )
    counts, prompt = computed(engine), random_ids(45)
    output = score(engine, prompt, CHOICES)
    for done, choice in zip(output.outputs, CHOICES, strict=True):
        assert (done.token_ids, done.finish_reason) == (choice, "length")
        assert_scores(done.scores, prompt + choice, len(prompt))
    assert sum(counts) == len(prompt) - 1 + sum(map(len, CHOICES))
    assert engine.kv.kv_reads == 0
    assert (engine.free_batch_slots, leaks(engine)) == (engine.options.max_num_seqs, 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache": "dense"},
        {"policy": "window", "policy_options": {"window": 5}},
        {"policy": "h2o", "policy_options": {"budget": 9}},
        {"policy": "snapkv", "policy_options": {"budget": 9, "window": 4}},
        {"policy": "r_kv", "policy_options": REGULAR},
        {"policy": "keep_all"},
        pytest.param({"kernels": "triton"}, marks=NEEDS_TRITON),
        pytest.param(
            {"kernels": "triton", "policy": "r_kv", "policy_options": REGULAR}, marks=NEEDS_TRITON
        ),
    ],
    ids=str,
)
def test_scores_of_generated_tokens_are_those_of_generating_them(folder, options):
    llm, prompt = LLM(folder("llama", DMS), **options, **SIZES), random_ids(20)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, logprobs=1, ignore_eos=True)
    (made,) = llm.generate(prompt, greedy)[0].outputs
    other = [*made.token_ids[:5], (made.token_ids[5] + 1) % 61]
    scored, wrong = score(llm.engine, prompt, [made.token_ids, other]).outputs
    theirs = [entry.logprob for entry in made.logprobs]
    assert scored.scores.logprobs == pytest.approx(theirs, abs=1e-4)
    assert scored.scores.greedy == [True] * 12
    assert wrong.scores.greedy == [True] * 5 + [False]
    assert wrong.scores.logprobs[5] < theirs[5]
    assert (scored.logprobs, made.scores) == (None, None)


@pytest.mark.parametrize(
    ("policy", "options", "passes"),
    [
        ("snapkv", {"budget": 9, "window": 4}, [16, 4, 11]),
        ("r_kv", REGULAR, [16, 4, 5, 5, 1]),
        ("h2o", {"budget": 9, "prefill": "dense"}, [16, 4, *[1] * 11]),
    ],
)
def test_given_tokens_are_computed_together_up_to_the_next_eviction(
    folder, policy, options, passes
):
    options = EngineOptions(policy=policy, policy_options=options, **SIZES)
    engine = InferenceEngine(folder("llama", DMS), options)
    counts = computed(engine)
    score(engine, random_ids(20), [random_ids(12, seed=1)])
    assert counts == passes


def test_prompt_logprobs_change_no_generated_token(folder):
    llm, prompt = LLM(folder("llama", DMS), **SIZES), random_ids(40)
    plain = SamplingParams(max_tokens=6, n=2, seed=3, ignore_eos=True)
    asked = SamplingParams(max_tokens=6, n=2, seed=3, ignore_eos=True, prompt_logprobs=1)
    expected, output = llm.generate(prompt, plain)[0], llm.generate(prompt, asked)[0]
    assert output.outputs == expected.outputs
    assert expected.prompt_logprobs is None
    assert_entries(output.prompt_logprobs[1:], prompt, 1)


@pytest.mark.parametrize("shared", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_small_pool_changes_no_score(folder, shared):
    sizes = {**SIZES, "prefill_chunk": 4, "cache_bytes": 40_000, "max_num_seqs": 12}
    options = EngineOptions(enable_prefix_caching=shared, **sizes)
    engine = InferenceEngine(folder("llama", DMS), options)
    for seed in range(3):  # their growth takes the pages of later scored requests
        growing = SamplingParams(max_tokens=60, seed=seed, ignore_eos=True)
        engine.add_request(random_ids(10, seed=seed), growing)
    prompts = [random_ids(30 + 4 * i, seed=i) for i in range(4)]
    asked = {engine.add_scoring(prompt, CHOICES): prompt for prompt in prompts}
    echoed = {engine.add_request(prompt, PROMPT_ONLY): prompt for prompt in prompts}
    found = run(engine)
    assert engine.preemptions > 0
    for request, prompt in asked.items():
        for done, choice in zip(found[request].outputs, CHOICES, strict=True):
            assert_scores(done.scores, prompt + choice, len(prompt))
    for request, prompt in echoed.items():
        assert_entries(found[request].prompt_logprobs[1:], prompt, 1)
    assert leaks(engine) == 0


def test_snapshots_of_prompts_that_begin_alike_give_the_same_scores(folder):
    engine = InferenceEngine(
        folder("llama", DMS), EngineOptions(max_num_seqs=4, enable_prefix_caching=True, **SIZES)
    )
    examples = random_ids(50, seed=7)
    prompts = [examples + random_ids(10 + i, seed=20 + i) for i in range(6)]
    for number, prompt in enumerate(prompts):
        output = score(engine, prompt, CHOICES)
        held = [done.kv.cached_tokens for done in output.outputs]
        assert held == [50 if number > 1 else 0, *[len(prompt) - 1] * 3]
        for done, choice in zip(output.outputs, CHOICES, strict=True):
            assert_scores(done.scores, prompt + choice, len(prompt))
    asked = {engine.add_scoring(prompt, CHOICES): prompt for prompt in prompts * 3}
    for request, output in run(
        engine
    ).items():  # snapshots at the ends of prompts do not displace it
        held = [done.kv.cached_tokens for done in output.outputs]
        assert held[0] >= 50
        assert held[1:] == [len(asked[request]) - 1] * 3
    # a snapshot has no logits, so that a prompt whose own are wanted starts from its first token
    request = engine.add_request(prompts[0], PROMPT_ONLY)
    output = run(engine)[request]
    assert output.outputs[0].kv.cached_tokens == 0
    assert_entries(output.prompt_logprobs[1:], prompts[0], 1)


class Waits(TorchDispatchMode):
    """Counter of operations for which a host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        waits = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "repeat_interleave")
        name = function.name().removeprefix("aten::").partition(".")[0]
        by_mask = name.startswith("index") and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool
            for x in (args[1] if isinstance(args[1], list | tuple) else ())
        )
        self.count += name in waits or by_mask
        return function(*args, **(kwargs or {}))


@NEEDS_TRITON
def test_further_continuations_cost_no_wait_of_the_host(folder, monkeypatch):
    counts, to_list, read = [], torch.Tensor.tolist, []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: [read.append(1), to_list(x)][1])
    for several in (2, 6):
        engine = InferenceEngine(folder("llama", DMS), EngineOptions(kernels="triton", **SIZES))
        prompt, choices = random_ids(12), [random_ids(3, seed=i) for i in range(several)]
        read.clear()
        with Waits() as waits:
            score(engine, prompt, choices)
        counts.append((waits.count, len(read)))
    assert counts[0] == counts[1]


@NEEDS_TRITON
def test_continuations_change_no_page_of_each_other(folder):
    """Each copies the shared pages that it changes, also in the cache of the kernels."""
    engine = InferenceEngine(folder("llama", DMS), EngineOptions(kernels="triton", **SIZES))
    prompt = random_ids(29)
    output = score(engine, prompt, CHOICES)
    for done, choice in zip(output.outputs, CHOICES, strict=True):
        assert_scores(done.scores, prompt + choice, len(prompt))
    assert leaks(engine) == 0


@pytest.mark.parametrize(
    ("common", "expected"),
    [
        # three of five wait for the second one, which stops after 40 tokens
        (40, [2 * 16, 2 * 16, 16 + 8, 2 + 4 * 10 + 5 * 2]),
        # what they have in common is less than half, and they wait for nothing
        (20, [5 * 16, 4 * 16 + 4, 5 * 16, 4 * 4 + 16]),
    ],
)
def test_of_prompts_that_come_together_one_takes_the_snapshot(
    folder, monkeypatch, common, expected
):
    options = EngineOptions(max_num_seqs=8, enable_prefix_caching=True, **SIZES)
    engine = InferenceEngine(folder("llama", DMS), options)
    examples, counts, taken = random_ids(common, seed=7), computed(engine), []
    take = engine._runner.cache.snapshot
    monkeypatch.setattr(
        engine._runner.cache, "snapshot", lambda *given: taken.append(given) or take(*given)
    )
    prompts = [[*examples, i, *random_ids(49 - common, seed=20 + i)] for i in range(5)]
    asked = {engine.add_scoring(prompt, [CHOICES[2]]): prompt for prompt in prompts}
    for request, output in run(engine).items():
        (done,) = output.outputs
        assert_scores(done.scores, asked[request] + CHOICES[2], len(asked[request]))
    assert len(taken) == 1
    assert counts == expected
    later = score(engine, examples + random_ids(9, seed=1), [CHOICES[2]])
    assert later.outputs[0].kv.cached_tokens == common


def test_a_prompt_does_not_wait_for_one_that_may_not_run(folder):
    options = EngineOptions(max_num_seqs=8, enable_prefix_caching=True, **SIZES)
    engine = InferenceEngine(folder("llama", DMS), options)
    prompts = [[*random_ids(40, seed=7), i, *random_ids(9, seed=20 + i)] for i in range(3)]
    params = SamplingParams(max_tokens=6, temperature=0.0)
    first, second, third = (engine.add_request(prompt, params) for prompt in prompts)
    engine.step()  # the first two have rows, and the third one waits
    waiting = engine._requests[third].sequences[0]
    assert waiting.batch_slot is None
    while engine.has_request(third):
        engine.step([third])
    assert engine._requests[second].sequences[0].num_computed_tokens == 16
    assert {first, second} == set(run(engine))


def test_the_longest_text_that_can_be_scored(folder):
    llm, ids = LLM(folder("llama", DMS), max_model_len=40, **SIZES), random_ids(41)
    assert_entries(llm.generate(ids, PROMPT_ONLY)[0].prompt_logprobs[1:], ids, 1)
    (done,) = score(llm.engine, ids[:3], [ids[3:]]).outputs
    assert_scores(done.scores, ids, 3)
    with pytest.raises(InferenceError, match="the model takes 40"):
        llm.generate(random_ids(42), PROMPT_ONLY)
    with pytest.raises(InferenceError, match="the model takes 40"):
        llm.engine.add_scoring(ids[:4], [ids[3:]])


def test_logits_are_computed_for_a_block_of_the_wanted_tokens_at_a_time(folder, monkeypatch):
    monkeypatch.setattr(scoring, "_BLOCK_LOGITS", 3 * 61)
    engine = InferenceEngine(folder("llama", DMS), EngineOptions(**SIZES))
    head, rows = engine._runner.model.decoder.lm_head, []
    head.register_forward_hook(lambda _module, inputs, _output: rows.append(len(inputs[0])))
    prompt, choice = random_ids(50), random_ids(10, seed=1)
    (done,) = score(engine, prompt, [choice]).outputs
    assert_scores(done.scores, prompt + choice, len(prompt))
    assert max(rows) == 3
    assert sum(rows) == len(choice)


def test_the_first_of_equal_logits_is_the_one_that_greedy_decoding_takes():
    logits = torch.zeros(1, 512)
    logits[:, 170:] = 1.0
    for token in (0, 170, 511):
        found = token_scores(logits, torch.tensor([token]), 2)
        (entry,) = HostScores.of(found).entries([2])
        assert next(iter(entry.top)) == 170 == int(logits.argmax())
        assert len(entry.top) == 2
        assert entry.logprob == pytest.approx(logits.log_softmax(-1)[0, token].item(), abs=1e-6)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda engine: engine.add_scoring([1, 2], []), "a continuation is empty"),
        (lambda engine: engine.add_scoring([1, 2], [[3], []]), "a continuation is empty"),
        (lambda engine: engine.add_scoring([], [[3]]), "a prompt is empty"),
        (lambda engine: engine.add_scoring([1], [[3, 61]]), "continuations: token=61"),
        (lambda engine: SamplingParams(max_tokens=0, n=2), "n=2"),
        (lambda engine: SamplingParams(prompt_logprobs=-1), "prompt_logprobs=-1"),
        (
            lambda engine: engine.add_turn(engine.open_conversation(), [1], PROMPT_ONLY),
            "prompt_logprobs: not in a conversation",
        ),
    ],
)
def test_refusals(folder, call, named):
    engine = InferenceEngine(folder("llama", DMS), EngineOptions(**SIZES))
    with pytest.raises(InferenceError, match=named):
        call(engine)
    assert not engine.has_unfinished_requests()


def test_a_turn_without_an_answer_continues_the_conversation(folder):
    llm, first, second = LLM(folder("llama", DMS), **SIZES), random_ids(20), random_ids(9, seed=1)
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with llm.conversation() as chat:
        chat.say(first, SamplingParams(max_tokens=0))
        answer = chat.say(second, greedy).outputs[0].token_ids
    assert answer == llm.generate(first + second, greedy)[0].outputs[0].token_ids
