"""One case: several prompts of the same length, prefill and decoding measured apart."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any, NamedTuple

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import SamplingParams

_FIRST_TOKEN, _LAST_TOKEN = 1000, 127000


class Case(NamedTuple):
    """Sequences and tokens of each prompt."""

    sequences: int
    context: int

    @property
    def label(self) -> str:
        """As in the tables."""
        return f"{self.sequences} x {self.context}"


def prompts(case: Case, vocab: int) -> list[list[int]]:
    """The same random prompts for every engine."""
    draw = random.Random(0)
    last = min(_LAST_TOKEN, vocab - 1)
    first = min(_FIRST_TOKEN, last // 2)
    return [
        [draw.randrange(first, last) for _ in range(case.context)] for _ in range(case.sequences)
    ]


def measure(engine: InferenceEngine, case: Case, new_tokens: int) -> dict[str, Any]:
    """Times of one case, after a shorter warm-up that captures the graph of a prompt.

    Args:
        engine: Idle.
        case: The case.
        new_tokens: Decode steps.

    Returns:
        `prefill_tok_s`, `step_ms` with its 20 % and 80 % quantiles, and `live` tokens per KV head
        at the end of a sequence.
    """
    tokens = prompts(case, engine.architecture.vocab_size)
    for _ in range(2):
        _run(engine, tokens[:1], 4)
    before = time.perf_counter()
    _run(engine, tokens, 1)
    prefill = time.perf_counter() - before
    steps, live = _run(engine, tokens, 1 + new_tokens)
    low, *_, high = statistics.quantiles(steps, n=5)
    return {
        "sequences": case.sequences,
        "context": case.context,
        "prefill_tok_s": round(case.sequences * case.context / prefill),
        "step_ms": round(1e3 * statistics.median(steps), 3),
        "step_ms_spread": [round(1e3 * low, 3), round(1e3 * high, 3)],
        "live": round(live),
    }


def _run(
    engine: InferenceEngine, tokens: list[list[int]], new_tokens: int
) -> tuple[list[float], float]:
    """Times of the steps in which all sequences decode, and the mean of the live tokens."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    for prompt in tokens:
        engine.add_request(prompt, params, final_only=True)
    steps: list[float] = []
    live: list[float] = []
    since: float | None = None
    while engine.has_unfinished_requests():
        finished = engine.step()
        now = time.perf_counter()
        live += [o.outputs[0].kv.live_tokens for o in finished if o.outputs[0].kv is not None]
        if since is not None and not finished and engine.decoding == len(tokens):
            steps.append(now - since)
        since = now if engine.decoding == len(tokens) else None
    return steps, statistics.fmean(live)
