"""Compare `InferenceEngine.live_positions` with the tokens that a masked model sees."""

from __future__ import annotations

import pytest
import torch

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.kernels import dispatch
from dms_train.method.visibility import visible
from tests.unit.inference.conftest import random_ids, small_spec

PROMPT = random_ids(30)


@pytest.mark.parametrize("cache", ["compact", "dense"])
@pytest.mark.parametrize("chunk", [512, 7])
def test_positions_are_those_that_the_last_token_attends(folder, oracle, chunk, cache):
    spec = small_spec("dms")
    directory = folder("llama", spec)
    engine = InferenceEngine(directory, EngineOptions(prefill_chunk=chunk, cache=cache))
    params = SamplingParams(max_tokens=25, temperature=0, ignore_eos=True)
    request_id = engine.add_request(PROMPT, params, keep_cache=True)
    engine.add_request(random_ids(20, seed=1), params)  # shares the pool
    assert engine.live_positions(request_id) is None
    found, tokens = {}, []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == request_id:
                tokens = PROMPT + output.outputs[0].token_ids
                found[output.kv.tokens] = engine.live_positions(request_id)
    allowed = visible(oracle(directory, tokens)[1], spec)  # [L, H, T, T]
    assert len(found) >= 25
    for seen, positions in found.items():
        rows = allowed[:, :, seen - 1]
        assert [[head.tolist() for head in layer] for layer in positions] == [
            [head.nonzero().flatten().tolist() for head in layer] for layer in rows
        ]
    assert any(len(head) < seen for layer in found[seen] for head in layer)
    engine.abort(request_id)
    with pytest.raises(InferenceError, match="not known"):
        engine.live_positions(request_id)


def test_a_paged_cache_has_none(folder):
    if not dispatch.is_supported(torch.device("cpu")):
        pytest.skip("needs triton's interpreter")
    options = EngineOptions(kernels="triton", max_num_seqs=1, prefill_chunk=8)
    engine = InferenceEngine(folder("llama", None), options)
    request_id = engine.add_request(PROMPT[:4], SamplingParams(max_tokens=2), keep_cache=True)
    engine.step()
    assert engine.live_positions(request_id) is None
