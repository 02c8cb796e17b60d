"""Decode documents, and read from the engine's cache which tokens each KV head holds.

Shape letters: l layers, h KV heads, t tokens, k types.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.evaluation.bootstrap import Estimate, ratio
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from dms_train.inference.outputs import RequestOutput
from research.retention.grammars.base import Grammar, TypedWord

Curve = dict[int, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndedSequence:
    """Finished sequence.

    Attributes:
        tokens: Tokens whose keys and values were computed: the prompt, and all generated tokens
            except the last one.
        held: bool [l, h, t], True for tokens that the cache holds.
    """

    tokens: list[int]
    held: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TypedSequence:
    """Sequence with the types of its tokens.

    Attributes:
        words: Word and type of each token.
        held: See `EndedSequence`.
        left: bool [t], True for tokens that have left the window, so that a head may evict them.
    """

    words: list[TypedWord]
    held: Tensor
    left: Tensor


def decode(
    llm: LLM, prompts: list[str], params: list[SamplingParams]
) -> tuple[Curve, list[EndedSequence]]:
    """Continue prompts.

    Args:
        llm: Engine whose cache keeps positions.
        prompts: Texts of the prompts.
        params: Sampling parameters of each prompt.

    Returns:
        cr_factor of every sequence after every pass, by the number of tokens it had seen; and the
        sequences, in the order of their prompts.
    """
    curve: Curve = defaultdict(list)
    ended: dict[int, EndedSequence] = {}
    for batch in llm.stream(prompts, params):
        for output in batch:
            if output.kv.tokens and output.kv.live_tokens:
                curve[output.kv.tokens].append(output.kv.cr_factor)
            if output.finished:
                ended[int(output.request_id)] = _ended(llm, output)
    return curve, [ended[number] for number in sorted(ended)]


def _ended(llm: LLM, output: RequestOutput) -> EndedSequence:
    positions = llm.engine.live_positions(output.request_id)
    assert positions is not None
    tokens = (output.prompt_token_ids + output.outputs[0].token_ids)[: output.kv.tokens]
    held = torch.zeros(len(positions), len(positions[0]), len(tokens), dtype=torch.bool)
    for layer, heads in enumerate(positions):
        for head, at in enumerate(heads):
            held[layer, head, at] = True
    return EndedSequence(tokens=tokens, held=held)


def typed(llm: LLM, sequence: EndedSequence, grammar: Grammar) -> TypedSequence:
    """Add types to a sequence of a model whose tokens are words."""
    assert llm.tokenizer is not None
    assert llm.spec is not None
    words = [llm.tokenizer.decode([token], special=True) for token in sequence.tokens]
    newest = len(words) - 1  # the last query
    return TypedSequence(
        words=grammar.read(words),
        held=sequence.held,
        left=newest - torch.arange(len(words)) > llm.spec.window,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TypeCount:
    """Tokens of one type, over all sequences.

    Attributes:
        tokens: Number of tokens.
        held: float64 [l, h], number of these tokens that each KV head holds.
        somewhere: Number of tokens that at least one KV head holds.
        mean: Share held, mean over KV heads, with an interval over the sequences; None without a
            token.
    """

    tokens: int
    held: Tensor
    somewhere: int
    mean: Estimate | None

    @property
    def shares(self) -> Tensor:
        """Shares of the tokens that each head holds, float64 [l, h]; NaN without a token."""
        return self.held / self.tokens


def count(
    sequences: Iterable[TypedSequence], types: tuple[str, ...], *, left: bool
) -> dict[str, TypeCount]:
    """Count the tokens of each type at the ends of the sequences.

    Args:
        sequences: At least one sequence.
        types: Types of their grammar.
        left: Count only tokens that have left the window.
    """
    seen, held, somewhere = [], [], []
    for sequence in sequences:
        numbers = torch.tensor([types.index(word.type) for word in sequence.words])
        of_type = F.one_hot(numbers, len(types)).double()  # [t, k]
        of_type = of_type * sequence.left[:, None] if left else of_type
        seen.append(of_type.sum(0))
        held.append(sequence.held.double() @ of_type)  # [l, h, k]
        somewhere.append(sequence.held.any(0).any(0).double() @ of_type)
    tokens, holds, anywhere = torch.stack(seen), torch.stack(held), torch.stack(somewhere)
    return {
        name: TypeCount(
            tokens=int(tokens[:, k].sum()),
            held=holds[..., k].sum(0),
            somewhere=int(anywhere[:, k].sum()),
            mean=_mean(holds[..., k].mean((1, 2)), tokens[:, k]),
        )
        for k, name in enumerate(types)
    }


def _mean(held: Tensor, tokens: Tensor) -> Estimate | None:
    """Estimate the mean share over the sequences that have such tokens."""
    some = tokens > 0
    return ratio(held[some].tolist(), tokens[some].tolist()) if some.any() else None
