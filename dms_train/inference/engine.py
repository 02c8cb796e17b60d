"""Requests over one model and its cache: `add_request`, `step`, `abort`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from dms_train.hf.directory import resolve
from dms_train.inference.accounting import TotalKV
from dms_train.inference.devices import launches_on, require_device
from dms_train.inference.errors import InferenceError
from dms_train.inference.models.loader import LoadedModel, load_model
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.outputs import RequestOutput
from dms_train.inference.policies.registry import check_policy
from dms_train.inference.request_builder import Prompt, RequestBuilder, checked_params
from dms_train.inference.row_memory import RowMemory
from dms_train.inference.runner import DecodeGroup, Launched, ModelRunner
from dms_train.inference.sampler import sample
from dms_train.inference.scheduler import Schedule, Scheduler
from dms_train.inference.sequence import Request, Sequence
from dms_train.inference.tokenizer import Tokenizer, read_stop_ids

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _launches(
    method: Callable[Concatenate[InferenceEngine, Arguments], Result],
) -> Callable[Concatenate[InferenceEngine, Arguments], Result]:
    """A method that launches kernels, on the engine's device in any thread."""

    @wraps(method)
    def launched(
        self: InferenceEngine, /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        with launches_on(self.options.device):
            return method(self, *args, **kwargs)

    return launched


class InferenceEngine:
    """Continues requests, one step at a time.

    A request waits until it fits into the cache, by priority and order of arrival. From then on
    it takes part in every step until it finishes or is aborted. Where the cache becomes full, the
    last requests lose their part of it and compute it again later; their tokens stay the same.

    Args:
        model: Directory or hub id (local cache only), of a family in `families`, dense or exported
            with DMS; or a model that is loaded already, which has no tokenizer here.
        options: How to run it.

    Attributes:
        options: As given.
        architecture: Sizes of the model.
        spec: What the model was trained for; None for a dense model.
        dtype: Of weights and computation.
        tokenizer: The model's tokenizer; None if its directory has none.
        decoded_steps: Decode steps of the kernels so far.
    """

    def __init__(self, model: str | Path | LoadedModel, options: EngineOptions) -> None:
        directory = None
        check_policy(options.policy, options.policy_options)
        require_device(options.device)
        if isinstance(model, LoadedModel):
            loaded = model
        else:
            directory = resolve(model)
            loaded = load_model(directory, dtype=options.dtype, device=options.device)
        self.options = options
        self.architecture, self.spec, self.dtype = loaded.architecture, loaded.spec, loaded.dtype
        self.tokenizer = None if directory is None else Tokenizer.load(directory)
        with launches_on(options.device):
            self._runner = ModelRunner(loaded, options)
        self._memory = RowMemory(self._runner.cache, options)
        self._scheduler: Scheduler[Sequence] = Scheduler(self._runner.limits, self._memory)
        self._builder = RequestBuilder(
            self.tokenizer,
            stop_ids=frozenset() if directory is None else read_stop_ids(directory),
            vocab_size=self.architecture.vocab_size,
            longest=self.longest,
        )
        self._requests: dict[str, Request] = {}
        self._launched: list[Launched] = []  # in this order; their tokens are not known yet
        self.decoded_steps = 0
        self._advanced: list[Sequence] = []  # whose outputs have not been returned yet

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return self._runner.longest

    @property
    def kv(self) -> TotalKV | None:
        """What the cache has cost so far; None before any request has finished."""
        return self._runner.total.report()

    @property
    def preemptions(self) -> int:
        """How often a sequence lost its part of the cache and had to compute it again."""
        return self._scheduler.preemptions

    @property
    def decoding(self) -> int:
        """Sequences whose prompts are computed and that have not finished."""
        placed = self._scheduler.placed
        return sum(not s.prefilling and s.finish_reason is None for s in placed)

    @property
    def unfinished(self) -> int:
        """Sequences that wait or run."""
        placed = self._scheduler.placed
        return len(self._scheduler.waiting) + sum(s.finish_reason is None for s in placed)

    @property
    def free_rows(self) -> int:
        """Cache rows that no sequence has."""
        return len(self._scheduler.free_rows)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the memory that holds tokens now, page tables included."""
        return self._runner.cache.allocated_bytes

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        final_only: bool = False,
        keep_cache: bool = False,
    ) -> str:
        """Queue a prompt.

        Args:
            prompt: Text, token ids or `{"prompt_token_ids": [...]}`.
            params: How to continue it.
            priority: Lower ones go first.
            timeout_s: Seconds after which it ends with what it has.
            final_only: Have `step` return the request only when it has finished.
            keep_cache: Keep the cache of the finished request until `abort`.

        Returns:
            Its id, a number in the order of arrival.

        Raises:
            InferenceError: The prompt is empty, too long or not of this vocabulary.
        """
        params = checked_params(params)
        request = self._builder.request(params, priority=priority, timeout_s=timeout_s)
        request.final_only, request.keep_cache = final_only, keep_cache
        self._builder.add_prompt(request, prompt, params, new_tokens=1 if params.max_tokens else -1)
        self._requests[request.request_id] = request
        for sequence in request.sequences:
            self._scheduler.add(sequence)
        return request.request_id

    def add_scoring(self, prompt: Prompt, continuations: list[list[int]]) -> str:
        """Queue continuations of a prompt whose log-probabilities are wanted.

        Nothing is generated. The prompt is computed once, with the cache as the model has it when
        it generates; the continuations start from there. `step` returns the request when it has
        finished: `outputs` has an entry for each continuation, with its tokens and their
        `scores`.

        Args:
            prompt: As in `add_request`.
            continuations: Token ids, each at least one token.

        Returns:
            Its id, as in `add_request`.

        Raises:
            InferenceError: As in `add_request`; there is no continuation, or an empty one.
        """
        given = [self._builder.checked_ids("continuations", each) for each in continuations]
        longest = max(map(len, given), default=0)
        if not all(given) or not longest:
            raise InferenceError("a continuation is empty; give at least one token")
        params = SamplingParams(n=len(given), max_tokens=longest)
        request = self._builder.request(params)
        request.final_only = True
        self._builder.add_prompt(request, prompt, params, new_tokens=longest - 1)
        self._requests[request.request_id] = request
        for sequence, continuation in zip(request.sequences, given, strict=True):
            sequence.give(continuation)
            self._scheduler.add(sequence)
        return request.request_id

    def open_conversation(self) -> str:
        """Prepare a request whose prompts come with `add_turn`; its id.

        Its cache is kept from turn to turn until `abort`. If another request needs the memory, the
        cache is freed and computed again at the next turn.
        """
        request = self._builder.request(SamplingParams())
        request.final_only = request.keep_cache = True
        self._requests[request.request_id] = request
        return request.request_id

    def add_turn(self, request_id: str, prompt: Prompt, params: SamplingParams | None) -> None:
        """Give the next prompt of a conversation, which follows all of its tokens so far.

        Args:
            request_id: From `open_conversation`; its last turn has finished.
            prompt: Text or token ids of this turn only.
            params: How to continue it; `n` must be 1.

        Raises:
            InferenceError: The conversation was aborted, or as in `add_request`.
        """
        if request_id not in self._requests:
            raise InferenceError("the conversation is closed; start another one")
        params = checked_params(params)
        if params.n != 1:
            raise InferenceError(f"n={params.n}: a conversation has one continuation")
        if params.prompt_logprobs is not None:
            raise InferenceError("prompt_logprobs: not in a conversation; use add_request")
        request = self._requests[request_id]
        self._builder.add_prompt(request, prompt, params)
        for sequence in request.sequences:
            if sequence.row is None:
                self._scheduler.remove(sequence)  # it waits already if its cache was taken
                self._scheduler.add(sequence)
            else:
                self._memory.assign(sequence)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._launched or self._advanced) or self._scheduler.has_work

    @_launches
    def step(self, request_ids: Collection[str] | None = None) -> list[RequestOutput]:
        """Compute one token of every decoding sequence, and parts of prompts within the limits.

        Kernels compute up to `decode_steps` tokens of every decoding sequence where all requests
        are returned when they have finished and keep no cache, and the kernels sample all of them.

        A request that finishes frees its cache, unless it was added with `keep_cache`. If the step
        fails, its requests are aborted, because their cache is incomplete.

        On a GPU the tokens of decoding sequences are only started; those of the step before are
        returned. Prompts are started behind them. Sequences whose sampling needs the host are
        computed there too, with the prompts of the step, and the host waits for them.

        Args:
            request_ids: Requests that may take part; None for all.

        Returns:
            Outputs of the requests that advanced or ended; empty if there are none.
        """
        allowed = self._sequences(request_ids)
        plan: Schedule[Sequence] = Schedule()
        before, taking_part = self._launched, []
        try:
            self._scheduler.schedule(time.monotonic(), allowed, plan)
            self._advance(plan)
            taking_part = self._report(allowed)
            return self._outputs(taking_part)
        except BaseException:
            in_flight = [sequence for part in before for sequence in part.sequences]
            self._give_up(plan, [*in_flight, *taking_part])
            raise

    @_launches
    def abort(self, request_id: str) -> None:
        """Forget a request and free its cache at once; an id that is not known is ignored."""
        request = self._requests.pop(request_id, None)
        with ExitStack() as stack:  # everything is forgotten, even if something cannot be freed
            stack.callback(self._memory.forget, request_id)
            for sequence in request.sequences if request is not None else ():
                self._discard(sequence)
                stack.callback(self._scheduler.remove, sequence)

    def has_request(self, request_id: str) -> bool:
        """Whether a request is waiting, running, or finished with its cache kept."""
        return request_id in self._requests

    def live_positions(self, request_id: str) -> list[list[Tensor]] | None:
        """Which tokens of a request the cache holds now, as positions from its beginning.

        Args:
            request_id: Of a request; with several continuations the first one counts.

        Returns:
            int64 [live] on the CPU for each layer and KV head; None while the request waits, and
            where the cache does not keep positions.

        Raises:
            InferenceError: There is no such request.
        """
        if request_id not in self._requests:
            raise InferenceError(f"request {request_id}: not known, or freed")
        row = self._requests[request_id].sequences[0].row
        return None if row is None else self._runner.cache.positions(row)

    @_launches
    def logits(self, token_ids: list[int]) -> Tensor:
        """Logits at every token of a text, computed through the cache.

        Args:
            token_ids: The text.

        Returns:
            float [len(token_ids), vocab].

        Raises:
            InferenceError: As `hidden_states`.
        """
        to_logits = self._runner.model.decoder.logits
        return torch.cat([to_logits(hidden) for hidden in self._read(token_ids)])

    @_launches
    def hidden_states(self, token_ids: list[int]) -> Tensor:
        """Last hidden states at every token of a text, on the host.

        Their product with `head` are the logits. They take little space beside these.

        Args:
            token_ids: The text.

        Returns:
            [len(token_ids), hidden] in the dtype of the model.

        Raises:
            InferenceError: The text is empty, too long or not of this vocabulary, or the cache is
                too small for it.
        """
        return torch.cat([hidden.cpu() for hidden in self._read(token_ids)])

    @property
    def head(self) -> Tensor:
        """Weight of the output layer, [vocab, hidden]."""
        return self._runner.model.decoder.lm_head.weight

    def _read(self, token_ids: list[int]) -> Iterator[Tensor]:
        """Hidden states of the parts of a text; each is valid until the next one."""
        before, self._launched = self._launched, []
        self._receive(before)
        request = self._builder.request(SamplingParams())
        self._builder.add_prompt(request, token_ids, SamplingParams(), new_tokens=0)
        (sequence,) = request.sequences
        self._scheduler.add(sequence)
        try:
            while sequence.remaining:
                plan = self._scheduler.schedule(time.monotonic(), {sequence})
                if not plan.batch:
                    raise InferenceError("the cache is too small for the text; raise cache_bytes")
                done = self._runner.step(plan.batch, hidden_states=True)
                assert done.hidden is not None
                yield done.hidden
                self._runner.count(done)
            self._runner.total.finish(sequence.meter.report())
        finally:
            self._scheduler.remove(sequence)

    def _sequences(self, request_ids: Collection[str] | None) -> set[Sequence] | None:
        """The sequences of these requests; None for all."""
        if request_ids is None:
            return None
        known = (self._requests[i] for i in request_ids if i in self._requests)
        return {sequence for request in known for sequence in request.sequences}

    def _finish(self, sequence: Sequence) -> None:
        """Count a sequence that has ended, and free its cache unless it is to be kept."""
        self._runner.total.finish(sequence.meter.report())
        self._memory.finish(sequence)
        if not self._requests[sequence.request_id].keep_cache:
            self._scheduler.remove(sequence)

    def _advance(self, plan: Schedule[Sequence]) -> None:
        """Compute a step and sample a token for each sequence that has no tokens left.

        Args:
            plan: Of the step; sequences that it ends keep what is on its way for them.
        """
        before = self._launched
        decoding: list[Sequence] = []
        rest: list[tuple[Sequence, int]] = []
        for sequence, count in plan.batch:
            if self._runner.samples(sequence):
                decoding.append(sequence)
            else:
                rest.append((sequence, count))
        steps = self._scheduler.group(plan) if self._groups(decoding, rest) else 1
        self._launched = [self._runner.launch(decoding, steps)] if decoding else []
        known = not any(sequence.ahead for sequence, _ in rest)  # all of their tokens
        if rest and known and self._runner.samples_behind(rest):
            self._launched.append(self._runner.launch_pass(rest))
            self._snapshot(rest)
            rest = []
        self._receive(before)
        for sequence in plan.ended:
            self._discard(sequence)
        self._advanced += plan.ended
        rest = [part for part in rest if part[0].finish_reason is None]
        if rest:
            self._compute(rest)

    def _groups(self, decoding: list[Sequence], rest: list[tuple[Sequence, int]]) -> bool:
        """Whether a group of decode steps delays prompts only, and no request is streamed."""
        if self.options.enable_prefix_caching or not all(s.prefilling for s, _ in rest):
            return False
        taking_part = [*decoding, *(sequence for sequence, _ in rest)]
        return all(self._requests[s.request_id].grouped for s in taking_part)

    def _outputs(self, sequences: list[Sequence]) -> list[RequestOutput]:
        """Return the outputs of sequences that have advanced, and free those that have ended."""
        ended = [sequence for sequence in sequences if sequence.finish_reason is not None]
        for sequence in ended:
            sequence.text.finish()
        ids = dict.fromkeys(sequence.request_id for sequence in sequences)
        requests = [self._requests[request_id] for request_id in ids]
        outputs = [r.to_output() for r in requests if r.finished or not r.final_only]
        for sequence in ended:
            self._finish(sequence)
        for request in requests:
            if request.finished:
                self._memory.forget(request.request_id)
            if request.finished and not request.keep_cache:
                del self._requests[request.request_id]
        return outputs

    def _give_up(self, plan: Schedule[Sequence], others: list[Sequence]) -> None:
        """Abort the requests of a step that has failed, and those of `others`."""
        launched, self._launched = self._launched, []
        computed = [sequence for sequence, _ in plan.batch]
        failed = [*computed, *plan.placed, *plan.ended, *others]
        ids = dict.fromkeys(sequence.request_id for sequence in failed)
        self._advanced = [s for s in self._advanced if s.request_id not in ids]
        with ExitStack() as stack:  # all calls are made, even if some fail; the last one first
            for part in launched:  # a graph's inputs are not written while it runs
                stack.callback(self._runner.wait, part)
            for request_id in ids:
                stack.callback(self.abort, request_id)

    def _compute(self, batch: list[tuple[Sequence, int]]) -> None:
        """A pass whose tokens the host samples, with the prompts of the step."""
        done = self._runner.step(batch)
        self._snapshot(batch)
        chosen = [sequence for sequence, _ in batch if sequence.is_sampled]
        sampled = sample(done.logits, [s.sampling_row() for s in chosen]) if chosen else []
        self._runner.count(done)
        self._advanced += [sequence for sequence, _ in batch]
        for sequence, _ in batch:
            if sequence.given_only and not sequence.remaining:
                self._observe(sequence)
                sequence.finish_reason = "length"
        for sequence, token in zip(chosen, sampled, strict=True):
            self._observe(sequence)
            sequence.append(token)

    def _snapshot(self, batch: list[tuple[Sequence, int]]) -> None:
        """Take the snapshots of sequences whose next tokens are cut here."""
        for sequence, _ in batch:
            self._memory.note(sequence)

    def _receive(self, launched: list[Launched]) -> None:
        """Take the tokens of what a step has started."""
        for part in launched:
            if isinstance(part, DecodeGroup):
                self.decoded_steps += part.steps
            for sequence in self._runner.receive(part):
                self._observe(sequence)
                self._advanced.append(sequence)
                if sequence.finish_reason is not None:
                    self._discard(sequence)

    def _discard(self, sequence: Sequence) -> None:
        """Forget what is on its way for a sequence that has ended."""
        sequence.ahead = 0
        for part in self._launched:
            part.unwanted.add(sequence)

    def _observe(self, sequence: Sequence) -> None:
        self._scheduler.observe(sequence.meter.tokens, sequence.meter.live_tokens)

    def _report(self, allowed: Collection[Sequence] | None) -> list[Sequence]:
        """Sequences that have advanced, of requests that are known, to be reported now.

        Those that go on are left out where their request is returned only when it has finished.
        """
        now: list[Sequence] = []
        later: list[Sequence] = []
        for sequence in dict.fromkeys(self._advanced):
            request = self._requests.get(sequence.request_id)
            if request is not None and (sequence.finish_reason or not request.final_only):
                (now if allowed is None or sequence in allowed else later).append(sequence)
        self._advanced = later
        return now
