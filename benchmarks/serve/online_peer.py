"""vLLM with requests that arrive over time: one JSON line for each rate.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python -m benchmarks.serve.online_peer SHAPE [--rates 1,2,4,8]

Its options are those of `benchmarks.serve.online`, which starts it.
"""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

from benchmarks.serve.online import Progress, add_load, load, measure
from benchmarks.serve.peer import start


class PeerServer:
    """vLLM's engine in this process."""

    def __init__(self, vllm: Any, engine: Any) -> None:
        self._vllm, self._engine, self._added = vllm, engine, 0

    def add(self, prompt: list[int], new: int) -> str:
        """As in `online.Server`."""
        self._added += 1
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(str(self._added), {"prompt_token_ids": prompt}, params)
        return str(self._added)

    def step(self) -> list[Progress]:
        """As in `online.Server`."""
        outputs = self._engine.step()
        return [Progress(o.request_id, len(o.outputs[0].token_ids)) for o in outputs]

    def busy(self) -> bool:
        """As in `online.Server`."""
        return bool(self._engine.has_unfinished_requests())


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    add_load(parser)
    args = parser.parse_args()
    vllm: Any = importlib.import_module("vllm")
    llm = start(vllm, args.shape, "auto", compiled=True, sequences=args.sequences)
    for case in measure(PeerServer(vllm, llm.llm_engine), args.shape, load(args)):
        print(json.dumps({"engine": f"vLLM {vllm.__version__}", **case}), flush=True)


if __name__ == "__main__":
    main()
