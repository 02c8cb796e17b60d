"""`LLM(path).generate(prompts, SamplingParams(...))`: the room's public face."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
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
Prompts = Prompt | list[Prompt] | list[str] | list[list[int]]


class LLM:
    """A model that continues prompts.

    Args:
        model: Directory or hub id (local cache only): Llama, Qwen2 or Qwen3, dense or exported
            with DMS.
        options: How to run it; single values can be given by name instead.
        **overrides: Fields of `EngineOptions`.
    """

    def __init__(
        self, model: str | Path, options: EngineOptions | None = None, **overrides: Any
    ) -> None:
        if options is not None and overrides:
            raise InferenceError("options and single values: give one or the other")
        self.options = options or EngineOptions(**overrides)
        directory = resolve(model)
        loaded = load_model(directory, dtype=self.options.dtype, device=self.options.device)
        self.architecture, self.spec, self.dtype = loaded.architecture, loaded.spec, loaded.dtype
        self.tokenizer = Tokenizer.load(directory)
        self._stop_ids = read_stop_ids(directory)
        self._runner = ModelRunner(loaded, self.options)
        self._free_rows = list(range(self.options.max_num_seqs - 1, -1, -1))
        self._requests = 0

    @property
    def kv(self) -> TotalKV | None:
        """What the cache has cost so far; None before any request has finished."""
        return self._runner.total.report()

    @property
    def allocated_bytes(self) -> int:
        """Bytes the cache takes from the system now, page tables included."""
        return self._runner.cache.allocated_bytes

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: Texts, token id lists or `{"prompt_token_ids": [...]}`; one or several.
            sampling_params: One for all, or one for each prompt.

        Returns:
            One output per prompt, in their order.

        Raises:
            InferenceError: A prompt is empty, too long or not of this vocabulary.
        """
        sequences = self._sequences(prompts, sampling_params)
        outputs: dict[str, RequestOutput] = {}
        for batch in self._passes(sequences):
            done = [s for s in batch if s.finish_reason is not None]
            outputs |= {s.request_id: self._finish(s) for s in done}
        return [outputs[s.request_id] for s in sequences]

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
    ) -> Iterator[list[RequestOutput]]:
        """As `generate`, one forward pass at a time.

        Args:
            prompts: As in `generate`.
            sampling_params: As in `generate`.

        Returns:
            For each pass, the requests that took part: their tokens so far and what the cache
            holds for them now. The cache of a finished request is freed before the next pass.
        """
        sequences = self._sequences(prompts, sampling_params)
        return (
            [self._output(s) if s.finish_reason is None else self._finish(s) for s in batch]
            for batch in self._passes(sequences)
        )

    def conversation(self) -> Conversation:
        """A conversation whose cache lives from turn to turn; close it to free its row."""
        if not self._free_rows:
            raise InferenceError(f"max_num_seqs={self.options.max_num_seqs}: all rows are in use")
        return Conversation(self, self._free_rows.pop())

    def logits(self, token_ids: list[int]) -> Tensor:
        """Logits at every token of a text, computed through the cache.

        Args:
            token_ids: The text.

        Returns:
            float [len(token_ids), vocab].
        """
        sequence = self._sequence(token_ids, SamplingParams(), room=0)
        if not self._free_rows:
            raise InferenceError("every row is held by a conversation; close one")
        sequence.row = self._free_rows.pop()
        parts = []
        while sequence.prefilling:
            parts.append(self._runner.step([sequence], every=True)[0])
        self._finish(sequence)
        self._release(sequence.row)
        return torch.cat(parts)

    def _sequences(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | list[SamplingParams] | None,
    ) -> list[Sequence]:
        """A sequence per prompt; refuses all when one is bad."""
        items = _as_list(prompts)
        params = sampling_params or SamplingParams()
        each = params if isinstance(params, list) else [params] * len(items)
        if len(each) != len(items):
            raise InferenceError(f"{len(items)} prompts but {len(each)} sampling_params")
        return [self._sequence(p, how) for p, how in zip(items, each, strict=True)]

    def _passes(self, sequences: list[Sequence]) -> Iterator[list[Sequence]]:
        """Run sequences to their end; yields those of each pass, then frees the finished ones."""
        waiting, running = deque(sequences), list[Sequence]()
        try:
            while waiting or running:
                while waiting and self._free_rows:
                    waiting[0].row = self._free_rows.pop()
                    running.append(waiting.popleft())
                running.sort(key=lambda s: s.row or 0)  # a full dense cache is read in place
                if not running:
                    raise InferenceError("every row is held by a conversation; close one")
                yield self._advance(running)
                done = [s for s in running if s.finish_reason is not None]
                running = [s for s in running if s.finish_reason is None]
                for sequence in done:
                    self._release(sequence.row)
        finally:
            for sequence in running:
                self._release(sequence.row)

    def _sequence(self, prompt: Prompt, params: SamplingParams, *, room: int = 1) -> Sequence:
        text, tokens = self._encode(prompt)
        self._check_length(len(tokens), room)
        if params.stop and self.tokenizer is None:
            raise InferenceError("stop: the model has no tokenizer.json; use stop_token_ids")
        generator = torch.Generator()
        generator.seed() if params.seed is None else generator.manual_seed(params.seed)
        self._requests += 1
        return Sequence(
            request_id=str(self._requests - 1),
            prompt=text,
            tokens=tokens,
            prompt_start=0,
            prompt_end=len(tokens),
            params=params,
            generator=generator,
            meter=Meter(),
        )

    def _encode(self, prompt: Prompt, *, first: bool = True) -> tuple[str | None, list[int]]:
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

    def _check_length(self, tokens: int, room: int = 1) -> None:
        longest = self.architecture.max_position_embeddings
        if tokens + room > longest:
            raise InferenceError(f"a prompt of {tokens} tokens: the model takes {longest}")

    def _advance(self, running: list[Sequence]) -> list[Sequence]:
        """One forward pass: prompts first, otherwise everyone's next token. Returns its batch."""
        batch = [s for s in running if s.prefilling] or running
        logits = self._runner.step(batch)
        ready = [index for index, s in enumerate(batch) if not s.prefilling]
        chosen = [batch[index] for index in ready]
        tokens = sample(logits[ready], [s.params for s in chosen], [s.generator for s in chosen])
        for sequence, token in zip(chosen, tokens, strict=True):
            how = sequence.params
            stops = frozenset() if how.ignore_eos else self._stop_ids
            longest = self.architecture.max_position_embeddings
            sequence.append(token, stops | frozenset(how.stop_token_ids), longest)
            text, start = self.tokenizer, sequence.prompt_end
            if how.stop and text is not None and text.reached(sequence.tokens, start, how.stop):
                sequence.finish_reason = "stop"
        return batch

    def _finish(self, sequence: Sequence) -> RequestOutput:
        output = self._output(sequence)
        self._runner.total.finish(output.kv)
        return output

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

    def _release(self, row: int | None) -> None:
        assert row is not None
        self._runner.free(row)
        self._free_rows.append(row)


class Conversation:
    """Turns that continue one cache: what was evicted in an earlier turn stays evicted.

    Made by `LLM.conversation`; use it as a context manager or call `close`.
    """

    def __init__(self, llm: LLM, row: int) -> None:
        self._llm, self._row = llm, row
        self._sequence: Sequence | None = None
        self._open = True

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Add a prompt to what was said and generated so far, and continue.

        Args:
            prompt: Text or token ids of this turn only.
            sampling_params: How to continue.
        """
        if not self._open:
            raise InferenceError("the conversation is closed; start another one")
        params = sampling_params or SamplingParams()
        if self._sequence is None:
            self._sequence = self._llm._sequence(prompt, params)
            self._sequence.row = self._row
        else:
            self._continue(self._sequence, prompt, params)
        while self._sequence.finish_reason is None:
            self._llm._advance([self._sequence])
        return self._llm._finish(self._sequence)

    def _continue(self, sequence: Sequence, prompt: Prompt, params: SamplingParams) -> None:
        text, tokens = self._llm._encode(prompt, first=False)
        self._llm._check_length(len(sequence.tokens) + len(tokens))
        sequence.prompt, sequence.params = text, params
        sequence.prompt_start = len(sequence.tokens)
        sequence.tokens += tokens
        sequence.prompt_end = len(sequence.tokens)
        sequence.finish_reason = None
        sequence.meter.restart()
        if params.seed is not None:
            sequence.generator.manual_seed(params.seed)

    def close(self) -> None:
        """Free the cache; further turns are refused."""
        if self._open:
            self._open = False
            self._llm._release(self._row)


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list."""
    single = isinstance(prompts, str | dict)
    tokens = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int)
    if single or tokens:
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InferenceError("prompts: give text, token ids or a list of either")
    return list(prompts)
