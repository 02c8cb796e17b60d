"""`AsyncLLM`: coroutines share an engine, and leave nothing in it."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from pathlib import Path

import pytest

from dms_train import LLM, AsyncLLM, SamplingParams
from dms_train.inference.errors import InferenceError
from dms_train.inference.outputs import RequestOutput

PROMPTS = ["the river", "seven old", "stone house under", "green bird"]
PARAMS = [SamplingParams(max_tokens=8 + 5 * i, seed=i, ignore_eos=True) for i in range(4)]
LONG = SamplingParams(max_tokens=1000, ignore_eos=True)


async def collect(llm: AsyncLLM, prompt: str, params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params)]


async def idle(llm: AsyncLLM) -> None:
    """Return when the engine has nothing to do."""
    async with asyncio.timeout(60):
        while llm._thread._engine.has_unfinished_requests() or llm._thread._tickets:
            await asyncio.sleep(0.01)


def test_coroutines_get_what_each_prompt_gives_alone(model: Path):
    async def run() -> list[list[RequestOutput]]:
        async with AsyncLLM(model, max_num_seqs=3) as llm:
            return await asyncio.gather(
                *(collect(llm, *pair) for pair in zip(PROMPTS, PARAMS, strict=True))
            )

    for outputs, alone in zip(
        asyncio.run(run()), LLM(model).generate(PROMPTS, PARAMS), strict=True
    ):
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs == alone.outputs
        for earlier, later in itertools.pairwise(outputs):
            tokens = earlier.outputs[0].token_ids
            assert tokens == later.outputs[0].token_ids[: len(tokens)]
            assert later.outputs[0].text.startswith(earlier.outputs[0].text)


def test_a_slow_reader_misses_no_tokens(model: Path):
    async def run() -> list[int]:
        counts = []
        async with AsyncLLM(model) as llm:
            async for output in llm.generate("the river", PARAMS[3]):
                counts.append(len(output.outputs[0].token_ids))
                await idle(llm)
        return counts

    assert asyncio.run(run())[-1] == PARAMS[3].max_tokens


def test_a_closed_generator_and_a_cancelled_task_free_their_cache(model: Path):
    async def run() -> None:
        async with AsyncLLM(model, max_num_seqs=2) as llm:
            async with aclosing(llm.generate("the river", LONG)) as outputs:
                await anext(outputs)
            task = asyncio.create_task(collect(llm, "seven", LONG))
            waiting = asyncio.create_task(collect(llm, "stone", LONG))
            await asyncio.sleep(0.05)
            task.cancel()
            waiting.cancel()
            await asyncio.gather(task, waiting, return_exceptions=True)
            assert task.cancelled()
            await idle(llm)
            assert llm._thread._engine.free_batch_slots == 2
            assert llm._thread._engine.kv is None  # none of them has finished
            assert (await collect(llm, PROMPTS[0], PARAMS[0]))[-1].finished

    asyncio.run(run())


def test_a_refused_prompt_leaves_the_others(model: Path):
    async def run() -> None:
        async with AsyncLLM(model) as llm:
            good = asyncio.create_task(collect(llm, PROMPTS[0], PARAMS[0]))
            for bad in ("", [10**6]):
                with pytest.raises(InferenceError, match="prompt"):
                    await collect(llm, bad, PARAMS[0])
            assert (await good)[-1].finished

    asyncio.run(run())


def test_a_failed_step_is_an_error_of_its_request_only(model: Path, monkeypatch):
    async def run() -> None:
        async with AsyncLLM(model) as llm:
            runner = llm._thread._engine._runner
            with monkeypatch.context() as patch:
                patch.setattr(runner, "step", None)
                with pytest.raises(InferenceError, match="forward pass"):
                    await collect(llm, PROMPTS[0], PARAMS[0])
            assert (await collect(llm, PROMPTS[0], PARAMS[0]))[-1].finished

    asyncio.run(run())


def test_requests_outside_of_the_block_are_refused_and_those_in_it_end_with_it(model: Path):
    async def run() -> None:
        llm = AsyncLLM(model)
        with pytest.raises(InferenceError, match="async with"):
            await collect(llm, "the", LONG)
        async with llm:
            running = asyncio.create_task(collect(llm, "the", LONG))
            await asyncio.sleep(0.05)
        with pytest.raises(InferenceError, match="left before the request had finished"):
            await running
        with pytest.raises(InferenceError, match="async with"):
            await collect(llm, "the", LONG)
        with pytest.raises(InferenceError, match="enter it once"):
            await llm.__aenter__()

    asyncio.run(run())


def test_options_are_those_of_llm(tmp_path: Path):
    with pytest.raises(InferenceError, match="one device"):
        AsyncLLM(tmp_path, tensor_parallel_size=2)
