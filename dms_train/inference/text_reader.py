"""Reader of texts: hidden states and logits at every token, through the cache of an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.inference.accounting import RequestKV
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import SamplingParams
from dms_train.inference.request_builder import RequestBuilder
from dms_train.inference.runner import ModelRunner
from dms_train.inference.scheduler import Scheduler
from dms_train.inference.sequence import Sequence


class TextStates(NamedTuple):
    """Result of reading a text.

    Attributes:
        hidden: Last hidden states, [tokens, hidden] on the host, in the dtype of the model.
        kv: Cost of its cache.
    """

    hidden: Tensor
    kv: RequestKV


class _TextPart(NamedTuple):
    """Hidden states of neighbouring tokens of a text.

    Attributes:
        sequence: The text.
        first: Position of the first token.
        hidden: [tokens, hidden] on the device.
    """

    sequence: Sequence
    first: int
    hidden: Tensor


class TextReader:
    """Reader that computes texts beside the requests of an engine, none of which it advances.

    Args:
        runner: Runner of the engine. No launched steps may be waiting.
        scheduler: Scheduler of the engine.
        builder: Builder that checks the texts.
    """

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler[Sequence], builder: RequestBuilder
    ) -> None:
        self._runner, self._scheduler, self._builder = runner, scheduler, builder
        self._decoder = runner.model.decoder

    def logits(self, token_ids: list[int]) -> Tensor:
        """Return the logits at every token of a text, float [len(token_ids), vocab].

        Raises:
            InferenceError: As in `hidden_states`.
        """
        text, head = self._text(token_ids), self._decoder.lm_head.weight
        dtype = torch.promote_types(head.dtype, torch.float32)
        logits = torch.empty(len(text.tokens), len(head), dtype=dtype, device=head.device)
        for _, first, hidden in self._read([text]):
            logits[first : first + len(hidden)] = self._decoder.logits(hidden)
        return logits

    def hidden_states(self, texts: list[list[int]]) -> list[TextStates]:
        """Return the last hidden states at every token of texts, and the cost of each text.

        Raises:
            InferenceError: A text is empty, too long or not of this vocabulary, or the cache is
                too small for it.
        """
        sequences, head = [self._text(token_ids) for token_ids in texts], self._decoder.lm_head
        size, dtype = head.weight.shape[1], head.weight.dtype
        states = {s: torch.empty(len(s.tokens), size, dtype=dtype) for s in sequences}
        for sequence, first, hidden in self._read(sequences):
            states[sequence][first : first + len(hidden)] = hidden.cpu()
        return [TextStates(states[s], s.meter.report()) for s in sequences]

    def _text(self, token_ids: list[int]) -> Sequence:
        """Return a sequence that is only read."""
        request = self._builder.request(SamplingParams())
        self._builder.add_prompt(request, token_ids, SamplingParams(), new_tokens=0)
        (sequence,) = request.sequences
        sequence.read_only = True
        return sequence

    def _read(self, sequences: list[Sequence]) -> Iterator[_TextPart]:
        """Yield the hidden states of parts of texts; each is valid until the next one.

        A preempted text is read again from its beginning, and its cost is counted anew.
        """
        unread = dict.fromkeys(sequences)
        for sequence in sequences:
            self._scheduler.add(sequence)
        try:
            while unread:
                plan = self._scheduler.schedule(time.monotonic(), unread.keys())
                if not plan.batch:
                    raise InferenceError("the cache is too small for the text; raise cache_bytes")
                yield from self._read_parts(plan.batch)
                for sequence, _ in plan.batch:
                    if not sequence.remaining:
                        self._scheduler.remove(sequence)
                        del unread[sequence]
            for sequence in sequences:
                self._runner.total.finish(sequence.meter.report())
        finally:
            for sequence in unread:
                self._scheduler.remove(sequence)

    def _read_parts(self, batch: list[tuple[Sequence, int]]) -> Iterator[_TextPart]:
        """Yield the hidden states of one pass."""
        counts, first = dict(batch), {s: s.num_computed_tokens for s, _ in batch}
        for sequence, position in first.items():
            if not position:
                sequence.meter.restart()
        forward_pass = self._runner.step(batch, hidden_states=True)
        assert forward_pass.hidden is not None
        hidden = forward_pass.hidden.split([counts[s] for s in forward_pass.sequences])
        for sequence, part in zip(forward_pass.sequences, hidden, strict=True):
            yield _TextPart(sequence, first[sequence], part)
        self._runner.count(forward_pass)
