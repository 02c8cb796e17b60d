"""Requests over one model and its cache: `add_request`, `step`, `abort`."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dms_train.hf.directory import resolve
from dms_train.inference.accounting import Meter, TotalKV
from dms_train.inference.errors import InferenceError
from dms_train.inference.models.loader import load_model
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.outputs import CompletionOutput, RequestOutput
from dms_train.inference.runner import ModelRunner
from dms_train.inference.sampler import sample
from dms_train.inference.sequence import Sequence
from dms_train.inference.tokenizer import Tokenizer, read_stop_ids, until

Prompt = str | list[int] | dict[str, Any]

_NO_ROW = "max_num_seqs={}: all cache rows are in use; close a conversation or end a stream"


class InferenceEngine:
    """Continues requests, one forward pass at a time.

    A request waits for a cache row, in order of arrival; from then on it takes part in every pass
    until it finishes or is aborted.

    Args:
        model: Directory or hub id (local cache only), of a family in `families`, dense or exported
            with DMS.
        options: How to run it.

    Attributes:
        options: As given.
        architecture: Sizes of the model.
        spec: What the model was trained for; None for a dense model.
        dtype: Of weights and computation.
        tokenizer: The model's tokenizer; None if its directory has none.
    """

    def __init__(self, model: str | Path, options: EngineOptions) -> None:
        directory = resolve(model)
        loaded = load_model(directory, dtype=options.dtype, device=options.device)
        self.options = options
        self.architecture, self.spec, self.dtype = loaded.architecture, loaded.spec, loaded.dtype
        self.tokenizer = Tokenizer.load(directory)
        self._stop_ids = read_stop_ids(directory)
        self._runner = ModelRunner(loaded, options)
        self._free_rows = list(range(options.max_num_seqs - 1, -1, -1))
        self._waiting: dict[str, Sequence] = {}  # without a cache row, in order of arrival
        self._placed: dict[str, Sequence] = {}  # with one
        self._arrived = 0

    @property
    def kv(self) -> TotalKV | None:
        """What the cache has cost so far; None before any request has finished."""
        return self._runner.total.report()

    @property
    def allocated_bytes(self) -> int:
        """Bytes the cache takes from the system now, page tables included."""
        return self._runner.cache.allocated_bytes

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        final_only: bool = False,
        keep_cache: bool = False,
    ) -> str:
        """Queue a prompt.

        Args:
            prompt: Text, token ids or `{"prompt_token_ids": [...]}`.
            params: How to continue it.
            final_only: Have `step` return the request only when it has finished.
            keep_cache: Keep the cache of the finished request until `abort`.

        Returns:
            Its id, a number in the order of arrival.

        Raises:
            InferenceError: The prompt is empty, too long or not of this vocabulary.
        """
        sequence = self._sequence(final_only=final_only, keep_cache=keep_cache)
        self._add_prompt(sequence, prompt, params or SamplingParams())
        self._waiting[sequence.request_id] = sequence
        return sequence.request_id

    def open_conversation(self) -> str:
        """Reserve a cache row for a request whose prompts come with `add_turn`; its id.

        Its cache is kept from turn to turn until `abort`.

        Raises:
            InferenceError: No row is free.
        """
        sequence = self._sequence(final_only=True, keep_cache=True)
        self._place(sequence)
        return sequence.request_id

    def add_turn(self, request_id: str, prompt: Prompt, params: SamplingParams | None) -> None:
        """Give the next prompt of a conversation, which follows all of its tokens so far.

        Args:
            request_id: From `open_conversation`; its last turn has finished.
            prompt: Text or token ids of this turn only.
            params: How to continue it.

        Raises:
            InferenceError: The conversation was aborted, or as in `add_request`.
        """
        if request_id not in self._placed:
            raise InferenceError("the conversation is closed; start another one")
        self._add_prompt(self._placed[request_id], prompt, params or SamplingParams())

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._waiting) or any(s.runnable for s in self._placed.values())

    def step(self, request_ids: Collection[str] | None = None) -> list[RequestOutput]:
        """Run one forward pass: a chunk of every prompt not computed yet, else one token each.

        A request that finishes frees its cache, unless it was added with `keep_cache`. If the pass
        fails, its requests are aborted, because their cache is incomplete.

        Args:
            request_ids: Requests that may take part; None for all.

        Returns:
            Outputs of the requests that took part, by cache row; empty if there is nothing to do.

        Raises:
            InferenceError: Requests wait, but every cache row is in use by others.
        """
        batch = self._schedule(request_ids)
        try:
            self._advance(batch)
            shown = [s for s in batch if s.finish_reason is not None or not s.final_only]
            outputs = [self._output(s) for s in shown]
        except BaseException:
            for sequence in batch:
                self.abort(sequence.request_id)
            raise
        for sequence, output in zip(shown, outputs, strict=True):
            if output.finished:
                self._runner.total.finish(output.kv)
                if not sequence.keep_cache:
                    self.abort(sequence.request_id)
        return outputs

    def abort(self, request_id: str) -> None:
        """Forget a request and free its cache at once; an id that is not known is ignored."""
        self._waiting.pop(request_id, None)
        sequence = self._placed.pop(request_id, None)
        if sequence is not None:
            self._free(sequence)

    def logits(self, token_ids: list[int]) -> Tensor:
        """Logits at every token of a text, computed through the cache.

        Args:
            token_ids: The text.

        Returns:
            float [len(token_ids), vocab].
        """
        sequence = self._sequence(final_only=True, keep_cache=True)
        self._add_prompt(sequence, token_ids, SamplingParams(), new_tokens=0)
        self._place(sequence)
        try:
            parts = []
            while sequence.prefilling:
                parts.append(self._runner.step([sequence], every=True)[0])
            self._runner.total.finish(sequence.meter.report(sequence.computed))
        finally:
            self.abort(sequence.request_id)
        return torch.cat(parts)

    def _sequence(self, *, final_only: bool, keep_cache: bool) -> Sequence:
        """A request without tokens."""
        generator = torch.Generator()
        generator.seed()
        self._arrived += 1
        return Sequence(
            request_id=str(self._arrived - 1),
            params=SamplingParams(),
            generator=generator,
            meter=Meter(),
            final_only=final_only,
            keep_cache=keep_cache,
        )

    def _add_prompt(
        self, sequence: Sequence, prompt: Prompt, params: SamplingParams, *, new_tokens: int = 1
    ) -> None:
        """Append a prompt that leaves room for `new_tokens` more tokens."""
        text, tokens = self._encode(prompt, first=not sequence.tokens)
        longest = self.architecture.max_position_embeddings
        length = len(sequence.tokens) + len(tokens)
        if length + new_tokens > longest:
            raise InferenceError(f"a prompt of {length} tokens: the model takes {longest}")
        if params.stop and self.tokenizer is None:
            raise InferenceError("stop: the model has no tokenizer.json; use stop_token_ids")
        sequence.add_prompt(text, tokens, params)

    def _encode(self, prompt: Prompt, *, first: bool) -> tuple[str | None, list[int]]:
        """Text and tokens of a prompt, checked."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InferenceError("the model has no tokenizer.json; give token ids")
            text, tokens = prompt, self.tokenizer.encode(prompt, special=first)
        else:
            ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
            text, tokens = None, list(ids)
        if not tokens:
            raise InferenceError("a prompt is empty; give at least one token")
        if not all(0 <= token < self.architecture.vocab_size for token in tokens):
            size = self.architecture.vocab_size
            raise InferenceError(f"a prompt has token ids outside 0..{size - 1}")
        return text, tokens

    def _schedule(self, request_ids: Collection[str] | None) -> list[Sequence]:
        """Requests of the next pass, by cache row: those with prompt tokens left, else all."""

        def takes_part(sequence: Sequence) -> bool:
            return request_ids is None or sequence.request_id in request_ids

        waiting = (s for s in self._waiting.values() if takes_part(s))
        for sequence in list(islice(waiting, len(self._free_rows))):
            del self._waiting[sequence.request_id]
            self._place(sequence)
        running = [s for s in self._placed.values() if s.runnable and takes_part(s)]
        if not running and any(takes_part(s) for s in self._waiting.values()):
            raise InferenceError(_NO_ROW.format(self.options.max_num_seqs))
        running.sort(key=lambda s: s.row or 0)  # a full dense cache is read in place
        return [s for s in running if s.prefilling] or running

    def _place(self, sequence: Sequence) -> None:
        """Give a request a cache row."""
        if not self._free_rows:
            raise InferenceError(_NO_ROW.format(self.options.max_num_seqs))
        sequence.row = self._free_rows.pop()
        self._placed[sequence.request_id] = sequence

    def _free(self, sequence: Sequence) -> None:
        """Take the cache row of a request back."""
        assert sequence.row is not None
        self._runner.free(sequence.row)
        self._free_rows.append(sequence.row)

    def _advance(self, batch: list[Sequence]) -> None:
        """Compute a pass and sample a token for each sequence whose prompt is complete."""
        if not batch:
            return
        logits = self._runner.step(batch)
        ready = [index for index, s in enumerate(batch) if not s.prefilling]
        chosen = [batch[index] for index in ready]
        tokens = sample(logits[ready], [s.params for s in chosen], [s.generator for s in chosen])
        for sequence, token in zip(chosen, tokens, strict=True):
            params = sequence.params
            stops = frozenset() if params.ignore_eos else self._stop_ids
            longest = self.architecture.max_position_embeddings
            sequence.append(token, stops | frozenset(params.stop_token_ids), longest)
            if params.stop and self.tokenizer is not None:
                tokenizer, start = self.tokenizer, sequence.prompt_end
                if tokenizer.reached(sequence.tokens, start, params.stop):
                    sequence.finish_reason = "stop"

    def _output(self, sequence: Sequence) -> RequestOutput:
        ids = sequence.output
        before = sequence.tokens[: sequence.prompt_end]
        text = "" if self.tokenizer is None else self.tokenizer.continuation(before, ids)
        text = until(text, sequence.params.stop)
        reason = sequence.finish_reason
        return RequestOutput(
            request_id=sequence.request_id,
            prompt=sequence.prompt,
            prompt_token_ids=sequence.tokens[sequence.prompt_start : sequence.prompt_end],
            outputs=[CompletionOutput(index=0, text=text, token_ids=ids, finish_reason=reason)],
            finished=reason is not None,
            kv=sequence.meter.report(sequence.computed),
        )
