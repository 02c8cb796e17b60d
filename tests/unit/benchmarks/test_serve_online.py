"""Requests over time: arrivals, percentiles and latencies against numpy and a queue by hand."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.serve import online, online_peer
from benchmarks.serve.models import MEMORY
from benchmarks.serve.traffic import MIXES, Arrival, Lengths, arrivals, poisson_times, recorded


def test_arrivals_have_their_rate_and_depend_on_the_seed() -> None:
    times = poisson_times(5.0, 2000.0, seed=3)
    assert times == poisson_times(5.0, 2000.0, seed=3) != poisson_times(5.0, 2000.0, seed=4)
    gaps = np.diff(times)
    assert times[0] == 0 < gaps.min() < times[-1] < 2000
    assert len(times) == pytest.approx(5 * 2000, abs=4 * np.sqrt(5 * 2000))
    # exponential: mean and deviation are equal, and the median is log 2 of them
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.04)
    assert gaps.std() == pytest.approx(1 / 5, rel=0.06)
    assert np.median(gaps) == pytest.approx(np.log(2) / 5, rel=0.06)


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_percentiles_are_those_of_numpy(count: int) -> None:
    values = np.random.default_rng(count).exponential(size=count).tolist()
    for share in (0.0, 0.5, 0.95, 0.99, 1.0):
        assert online.percentile(values, share) == pytest.approx(np.percentile(values, 100 * share))


def test_lengths_are_drawn_within_their_mix_or_from_the_record(tmp_path: Path) -> None:
    times = [0.0] * 500
    work = arrivals(times, MIXES["chat"], 512, seed=1)
    assert work == arrivals(times, MIXES["chat"], 512, seed=1)
    prompts = np.array([len(request.prompt) for request in work])
    assert prompts.min() >= 32
    assert prompts.max() <= 2048
    assert np.median(prompts) == pytest.approx(np.sqrt(32 * 2048), rel=0.3)
    assert all(16 <= request.new <= 512 for request in work)
    file = tmp_path / "chains.jsonl"
    rows = [{"prompt_tokens": 3, "tokens": 5}, {"prompt_tokens": 4, "tokens": 6}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert recorded(file, 100) == [Lengths(3, 5), Lengths(4, 6)]
    assert recorded(file, 8) == [Lengths(3, 5)]
    found = {(len(each.prompt), each.new) for each in arrivals(times, recorded(file, 9), 512, 0)}
    assert found == {(3, 5)}
    with pytest.raises(ValueError, match="no request of 1 to 7 tokens"):
        recorded(file, 7)
    file.write_text('{"prompt_tokens": 3}\n')
    with pytest.raises(ValueError, match="line 1: needs prompt_tokens and tokens"):
        recorded(file, 7)


class Queue:
    """One request at a time; a step is a second and gives one token."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waiting: list[list[int]] = []  # number, tokens so far, tokens in all
        self.count = 0

    def add(self, prompt: list[int], new: int) -> str:
        self.waiting.append([self.count, 0, new])
        self.count += 1
        return str(self.count - 1)

    def step(self) -> list[online.Progress]:
        self.now += 1
        first = self.waiting[0]
        first[1] += 1
        if first[1] == first[2]:
            self.waiting.pop(0)
        return [online.Progress(str(first[0]), first[1])]

    def busy(self) -> bool:
        return bool(self.waiting)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_latencies_count_from_the_arrival() -> None:
    """Tokens of the first request at 1 and 2, of the second at 3, 4 and 5, of the third at 11."""
    work = [Arrival(0.0, [1], 2), Arrival(0.5, [1], 3), Arrival(10.0, [1], 1)]
    queue = Queue()
    times = online.drive(queue, work, clock=lambda: queue.now, sleep=queue.sleep)
    assert times == [[1.0, 2.0], [2.5, 3.5, 4.5], [1.0]]
    found = online.summary(work, times)
    assert (found["requests"], found["tokens"]) == (3, 6)
    assert found["tokens_s"] == pytest.approx(6 / 11, abs=0.05)
    assert found["ttft_ms"] == {"p50": 1000.0, "p99": pytest.approx(2470.0)}
    assert found["itl_ms"] == {"p50": 1000.0, "p99": 1000.0}


def test_the_best_rate_is_the_one_of_most_tokens_within_the_target() -> None:
    cases = [
        {"tokens_s": rate * 10, "ttft_ms": {"p99": 100.0 * rate}, "itl_ms": {"p99": 5.0 * rate}}
        for rate in (1, 2, 4, 8)
    ]
    assert online.within(cases, 400, 1000) == cases[2]
    assert online.within(cases, 1000, 11) == cases[1]
    assert online.within(cases, 1000, 4) is None


def test_both_ways_serve_the_same_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows are stored before the peer starts."""
    stored: list[str] = []

    def peers(*_: object) -> Iterator[dict[str, object]]:
        (file,) = tmp_path.glob("*/online.json")
        stored.extend(case["engine"] for case in json.loads(file.read_text())["cases"])
        yield from ()

    monkeypatch.setattr(online, "_peers", peers)
    words = ["serve", "online", "small", "--device", "cpu", "--mix", "toy", "--rates", "20"]
    words += ["--seconds", "0.5"]
    assert main([*words, "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*/online.json")
    record = json.loads(file.read_text())
    work = arrivals(poisson_times(20.0, 0.5, 0), MIXES["toy"], 512, 0)
    assert [case["engine"] for case in record["cases"]] == ["DMS", "dense"] == stored
    assert {"commit", "date"} <= set(record)
    for case in record["cases"]:
        assert (case["requests"], case["rate"]) == (len(work), 20.0)
        assert case["tokens"] == sum(request.new for request in work)
        assert 0 < case["ttft_ms"]["p50"] <= case["ttft_ms"]["p99"]
        assert 0 < case["itl_ms"]["p50"] <= case["itl_ms"]["p99"]


@pytest.mark.parametrize("words", [["Llama-9"], ["--rates", "1,x"], ["--lengths", "/absent"]])
def test_bad_options_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "online", *words])
    assert ended.value.code == 2


def test_a_peer_of_another_python_is_started(tmp_path: Path) -> None:
    """Its module may be ours; what it prints on other lines is left out."""
    program = tmp_path / "online_peer"
    words = 'printf \'note\\n{"engine": "other", "arguments": "%s"}\\n\' "$*"'
    program.write_text(f"#!/bin/sh\n{words}\n")
    program.chmod(0o755)
    args = argparse.Namespace(
        peer=str(program), rates="2,4", seconds=3.0, seed=5, sequences=6, lengths=None, mix="toy"
    )
    args.device = torch.device("cuda")
    (case,) = online._peers("small", args)
    arguments = "small --rates 2,4 --seconds 3.0 --seed 5 --mix toy"
    assert case == {"engine": "other", "arguments": arguments}


class Vllm:
    """Stand-in for vLLM: an engine that generates one token in 10 ms for every request."""

    __version__ = "9"
    SamplingParams = SimpleNamespace

    def __init__(self) -> None:
        self.given: dict[str, object] = {}
        self.AsyncEngineArgs = lambda **words: words
        self.AsyncLLMEngine = self

    def from_engine_args(self, arguments: dict[str, object], usage_context: str) -> Vllm:
        self.given = {**arguments, "usage_context": usage_context}
        return self

    async def generate(self, prompt: dict, params: SimpleNamespace, name: str):
        assert params.output_kind == "delta"
        for number in range(params.max_tokens):
            await asyncio.sleep(0.01)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[number])])


def test_the_online_peer_has_vllms_own_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA="delta")}}
    kinds["vllm.usage.usage_lib"] = {"UsageContext": SimpleNamespace(OPENAI_API_SERVER="server")}
    for name in ("vllm", "vllm.usage", *kinds):
        module = ModuleType(name)
        vars(module).update(kinds.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    vllm = Vllm()
    stream = online_peer.Stream(vllm, "small")
    limited = {"compilation_config", "max_num_seqs", "max_num_batched_tokens", "attention_backend"}
    assert not limited & set(vllm.given)
    assert vllm.given["usage_context"] == "server"
    assert vllm.given["gpu_memory_utilization"] == MEMORY
    work = [Arrival(0.0, [1], 2), Arrival(0.05, [1, 2], 3)]
    first, second = asyncio.run(stream.serve(work))
    assert (len(first), len(second)) == (2, 3)
    for times in (first, second):  # from each request's own arrival
        assert 0.01 <= times[0] < times[-1]
        assert times == sorted(times)
