"""One case: several prompts of the same length, prefill and decoding measured apart."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any, NamedTuple

from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import SamplingParams

FEWEST = 8  # least number of steps for a meaningful median and spread
_FIRST_TOKEN, _LAST_TOKEN = 1000, 127000


class Case(NamedTuple):
    """Sequences and tokens of each prompt."""

    sequences: int
    context: int

    @property
    def label(self) -> str:
        """Name in the tables."""
        return f"{self.sequences} x {self.context}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read `SEQUENCESxCONTEXT`."""
        return cls(*map(int, text.split("x")))

    @property
    def word(self) -> str:
        """Text that `parse` reads."""
        return f"{self.sequences}x{self.context}"


def prompts(case: Case, vocab: int) -> list[list[int]]:
    """Draw prompts, the same for every engine."""
    draw = random.Random(0)
    last = min(_LAST_TOKEN, vocab - 1)
    first = min(_FIRST_TOKEN, last // 2)
    return [
        [draw.randrange(first, last) for _ in range(case.context)] for _ in range(case.sequences)
    ]


class Steps(NamedTuple):
    """A run of a case.

    Attributes:
        seconds: Time of the whole run.
        steps: Seconds of each step in which all sequences decoded.
        together: Largest number of sequences that decoded at the same time.
    """

    seconds: float
    steps: list[float]
    together: int


def figures(case: Case, prefill: Steps, decode: Steps) -> dict[str, Any]:
    """Return the numbers of a case for its row.

    Args:
        case: The case.
        prefill: A run of one token for each sequence.
        decode: A run of many tokens.

    Returns:
        `prefill_tok_s` and `step_ms` with its 20 % and 80 % quantiles; `skipped` with the reason
        instead of the latter if the sequences did not decode together.
    """
    row: dict[str, Any] = {
        **case._asdict(),
        "prefill_tok_s": round(case.sequences * case.context / prefill.seconds),
    }
    if len(decode.steps) < FEWEST:
        held = f"the KV cache holds {decode.together} of {case.sequences} sequences at once"
        return row | {"skipped": held}
    low, *_, high = statistics.quantiles(decode.steps, n=5)
    return row | {
        "step_ms": round(1e3 * statistics.median(decode.steps), 3),
        "step_ms_spread": [round(1e3 * low, 3), round(1e3 * high, 3)],
    }


def measure(engine: InferenceEngine, case: Case, new_tokens: int) -> dict[str, Any]:
    """Measure a case after a shorter warm-up that captures the graph of a prompt.

    Args:
        engine: Idle.
        case: The case.
        new_tokens: Decode steps.

    Returns:
        `figures`, and `live` tokens per KV head at the end of a sequence.
    """
    tokens = prompts(case, engine.architecture.vocab_size)
    for _ in range(2):
        _run(engine, tokens[:1], 4)
    prefill, _ = _run(engine, tokens, 1)
    decode, live = _run(engine, tokens, 1 + new_tokens)
    return figures(case, prefill, decode) | {"live": round(live)}


def _run(engine: InferenceEngine, tokens: list[list[int]], new_tokens: int) -> tuple[Steps, float]:
    """Decode all prompts; return their steps, and the mean number of live tokens."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    before = time.perf_counter()
    for prompt in tokens:
        engine.add_request(prompt, params, final_only=True)
    steps: list[float] = []
    live: list[float] = []
    since: float | None = None
    together = 0
    while engine.has_unfinished_requests():
        finished = engine.step()
        now = time.perf_counter()
        live += [o.outputs[0].kv.live_tokens for o in finished if o.outputs[0].kv is not None]
        together = max(together, engine.decoding)
        if since is not None and not finished and engine.decoding == len(tokens):
            steps.append(now - since)
        since = now if engine.decoding == len(tokens) else None
    return Steps(time.perf_counter() - before, steps, together), statistics.fmean(live)
