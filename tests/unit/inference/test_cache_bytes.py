"""`cache_bytes` bounds all tensors that a cache holds, counted through its attributes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.kernels import dispatch
from dms_train.method.spec import PRESETS
from tests.unit.inference.conftest import random_ids, small_spec
from tests.unit.inference.policies.test_requests import IDS, POLICIES, trained_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEEDS_TRITON = pytest.mark.skipif(
    not dispatch.is_supported(DEVICE), reason="needs triton's interpreter"
)
ROWS, LONGEST = 4, 64
# What kernels compute with in a step; its size depends on the step, not on what is cached.
WORKSPACES = {"_memory", "_selections", "_choice", "_selection_rows", "_wanted", "_query_index"}


def held_bytes(cache: Any) -> int:
    """Bytes of the storages of all tensors that can be reached from an object."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [cache]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, list | tuple | set):
            waiting += found
        elif type(found).__module__.startswith("dms_train.inference"):
            names = [*getattr(found, "__dict__", ()), *getattr(type(found), "__slots__", ())]
            waiting += [getattr(found, name) for name in names if name not in WORKSPACES]
    return sum(storages.values())


def table_bytes(layers: int, heads: int, page_slots: int, window: int) -> int:
    """Return the bytes of page tables, lengths and window by the formula of the guide."""
    pages = -(-LONGEST // page_slots) + 1
    return layers * heads * ROWS * (8 * pages + 4 * (window + 1)) + 1024


def peak(engine: InferenceEngine, requests: int) -> int:
    """Most bytes that the cache of an engine holds while it computes requests of all lengths."""
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    for seed in range(requests):
        engine.add_request(random_ids((40, 9, 25)[seed % 3], seed=seed), params)
    most = held_bytes(engine._runner.cache)
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, held_bytes(engine._runner.cache))
    return most


def check(directory: Any, requests: int, **how: Any) -> None:
    """Bound a cache to two thirds of what requests fill without a limit."""
    how |= {"max_num_seqs": ROWS, "max_model_len": LONGEST, "device": DEVICE.type}
    how |= {"page_slots": 4, "slab_pages": 1, "prefill_chunk": 16}
    unlimited = InferenceEngine(directory, EngineOptions(**how | {"kernels": "reference"}))
    limit = peak(unlimited, requests) * 2 // 3
    engine = InferenceEngine(directory, EngineOptions(cache_bytes=limit, **how))
    a, cache = engine.architecture, engine._runner.cache
    tables = table_bytes(a.num_layers, a.num_query_groups, 4, cache.policy.window)
    assert limit // 4 < peak(engine, requests) <= limit + tables


LARGE = [  # what they keep is most of the cache
    ("snapkv", {"cr": 2.0, "window": 32, "kernel": 3}),
    ("r_kv", {"budget": 40, "window": 32, "kernel": 3, "interval": 3}),
]


@pytest.mark.parametrize(("policy", "own"), POLICIES + LARGE, ids=[*IDS, "snapkv", "r_kv"])
def test_the_cache_of_any_policy_stays_within_its_bytes(folder, policy, own):
    directory = folder("llama", trained_for(policy))
    check(directory, 4, policy=policy, policy_options=own)


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("policy", "own"),
    [
        ("dms", {}),
        ("dmc", {}),
        ("streaming_llm", {"cr": 2.0, "sinks": 2}),
        ("snapkv", {"cr": 2.0, "window": 8, "kernel": 3}),
        ("r_kv", {"budget": 20, "window": 8, "kernel": 3, "interval": 3}),
        ("h2o", {"cr": 1.5}),
        ("tova", {"budget": 24}),
        ("quest", {"budget": 4, "page": 4, "dense_layers": 1}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_cache_of_the_kernels_stays_within_its_bytes(folder, policy, own):
    spec = PRESETS["dmc"].override(alpha_offset=0.0) if policy == "dmc" else small_spec("dms")
    directory = folder("llama", spec)
    check(directory, 3, policy=policy, policy_options=own, kernels="triton")


@pytest.mark.parametrize(("policy", "own"), [("snapkv", {"cr": 2.0, "window": 32}), ("quest", {})])
def test_a_limit_below_what_the_policy_keeps_is_refused(folder, policy, own):
    directory = folder("llama", small_spec("dms"))
    how = {"policy": policy, "policy_options": {"budget": 8, **own} if policy == "quest" else own}
    sizes = {"page_slots": 4, "slab_pages": 4, "max_num_seqs": 64, "device": DEVICE.type}
    with pytest.raises(InferenceError, match=r"cache_bytes=9000: at least \d+, .*max_num_seqs"):
        InferenceEngine(directory, EngineOptions(cache_bytes=9000, **sizes, **how))


@NEEDS_TRITON
def test_the_kernels_say_what_the_state_of_a_policy_takes(folder):
    how = {"policy": "h2o", "policy_options": {"budget": 9}, "kernels": "triton"}
    how |= {"device": DEVICE.type, "page_slots": 4, "cache_bytes": 200_000}
    with pytest.raises(InferenceError, match=r"takes \d+ bytes, fewer with a smaller") as error:
        InferenceEngine(folder("llama", None), EngineOptions(max_num_seqs=64, **how))
    taken = int(str(error.value).partition("takes ")[2].split()[0])
    assert taken > how["cache_bytes"]
    few = InferenceEngine(folder("llama", None), EngineOptions(max_num_seqs=2, **how))
    assert few._runner.cache.policy_bytes * 20 < taken
