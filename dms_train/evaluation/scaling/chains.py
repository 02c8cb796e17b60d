"""Generation of the chains of documents, with a trace of the costs of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dms_train.evaluation.tasks.base import Document
from dms_train.inference.accounting import RequestKV
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import SamplingParams
from dms_train.inference.outputs import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptedDocument:
    """A document, its prompt, and how its chains are sampled.

    Attributes:
        document: The document.
        prompt: Tokens that the model continues.
        params: Sampling; `n` is the number of chains.
    """

    document: Document
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedChain:
    """One continuation with its costs.

    Attributes:
        text: Generated text.
        tokens: Number of generated tokens, with the one that ends it.
        token_ids: These tokens; None from a server, which reports their number only.
        finish_reason: `stop`, or what cut the chain off.
        seconds: Time from the arrival of the prompt to the last token.
        kv: Costs, with a trace; None from a server, which does not report them.
    """

    text: str
    tokens: int
    token_ids: list[int] | None
    finish_reason: str | None
    seconds: float
    kv: RequestKV | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedDocument:
    """All chains of a document.

    Attributes:
        prompted: Document and prompt.
        prompt_tokens: Length of the prompt.
        chains: Chains in the order of their numbers.
    """

    prompted: PromptedDocument
    prompt_tokens: int
    chains: list[GeneratedChain]


def generate(
    engine: InferenceEngine, documents: Iterable[PromptedDocument], max_num_seqs: int
) -> Iterator[GeneratedDocument]:
    """Yield documents in the order in which they finish; as many run as fit.

    A document is prompted once and its chains are forked from there. The chains of a document
    start together where `max_num_seqs` allows it. The engine returns a document when all its chains
    have finished, so that it may decode groups of tokens.

    Args:
        engine: Without other requests.
        documents: Documents to generate for.
        max_num_seqs: Chains at the same time.

    Raises:
        InferenceError: A prompt is too long for the model, or the cache is too small for a chain.
    """
    waiting = iter(documents)
    running: dict[str, PromptedDocument] = {}
    upcoming = next(waiting, None)
    while running or upcoming is not None:
        while upcoming is not None and (
            not running or engine.unfinished + upcoming.params.n <= max_num_seqs
        ):
            params = replace(upcoming.params, kv_trace=True)
            request_id = engine.add_request(upcoming.prompt, params, final_only=True)
            running[request_id] = upcoming
            upcoming = next(waiting, None)
        for output in engine.step():
            yield _finished(running.pop(output.request_id), output)


def _finished(prompted: PromptedDocument, output: RequestOutput) -> GeneratedDocument:
    chains = []
    for chain in output.outputs:
        if chain.finish_reason == "memory":
            raise InferenceError(
                f"document {prompted.document.id}: the cache is too small for a chain of it; take "
                "shorter sweep.lengths or a device with more memory"
            )
        chains.append(
            GeneratedChain(
                text=chain.text,
                tokens=len(chain.token_ids),
                token_ids=chain.token_ids,
                finish_reason=chain.finish_reason,
                seconds=chain.seconds,
                kv=chain.kv,
            )
        )
    return GeneratedDocument(
        prompted=prompted, prompt_tokens=len(output.prompt_token_ids), chains=chains
    )
