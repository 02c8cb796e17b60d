"""vLLM's engine with two tensor-parallel ranks: a process and a scheduler for each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import pytest

from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from tests.interop.conftest import ours
from tests.unit.vllm_plugin.test_engine import EXPORTS, NEW_TOKENS, OPTIONS, PROMPTS, job, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PAGE = OPTIONS["block_size"]
LEAST = OPTIONS["max_model_len"] // PAGE + 3  # blocks with which both versions of vLLM start


@pytest.fixture(scope="module")
def on_ranks(in_vllm, tmp_path_factory) -> Callable[..., list[Any]]:
    """(function, job of each rank) -> results by rank."""

    def _on_ranks(function: str, jobs: list[dict[str, Any]]) -> list[Any]:
        store = str(tmp_path_factory.mktemp("ranks") / "store")
        jobs = [{**job, "rank": rank, "store": store} for rank, job in enumerate(jobs)]
        with ThreadPoolExecutor(len(jobs)) as threads:
            return [r[0] for r in threads.map(lambda job: in_vllm(function, [job]), jobs)]

    return _on_ranks


@pytest.fixture(scope="module", params=["llama-dms", "olmo3-dms"])
def model(request, tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp("ranks") / "export", *EXPORTS[request.param])


@pytest.fixture(scope="module")
def results(on_ranks, model) -> list[dict[str, Any]]:
    if not version("vllm").startswith("0.24."):
        pytest.skip("two ranks of this version of vLLM do not run on a CPU")
    options = {**OPTIONS, "tensor_parallel_size": 2}
    return on_ranks("generate", [job(model, LEAST, options=options)] * 2)


def steps_of_requests(results: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Request number and, for each rank, what it holds, for all steps."""
    pairs = []
    for steps in zip(*(r["steps"] for r in results), strict=True):
        # vLLM adds a suffix of its own to the number of a request in each process
        for names in zip(*(step["requests"] for step in steps), strict=True):
            entries = [
                {**step["requests"][name], "reported": step["reported"][name]}
                for step, name in zip(steps, names, strict=True)
            ]
            assert len({name.partition("-")[0] for name in names}) == 1
            pairs.append((names[0].partition("-")[0], entries))
    return pairs


def test_tokens_are_those_of_the_own_engine(results, model):
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    expected = [
        o.outputs[0].token_ids for o in LLM(model, dtype="float32").generate(PROMPTS, params)
    ]
    assert [r["tokens"] for r in results] == [expected, expected]


def test_ranks_hold_the_lists_of_the_own_engine(results, model):
    tokens = zip(PROMPTS, results[0]["tokens"], strict=True)
    expected = [ours(model, prompt + new, prompt=1)["live"] for prompt, new in tokens]
    for number, ranks in steps_of_requests(results):
        layers = zip(*(r["lengths"] for r in ranks), strict=True)
        lengths = [[*first, *second] for first, second in layers]
        assert lengths == expected[int(number)][ranks[0]["seen"] - 1].tolist()


def test_both_ranks_report_the_pages_of_the_fuller_one(results, request):
    # half of OLMo 3's layers have a window, in which ranks hold the same number of tokens
    least, different = {"llama-dms": 20, "olmo3-dms": 4}[request.node.callspec.params["model"]], 0
    for _, ranks in steps_of_requests(results):
        pages = [sum(-(-n // PAGE) for layer in r["lengths"] for n in layer) for r in ranks]
        assert [r["reported"] for r in ranks] == [max(pages)] * 2
        different += pages[0] != pages[1]
    assert different >= least


def test_a_fault_on_one_rank_is_one_of_all(on_ranks):
    pages = [[3, 9, -1], [5, 7, 4]]
    assert on_ranks("agree", [{"pages": p} for p in pages]) == [[5, 9, -1]] * 2
