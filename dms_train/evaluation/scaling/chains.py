"""Generates the chains of documents and traces what each of them costs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dms_train.evaluation.scaling.costs import ChainTrace
from dms_train.evaluation.tasks.base import Document
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.options import SamplingParams
from dms_train.inference.outputs import CompletionOutput, RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptedDocument:
    """A document, its prompt, and how its chains are sampled.

    Attributes:
        document: The document.
        prompt: Text that the model continues.
        params: Sampling; `n` is the number of chains.
    """

    document: Document
    prompt: str
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedChain:
    """One continuation with its costs.

    Attributes:
        output: What was generated.
        trace: Its costs after each token.
        seconds: From the start of the document to the end of the chain.
    """

    output: CompletionOutput
    trace: ChainTrace
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedDocument:
    """All chains of a document.

    Attributes:
        prompted: What was asked.
        prompt_tokens: Length of the prompt.
        chains: In the order of their numbers.
    """

    prompted: PromptedDocument
    prompt_tokens: int
    chains: list[GeneratedChain]


class _Running:
    """A document whose chains are being generated."""

    def __init__(self, prompted: PromptedDocument) -> None:
        self.prompted = prompted
        self.traces = [ChainTrace() for _ in range(prompted.params.n)]
        self._started = time.monotonic()
        self._seconds = [0.0] * prompted.params.n

    def note(self, output: RequestOutput) -> None:
        """After a step that this document took part in."""
        now = time.monotonic() - self._started
        for chain, trace in zip(output.outputs, self.traces, strict=True):
            before = len(trace.live)
            trace.add(len(chain.token_ids), chain.kv.kv_reads, chain.kv.live_tokens)
            if len(trace.live) > before:
                self._seconds[chain.index] = now

    def finish(self, output: RequestOutput) -> GeneratedDocument:
        """The document, with the output of the step in which its last chain ended."""
        chains = [
            GeneratedChain(output=c, trace=trace, seconds=seconds)
            for c, trace, seconds in zip(output.outputs, self.traces, self._seconds, strict=True)
        ]
        return GeneratedDocument(
            prompted=self.prompted,
            prompt_tokens=len(output.prompt_token_ids),
            chains=chains,
        )


def generate(
    engine: InferenceEngine, documents: Iterable[PromptedDocument], max_num_seqs: int
) -> Iterator[GeneratedDocument]:
    """Documents in the order in which they finish; as many run as there is room for.

    A document is prompted once and its chains are forked from there. The chains of a document
    start together where `max_num_seqs` allows it.

    Args:
        engine: Without other requests.
        documents: What to generate.
        max_num_seqs: Chains at the same time.

    Raises:
        InferenceError: A prompt is too long for the model.
    """
    waiting = iter(documents)
    running: dict[str, _Running] = {}
    upcoming = next(waiting, None)
    while running or upcoming is not None:
        busy = sum(len(r.traces) for r in running.values())
        while upcoming is not None and (not running or busy + upcoming.params.n <= max_num_seqs):
            running[engine.add_request(upcoming.prompt, upcoming.params)] = _Running(upcoming)
            busy += upcoming.params.n
            upcoming = next(waiting, None)
        for output in engine.step():
            running[output.request_id].note(output)
            if output.finished:
                yield running.pop(output.request_id).finish(output)
