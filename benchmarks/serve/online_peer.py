"""vLLM with requests that arrive over time: one JSON line for each rate.

    python -m benchmarks serve online_peer SHAPE [--rates 1,2,4,8]

The benchmark `serve online` starts this module with its own options. vLLM has the defaults of its
server: the asynchronous engine in a separate process, its graphs and its batch sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.serve.online import add_load, load, measure
from benchmarks.serve.peer import random_weights
from benchmarks.serve.traffic import Arrival


class Stream:
    """Client of vLLM's asynchronous engine that sends each request at its arrival."""

    def __init__(self, vllm: Any, shape: str) -> None:
        self._params, self._numbers = vllm.SamplingParams, itertools.count()
        self._deltas = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
        context = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
        arguments = vllm.AsyncEngineArgs(**random_weights(shape))
        self._engine = vllm.AsyncLLMEngine.from_engine_args(arguments, usage_context=context)

    async def serve(self, work: Sequence[Arrival]) -> list[list[float]]:
        """Serve requests as they arrive; the result is like that of `online.drive`."""
        start = time.perf_counter()
        return await asyncio.gather(*(self._one(request, start) for request in work))

    async def _one(self, request: Arrival, start: float) -> list[float]:
        arrival = start + request.at
        await asyncio.sleep(arrival - time.perf_counter())
        params = self._params(
            temperature=0.0, max_tokens=request.new, ignore_eos=True, detokenize=False,
            output_kind=self._deltas,
        )  # fmt: skip
        prompt, name = {"prompt_token_ids": request.prompt}, str(next(self._numbers))
        times: list[float] = []
        async for output in self._engine.generate(prompt, params, name):
            times += [time.perf_counter() - arrival] * len(output.outputs[0].token_ids)
        return times

    def close(self) -> None:
        """End the engine's process."""
        self._engine.shutdown()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    add_load(parser)
    args = parser.parse_args()
    vllm: Any = importlib.import_module("vllm")
    stream = Stream(vllm, args.shape)
    with asyncio.Runner() as runner:
        cases = measure(lambda work: runner.run(stream.serve(work)), args.shape, load(args))
        for case in cases:
            print(json.dumps({"engine": f"vLLM {vllm.__version__}", **case}), flush=True)
        stream.close()


if __name__ == "__main__":
    main()
