"""The engine on a GPU: fused kernels, captured steps and FP8 pages beside torch operations."""

from __future__ import annotations

import pytest
import torch

from dms_train.families import LayerAttention
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.models.blocks import RMSNorm
from dms_train.inference.models.decoder import Decoder
from dms_train.inference.models.loader import LoadedModel
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.runner import ModelRunner
from dms_train.inference.sequence import Sequence
from dms_train.method.spec import PRESETS
from tests.support import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = "cuda"
GREEDY = SamplingParams(temperature=0, max_tokens=12)
STEPS, PROMPTS = 30, (40, 3, 21)


LAYERS = tuple(LayerAttention(rotary_base=1e4, window=window) for window in (12, None))
# further sizes of the architecture of each family
MODELS = {
    "gemma3_text": {"kv_channels": 256},
    "gpt_oss": {},
    "llama": {},
    "olmo3": {},
    "qwen3_5_text": {},
    "qwen3_moe": {},
    "qwen3": {"layers": LAYERS},
}


def model(
    preset: str | None,
    device: str = DEVICE,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
) -> LoadedModel:
    """Two layers whose random weights, of bf16 if not Llama, evict about half of all tokens."""
    sizes = {"num_layers": 2, "kv_channels": 16, "max_position_embeddings": 512}
    architecture = tiny.architecture(family, **{**sizes, **MODELS[family]})
    spec = None if preset is None else PRESETS[preset].override(window=8)
    torch.manual_seed(3)
    decoder = Decoder(architecture, spec)
    torch.nn.init.normal_(decoder.embed_tokens.weight)  # made without initial values
    for name, weight in decoder.named_parameters():
        own = "linear_attn" in name and "proj" not in name
        if ".experts." in name or "sinks" in name or own:  # made without initial values too
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    if family != "llama":
        decoder = decoder.to(torch.bfloat16)
    decoder = decoder.to(device, dtype).eval()
    if family == "gemma3_text":  # factors of norms stay in float32
        for module in decoder.modules():
            if isinstance(module, RMSNorm):
                module.float()
    return LoadedModel(
        decoder=decoder, architecture=architecture, spec=spec, dtype=dtype, config={}
    )


def sequences() -> list[Sequence]:
    draw = torch.Generator().manual_seed(1)
    return [
        Sequence(
            request_id=str(row),
            index=0,
            seed=row,
            arrival=row,
            tokens=torch.randint(0, tiny.VOCAB, (n,), generator=draw).tolist(),
            prompt_end=n,
            batch_slot=row,
        )
        for row, n in enumerate(PROMPTS)
    ]


def run(loaded: LoadedModel, feed: list[list[int]] | None, **how: str):
    """Greedy tokens (or those of `feed`), logits of every step and live tokens at the end."""
    options = EngineOptions(device=DEVICE, max_num_seqs=4, prefill_chunk=16, **how)
    runner, running, logits = ModelRunner(loaded, options), sequences(), []
    for step in range(STEPS):
        while waiting := [s for s in running if s.prefilling]:
            done = runner.step([(s, min(s.remaining, 16)) for s in waiting])
            for s, row in zip([s for s in waiting if s.is_sampled], done.logits, strict=True):
                s.tokens.append(int(row.argmax()) if feed is None else feed[s.batch_slot or 0][0])
        logits.append(runner.step([(s, 1) for s in running]).logits.cpu())
        for s, row in zip(running, logits[-1], strict=True):
            s.tokens.append(
                int(row.argmax()) if feed is None else feed[s.batch_slot or 0][step + 1]
            )
    rows = torch.arange(len(PROMPTS), device=DEVICE)
    live = runner.cache.live(rows).cpu()
    return [s.output for s in running], torch.stack(logits), live


def generated(loaded: LoadedModel) -> list[list[int]]:
    """Greedy tokens of an engine, in the order of `PROMPTS`."""
    engine = InferenceEngine(loaded, EngineOptions(device=DEVICE, max_num_seqs=4, decode_steps=8))
    params = SamplingParams(temperature=0, max_tokens=STEPS + 1)
    ids, done = [engine.add_request(s.tokens, params) for s in sequences()], {}
    while engine.has_unfinished_requests():
        done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    return [done[request_id] for request_id in ids]


@pytest.mark.parametrize("preset", ["dms", "dms_fastdms", "dms_nvidia", None])
@pytest.mark.parametrize("policy", ["auto", "window", "keep_all"])
def test_the_fused_engine_generates_the_same_tokens(preset: str | None, policy: str) -> None:
    if preset is None and policy == "window":
        pytest.skip("a dense model has no window")
    tokens, logits, live = run(model(preset), None, policy=policy, kernels="auto")
    expected, logits_of_reference, held = run(
        model(preset), None, policy=policy, kernels="reference"
    )
    assert tokens == expected
    assert torch.equal(live, held)
    torch.testing.assert_close(logits, logits_of_reference, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("preset", ["dms", None])
@pytest.mark.parametrize(
    "family", ["gemma3_text", "gpt_oss", "olmo3", "qwen3_5_text", "qwen3_moe", "qwen3"]
)
def test_experts_and_windows_in_bf16_follow_torch_in_float32(
    family: str, preset: str | None
) -> None:
    """Generate in bursts, which are CUDA graphs, then compute the logits of these tokens."""
    exact = model(preset, family=family)
    rounded = model(preset, family=family, dtype=torch.bfloat16)
    tokens = generated(rounded)
    _, expected, held = run(exact, tokens, kernels="reference")
    _, logits, live = run(rounded, tokens, kernels="auto")
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.03  # rounding changes the experts of a few tokens
    best = torch.tensor(tokens)[:, 1:] == expected.argmax(-1).T
    assert best.float().mean() > 0.9
    if preset is None:  # with DMS, rounding changes a few decisions
        assert torch.equal(live, held)


def test_fp8_pages_change_the_logits_a_little() -> None:
    tokens, logits_of_reference, _ = run(model("dms"), None, kernels="reference")
    _, logits, _ = run(model("dms"), tokens, cache_dtype="fp8")
    assert 1e-5 < (logits - logits_of_reference).norm() / logits_of_reference.norm() < 0.1


@pytest.mark.parametrize("preset", ["dms", None])
def test_chunks_of_prompts_replayed_as_graphs_give_the_same_tokens(preset: str | None) -> None:
    """First chunks and later ones, whole and padded, and behind a snapshot that others share."""
    draw = torch.Generator().manual_seed(2)
    lengths = (80, 40, 71, 25, 23, 95, 64, 30, 77, 22, 73, 97)
    prompts = [torch.randint(0, tiny.VOCAB, (n,), generator=draw).tolist() for n in lengths]
    prompts[1::2] = [prompts[1][:20] + prompt for prompt in prompts[1::2]]
    found, kinds = [], set()
    for kernels in ("auto", "reference"):
        options = EngineOptions(
            device=DEVICE, max_num_seqs=4, prefill_chunk=40, max_num_batched_tokens=60,
            kernels=kernels, enable_prefix_caching=True,
        )  # fmt: skip
        engine = InferenceEngine(model(preset), options)
        ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
        done = {}
        while engine.has_unfinished_requests():
            done |= {o.request_id: o for o in engine.step() if o.finished}
        outputs = [done[request_id].outputs[0] for request_id in ids]
        found.append([(o.token_ids, o.kv.kv_reads) for o in outputs])
        if kernels == "auto":
            kinds = set(engine._runner._prompts._graphs)
    assert found[0] == found[1]
    assert {(kind.whole, kind.begins) for kind in kinds} >= {(True, True), (False, False)}
    assert any(kind.copies for kind in kinds)


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0},
        {},
        {"top_p": 0.8},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
    ],
    ids=str,
)
def test_tokens_sampled_in_the_graph_are_those_of_the_sampler(how: dict) -> None:
    """Requests that end at different times; log-probabilities are computed by the host."""
    found = []
    for logprobs in (None, 0):
        engine = InferenceEngine(model("dms"), EngineOptions(device=DEVICE, max_num_seqs=3))
        for seed, length in enumerate((5, 30, 2, 17, 9)):
            params = SamplingParams(seed=seed, max_tokens=9 + 3 * seed, logprobs=logprobs, **how)
            engine.add_request(list(range(length)), params)
        done = {}
        while engine.has_unfinished_requests():
            done |= {o.request_id: o for o in engine.step() if o.finished}
        found.append(
            {i: (o.outputs[0].token_ids, o.outputs[0].kv.kv_reads) for i, o in done.items()}
        )
    assert found[0] == found[1]


def traces(device: str, shares: tuple[float, ...], **how: int | str) -> tuple[dict, int]:
    """Tokens and costs at each of them of sampled continuations, and most tokens of a step.

    Requests have these shares as top-p; the last one generates the most tokens.
    """
    options = EngineOptions(device=device, max_num_seqs=8, page_slots=4, **how)
    engine, found, most = InferenceEngine(model("dms", device), options), {}, 0
    for seed, length in enumerate((5, 30, 17)):
        params = SamplingParams(
            n=3, max_tokens=20 + 7 * seed, seed=seed, kv_trace=True, top_p=shares[seed]
        )
        engine.add_request(list(range(length)), params, final_only=True)
    while engine.has_unfinished_requests():
        before = engine.decoded_steps
        for output in engine.step():
            for chain in output.outputs:
                assert chain.kv.trace is not None
                columns = (chain.kv.trace.kv_reads, chain.kv.trace.live_tokens)
                rows = [chain.token_ids, *(column.tolist() for column in columns)]
                found[output.request_id, chain.index] = rows
        most = max(most, engine.decoded_steps - before)
    return found, most


@pytest.mark.parametrize("shares", [(1, 1, 1), (1, 0.9, 0.8), (0.9, 0.8, 1)], ids=str)
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_groups_of_steps_trace_what_torch_operations_read(device: str, shares: tuple) -> None:
    """Steps with top-p, without it, and one kind behind the other."""
    if torch.cuda.device_count() < 2 and device != "cuda":
        pytest.skip("needs two GPUs")
    expected, _ = traces(device, shares, kernels="reference")
    assert traces(device, shares, decode_steps=1) == (expected, 1)
    assert traces(device, shares, decode_steps=8) == (expected, 8)


def test_the_cache_takes_its_share_of_the_memory() -> None:
    """gpu_memory_utilization: so little that nothing is left for pages."""
    with pytest.raises(InferenceError, match="gpu_memory_utilization=1e-06: leaves 0 bytes"):
        InferenceEngine(model("dms"), EngineOptions(device=DEVICE, gpu_memory_utilization=1e-6))
