"""Perplexity of a text through the KV cache, in windows and in continuations after a prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling.run import model_hash
from dms_train.evaluation.tasks.data_files import file_sha256
from dms_train.evaluation.tasks.prompts import load_tokenizer
from dms_train.hf.directory import resolve
from dms_train.hf.text_files import read_text
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.outputs import RequestOutput

_AHEAD = 4  # requests in the engine for each cache row, so that rows never wait for the host


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityOptions:
    """Text, and how it is cut.

    Attributes:
        text: UTF-8 file.
        length: Tokens of a window; a rest shorter than a window is left out.
        prompt: Tokens of a window before the continuation.
        limit: Maximum number of windows; None takes all.
    """

    text: Path
    length: int = 2048
    prompt: int = 1536
    limit: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.prompt < self.length:
            raise EvaluationError(
                f"--prompt {self.prompt}: 1 to {self.length - 1}, below --length {self.length}"
            )
        if self.limit is not None and self.limit < 1:
            raise EvaluationError(f"--limit {self.limit}: at least 1")


def perplexity(model: str, engine: EngineOptions, options: PerplexityOptions) -> dict[str, Any]:
    """Measure perplexity on whole windows and on their continuations.

    Every token is scored with the tokens that the cache holds at its position. `window` scores all
    tokens of a window but the first, while the prompt is computed. `continuation` scores the tokens
    after `prompt` tokens; the last prompt token has been computed before. The windows are the same.

    Args:
        model: Directory or hub id (local cache only), with a tokenizer.
        engine: Engine options; `max_model_len` must hold a window.
        options: Text, and how it is cut.

    Returns:
        `window` and `continuation`, each with `nats` (mean negative log-likelihood of a token),
        `perplexity`, `tokens`, `per_window` (nats) and `cr_factor`; and what identifies the run.

    Raises:
        EvaluationError: The text has no whole window, or there is no tokenizer.
        InferenceError: The model or an option of the engine cannot be used.
    """
    directory = resolve(model)
    windows = _windows(directory, options)
    results: dict[str, Any] = {
        "model": model,
        "model_sha256": model_hash(directory),
        "text_sha256": file_sha256(options.text),
        "length": options.length,
        "prompt": options.prompt,
        "windows": len(windows),
    }
    llm = InferenceEngine(directory, engine)

    def add_window(tokens: list[int]) -> str:
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        return llm.add_request(tokens, params, final_only=True)

    def add_continuation(tokens: list[int]) -> str:
        return llm.add_scoring(tokens[: options.prompt], [tokens[options.prompt :]])

    parts = {
        "window": (add_window, _prompt_scores),
        "continuation": (add_continuation, _given_scores),
    }
    for part, (add, scores) in parts.items():
        with tqdm(total=len(windows), desc=part, disable=None) as progress:  # in a terminal only
            results[part] = _measure(llm, windows, add, scores, progress)
    return results


def _windows(directory: Path, options: PerplexityOptions) -> list[list[int]]:
    tokens = load_tokenizer(directory).encode(read_text(options.text))
    starts = range(0, len(tokens) - options.length + 1, options.length)[: options.limit]
    if not starts:
        raise EvaluationError(
            f"{options.text}: {len(tokens)} tokens, and a window has {options.length}; lower "
            "--length or take a longer text"
        )
    return [tokens[start : start + options.length] for start in starts]


def _measure(
    engine: InferenceEngine,
    windows: list[list[int]],
    add: Callable[[list[int]], str],
    scores: Callable[[RequestOutput], list[float]],
    progress: tqdm[NoReturn],
) -> dict[str, Any]:
    """Score windows; return their mean negative log-likelihood and the compression ratio."""
    per_window, held, seen, tokens = [0.0] * len(windows), 0.0, 0, 0
    for number, output in _outputs(engine, windows, add):
        if output.outputs[0].finish_reason == "memory":
            raise EvaluationError(
                f"a window of {len(windows[number])} tokens: the cache is too small for it; raise "
                "--cache-bytes"
            )
        values = scores(output)
        per_window[number] = -sum(values) / len(values)
        tokens += len(values)
        seen, held = seen + output.kv.tokens, held + output.kv.compressed_tokens
        progress.update()
    nats = sum(per_window) / len(windows)  # windows have the same number of tokens
    return {
        "nats": nats,
        "perplexity": math.exp(nats),
        "tokens": tokens,
        "cr_factor": seen / held,
        "per_window": per_window,
    }


def _outputs(
    engine: InferenceEngine, windows: list[list[int]], add: Callable[[list[int]], str]
) -> Iterator[tuple[int, RequestOutput]]:
    """Yield the number and the finished request of each window."""
    waiting, running = list(range(len(windows)))[::-1], dict[str, int]()
    while waiting or running:
        while waiting and len(running) < _AHEAD * engine.options.max_num_seqs:
            number = waiting.pop()
            running[add(windows[number])] = number
        for output in engine.step():
            if output.finished:
                yield running.pop(output.request_id), output


def _prompt_scores(output: RequestOutput) -> list[float]:
    assert output.prompt_logprobs is not None
    return [each.logprob for each in output.prompt_logprobs if each is not None]


def _given_scores(output: RequestOutput) -> list[float]:
    scores = output.outputs[0].scores
    assert scores is not None
    return scores.logprobs
