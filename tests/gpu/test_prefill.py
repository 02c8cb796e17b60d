"""The kernels of long prompts on a GPU, against masked dense float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from dms_train.kernels.prefill import sparse as prefill
from dms_train.kernels.prefill import triton_attention as triton_prefill
from dms_train.kernels.prefill.lists import Tokens
from tests.support.prefill_cases import (
    InChunks,
    Prompt,
    as_one_chunk,
    assert_near,
    check_chunks,
    check_ragged,
    expected_output,
    in_one_go,
    nan_pages,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

BASE = Prompt(device="cuda", s=1500, d=128, window=256, dtype=torch.bfloat16, page_slots=128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 128, 256, 80, 16, 8])
def test_every_head_size_and_dtype(d: int, dtype: torch.dtype) -> None:
    assert_near(*in_one_go(replace(BASE, d=d, dtype=dtype, s=900)))


@pytest.mark.parametrize("seed", range(60))
def test_random_prompts(seed: int) -> None:
    draw = random.Random(seed)
    p = replace(
        BASE,
        b=draw.choice([1, 1, 2, 3]),
        h=draw.choice([1, 2, 3, 8]),
        group=draw.choice([1, 2, 3, 4, 7]),
        s=draw.randint(1, 2500),
        d=draw.choice([64, 128]),
        window=draw.choice([0, 1, 16, 100, 256, 300, 3000]),
        odds=draw.choice([0.0, 0.3, 0.8, 0.98, 1.0]),
        page_slots=draw.choice([16, 64, 128, 256]),
        dtype=draw.choice(DTYPES[:2]),
        seed=seed,
        sinks=draw.random() < 0.3,
    )
    assert_near(*in_one_go(p))


@pytest.mark.parametrize("seed", range(20))
def test_random_chunks(seed: int) -> None:
    draw = random.Random(seed)
    s = draw.randint(1, 2500)
    cuts = sorted(draw.randint(0, s) for _ in range(draw.randint(0, 4)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, s], strict=True) if b > a]
    p = replace(
        BASE,
        b=draw.choice([1, 2]),
        group=draw.choice([1, 3, 4]),
        s=s,
        window=draw.choice([1, 16, 100, 256]),
        odds=draw.choice([0.3, 0.9, 1.0]),
        page_slots=draw.choice([16, 64, 128]),
        seed=seed,
    )
    shift = draw.choice([0, 1, p.window + 1])
    check_chunks(InChunks(p, sizes, shift, shuffled=draw.choice([True, False])))


def test_the_kernel_for_other_gpus_agrees() -> None:
    for p in (BASE, replace(BASE, d=64, window=10), replace(BASE, d=256, page_slots=16)):
        query, key, value, evicted = p.tensors()
        none = torch.zeros(p.b, p.h, dtype=torch.int32, device="cuda")
        chunk = prefill.count(evicted, none)
        pages = nan_pages(key, p.s, p.page_slots)
        prefill.extend(Tokens(query, key, value), chunk, pages, **p.how)
        call = triton_prefill.Call(Tokens(query, key, value), chunk, pages, **p.how)
        for capability in ((8, 6), (9, 0)):
            tile = triton_prefill.choose_tiles(p.dtype, p.d, capability)
            out = triton_prefill.attend(call, tile)
            assert_near(out, expected_output(query, key, value, evicted, p))


def test_sequences_of_one_batch_may_differ_in_length() -> None:
    check_ragged(BASE, starts=[0, 30, 64, 1400], stops=[1500, 100, 65, 1500])


def test_heads_may_lie_outermost() -> None:
    query, key, value, evicted = BASE.tensors()
    given = [x.contiguous() for x in (query, key, value)]
    out = as_one_chunk(BASE, *given, evicted)
    assert_near(out, expected_output(query, key, value, evicted, BASE))


@pytest.mark.parametrize("odds", [0.0, 0.9])
def test_a_prompt_in_one_chunk_equals_masked_dense_attention(odds: float) -> None:
    p = replace(BASE, odds=odds)
    given = p.tensors()
    assert_near(as_one_chunk(p, *given), expected_output(*given, p))


def test_the_same_twice() -> None:
    given = BASE.tensors()
    assert torch.equal(as_one_chunk(BASE, *given), as_one_chunk(BASE, *given))
