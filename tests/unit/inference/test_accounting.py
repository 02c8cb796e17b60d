"""Compare every reported number with brute force over the visibility rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dms_train.inference.accounting import BurstCounts
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from dms_train.method import accounting
from dms_train.method.visibility import visible
from tests.unit.inference.conftest import WINDOW, random_ids, small_spec, tiny_architecture

PAGE = 4


def brute(decisions, spec, prompt, chunk):
    """Return the expected RequestKV from decisions [L, H, T] of the T computed tokens."""
    length = decisions.shape[-1]
    counts = visible(decisions, spec).sum(-1)  # [L, H, T]
    ends = [*range(chunk - 1, prompt - 1, chunk), prompt - 1, *range(prompt, length)]
    held = counts[..., ends].double()
    pages = -(-counts[..., ends] // PAGE) * PAGE
    mean = counts.double().mean((0, 1))
    return {
        "tokens": length,
        "kv_reads": mean[prompt:].sum().item(),
        "prefill_reads": mean[:prompt].sum().item(),
        "live_tokens": held[..., -1].mean().item(),
        "peak_live_tokens": held.mean((0, 1)).max().item(),
        "live_bytes": int(held[..., -1].sum()),
        "peak_live_bytes": int(held.sum((0, 1)).max()),
        "allocated_bytes": int(pages[..., -1].sum()),
        "peak_allocated_bytes": int(pages.sum((0, 1)).max()),
        "cr_factors": length / held[..., -1],
    }


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize(
    ("preset", "eviction"),
    [("dms", "delayed"), ("dms_nvidia", "immediate"), ("dms_fastdms", "delayed")],
)
def test_equals_brute_force(folder, oracle, preset, eviction, chunk):
    spec = small_spec(preset, eviction=eviction)
    directory = folder("llama", spec)
    prompts = [random_ids(n, seed=n) for n in (1, WINDOW, 30)]
    llm = LLM(directory, prefill_chunk=chunk, page_slots=PAGE, slab_pages=1)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=3 * WINDOW, temperature=0.0))
    a = tiny_architecture("llama")
    slot_bytes = 2 * a.kv_channels * 4 + 4 + 4  # float32 keys and values, position, mark
    for prompt, output in zip(prompts, outputs, strict=True):
        computed = prompt + output.outputs[0].token_ids[:-1]
        decisions = oracle(directory, computed)[1]
        for name, value in brute(decisions, spec, len(prompt), chunk).items():
            found = getattr(output.kv, name)
            if name.endswith("bytes"):
                value *= slot_bytes
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found, value)
            else:
                assert found == pytest.approx(value), name
        assert output.kv.cr_factor == pytest.approx(accounting.cr_factor(decisions, spec))
    total = llm.kv
    assert total.requests == 3
    assert total.kv_reads == pytest.approx(sum(o.kv.kv_reads for o in outputs))
    assert total.tokens == sum(o.kv.tokens for o in outputs)
    assert total.peak_live_bytes >= max(o.kv.peak_live_bytes for o in outputs)
    assert total.peak_live_bytes <= total.peak_allocated_bytes
    assert total.live_bytes == 0
    held = sum(o.kv.live_tokens for o in outputs)
    assert total.cr_factor == pytest.approx(total.tokens / held)


def test_vanilla_example(folder):
    """4 prompt tokens, 3 generated: passes at positions 4 and 5 attend 5 and 6 tokens."""
    kv = (
        LLM(folder("llama", None))
        .generate([random_ids(4)], SamplingParams(max_tokens=3, temperature=0.0))[0]
        .kv
    )
    assert (kv.kv_reads, kv.peak_live_tokens, kv.prefill_reads) == (11, 6, 10)


def test_bytes_follow_compression(folder):
    """After the same text the compact cache holds a fraction of the bytes of the dense one."""
    directory = folder("qwen3", small_spec("dms", alpha_offset=-1e5))
    ids = random_ids(200)
    params = SamplingParams(max_tokens=2, temperature=0.0)
    found = {
        cache: LLM(directory, cache=cache, prefill_chunk=16, slab_pages=2)
        for cache in ("compact", "dense")
    }
    for llm in found.values():
        llm.generate([ids], params)
    small, full = (found[name].kv.peak_allocated_bytes for name in ("compact", "dense"))
    assert small < full / 4


def test_steps_of_a_decode_burst_are_counted_one_by_one():
    """Each sequence takes part in some of the steps; the truth is summed in plain Python."""
    page, shape = 8, (5, 3, 4, 2)  # steps, layers, rows, KV heads
    generator = torch.Generator().manual_seed(0)
    reads, live = torch.randint(0, 40, (2, *shape), generator=generator, dtype=torch.int32)
    rows, steps, prefill = [2, 0, 3], [5, 1, 3], [True, True, False]
    numbers = (np.array(x) for x in (rows, steps, prefill))
    counts = BurstCounts(reads.numpy(), live.numpy(), page, [*range(live.shape[1])])
    assert counts.most_live == max(step.sum() for step in live)
    costs = counts.costs(*numbers)
    for cost, row, count, begins in zip(costs, rows, steps, prefill, strict=True):
        read, kept = (
            [x[:, row].flatten().tolist() for x in part[:count]] for part in (reads, live)
        )
        held = [
            sum(-(-max(pair) // page) * page for pair in zip(*step, strict=True))
            for step in zip(read, kept, strict=True)
        ]
        read, kept = list(map(sum, read)), list(map(sum, kept))
        of_prompt = read[0] if begins else 0
        assert cost[:2] == (of_prompt, sum(read) - of_prompt)
        assert cost[2:6] == (kept[-1], held[-1], max(kept), max(held))
        assert cost.lists.tolist() == live[count - 1, :, row].tolist()
        assert cost.steps[:, :count].tolist() == [[sum(read[: i + 1]) for i in range(count)], kept]


def test_turns_count_from_their_start(folder):
    llm = LLM(folder("qwen3", small_spec("dms")))
    params = SamplingParams(max_tokens=10, temperature=0.0)
    with llm.conversation() as conversation:
        first = conversation.say(random_ids(20), params).kv
        second = conversation.say(random_ids(5), params).kv
    assert (first.tokens, second.tokens) == (29, 44)
    assert second.prefill_reads < second.kv_reads
    assert llm.kv.requests == 2
