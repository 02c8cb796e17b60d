"""Engine that serves requests with one model and its cache: `add_request`, `step`, `abort`."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from dms_train.hf.directory import resolve
from dms_train.inference.accounting import TotalKV
from dms_train.inference.devices import launches, launches_on, require_device
from dms_train.inference.errors import InferenceError
from dms_train.inference.kv_cache_manager import KVCacheManager
from dms_train.inference.models.loader import LoadedModel, load_model
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.outputs import RequestOutput
from dms_train.inference.policies.registry import check_policy
from dms_train.inference.request_builder import Prompt, RequestBuilder, checked_params
from dms_train.inference.runner import DecodeBurst, Launched, ModelRunner
from dms_train.inference.sampler import sample
from dms_train.inference.scheduler import Schedule, Scheduler
from dms_train.inference.sequence import Request, Sequence
from dms_train.inference.sequence_state import FINISHED
from dms_train.inference.text_reader import TextReader, TextStates
from dms_train.inference.tokenizer import Tokenizer, read_stop_ids


class InferenceEngine:
    """Engine that continues requests, one step at a time.

    Requests wait, in the order of priority and arrival, until they fit into the cache. From then
    on, a request takes part in every step until it finishes or is aborted. If the cache is full,
    the most recent requests are preempted and computed again later; their tokens stay the same.

    Args:
        model: Directory or hub id (local cache only) of a model in `families`, dense or exported
            with DMS. A loaded model is accepted too; it then has no tokenizer.
        options: Options of the engine.

    Attributes:
        options: As given.
        architecture: Sizes of the model.
        spec: Method the model was trained with; None for a dense model.
        dtype: Dtype of weights and computation.
        tokenizer: The model's tokenizer; None if its directory has none.
        decoded_steps: Captured decode steps so far.
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
        self._cache_manager = KVCacheManager(self._runner.cache, options)
        self._scheduler: Scheduler[Sequence] = Scheduler(self._runner.limits, self._cache_manager)
        self._builder = RequestBuilder(
            self.tokenizer,
            stop_ids=frozenset() if directory is None else read_stop_ids(directory),
            vocab_size=self.architecture.vocab_size,
            longest=self.longest,
        )
        self._reader = TextReader(self._runner, self._scheduler, self._builder)
        self._requests: dict[str, Request] = {}
        self._launched: list[Launched] = []  # in launch order; their tokens are still on the device
        self.decoded_steps = 0
        self._advanced: list[Sequence] = []  # their outputs have not been returned yet

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return self._runner.longest

    @property
    def kv(self) -> TotalKV | None:
        """Cost of the cache so far; None before any request has finished."""
        return self._runner.total.report()

    @property
    def preemptions(self) -> int:
        """Number of preemptions so far."""
        return self._scheduler.preemptions

    @property
    def decoding(self) -> int:
        """Number of unfinished sequences whose prompts have been computed."""
        admitted = self._scheduler.admitted
        return sum(not s.prefilling and s.status is not FINISHED for s in admitted)

    @property
    def unfinished(self) -> int:
        """Number of sequences that wait or run."""
        admitted = self._scheduler.admitted
        return len(self._scheduler.waiting) + sum(s.status is not FINISHED for s in admitted)

    @property
    def free_batch_slots(self) -> int:
        """Number of batch slots without a sequence."""
        return len(self._scheduler.free_batch_slots)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the memory that holds tokens now, with page tables and linear states."""
        cache = self._runner.cache
        return cache.allocated_bytes + (0 if cache.states is None else cache.states.nbytes)

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
            params: Sampling parameters.
            priority: Lower values go first.
            timeout_s: Seconds after which the request ends with the tokens it has.
            final_only: Return the request from `step` only when it has finished.
            keep_cache: Keep the cache of the finished request until `abort`.

        Returns:
            Request id, a number in the order of arrival.

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
        """Queue continuations of a prompt to compute their log-probabilities.

        Nothing is generated. The prompt is computed once, through the same cache as in generation.
        `step` returns the request when it has finished: `outputs` has an entry for each
        continuation, with its tokens and their `scores`.

        Args:
            prompt: As in `add_request`.
            continuations: Token ids, each at least one token.

        Returns:
            Request id, as in `add_request`.

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
            sequence.append_given(continuation)
            self._scheduler.add(sequence)
        return request.request_id

    def open_conversation(self) -> str:
        """Open a request; `add_turn` adds its prompts. Return its id.

        Its cache is kept from turn to turn until `abort`. If another request needs the memory, the
        cache is freed and computed again at the next turn.
        """
        request = self._builder.request(SamplingParams())
        request.final_only = request.keep_cache = True
        self._requests[request.request_id] = request
        return request.request_id

    def add_turn(self, request_id: str, prompt: Prompt, params: SamplingParams | None) -> None:
        """Queue the next prompt of a conversation, which follows all of its tokens so far.

        Args:
            request_id: From `open_conversation`; the last turn must have finished.
            prompt: Text or token ids of this turn only.
            params: Sampling parameters; `n` must be 1.

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
            if sequence.batch_slot is None:
                self._scheduler.remove(sequence)  # a preempted sequence is queued already
                self._scheduler.add(sequence)
            else:
                self._cache_manager.assign(sequence)

    @launches
    def capture(self) -> None:
        """Capture the decode steps of all batch sizes as CUDA graphs, where a GPU runs them.

        Otherwise each is captured when a batch of its size first needs it, which takes about a
        second and longer if kernels must be compiled.
        """
        self._runner.capture()

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has work."""
        return bool(self._launched or self._advanced) or self._scheduler.has_work

    @launches
    def step(self, request_ids: Collection[str] | None = None) -> list[RequestOutput]:
        """Compute one token of every decoding sequence, and parts of prompts within the limits.

        A step decodes up to `decode_steps` tokens of each sequence. This needs requests that are
        returned only when they have finished, keep no cache, and are sampled on the device.

        A request that finishes frees its cache, unless it was added with `keep_cache`. If the step
        fails, its requests are aborted, because their cache is incomplete.

        On a GPU, a step launches its decode steps, then its prompts, and returns the tokens of the
        previous step. If a sequence needs the host for sampling, the host waits for that sequence
        and for the prompts of the step.

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

    @launches
    def abort(self, request_id: str) -> None:
        """Forget a request and free its cache at once; ignore an unknown id."""
        request = self._requests.pop(request_id, None)
        with ExitStack() as stack:  # run all callbacks even if one of them fails
            stack.callback(self._cache_manager.forget, request_id)
            for sequence in request.sequences if request is not None else ():
                self._discard(sequence)
                stack.callback(self._scheduler.remove, sequence)

    def has_request(self, request_id: str) -> bool:
        """Return whether a request is waiting, running, or finished with its cache kept."""
        return request_id in self._requests

    def live_positions(self, request_id: str) -> list[list[Tensor]] | None:
        """Return the positions of the tokens of a request that the cache holds now.

        Args:
            request_id: Request id; the first of several continuations counts.

        Returns:
            int64 [live] on the CPU for each KV head of each layer with keys and values. None while
            the request waits, or if the cache keeps no positions.

        Raises:
            InferenceError: There is no such request.
        """
        if request_id not in self._requests:
            raise InferenceError(f"request {request_id}: not known, or freed")
        slot = self._requests[request_id].sequences[0].batch_slot
        return None if slot is None else self._runner.cache.positions(slot)

    @launches
    def logits(self, token_ids: list[int]) -> Tensor:
        """Compute the logits at every token of a text through the cache.

        Args:
            token_ids: The text.

        Returns:
            float [len(token_ids), vocab].

        Raises:
            InferenceError: As in `hidden_states`.
        """
        self._receive_launched()
        return self._reader.logits(token_ids)

    @launches
    def hidden_states(self, texts: list[list[int]]) -> list[TextStates]:
        """Compute the last hidden states at every token of texts; return them on the host.

        The product of the hidden states and `head` is the logits, which take much more memory. As
        many texts are computed at a time as the options allow.

        Args:
            texts: Token ids of each text.

        Returns:
            States and cost of each text, in the order of the texts.

        Raises:
            InferenceError: A text is empty, too long or not of this vocabulary, or the cache is
                too small for it.
        """
        self._receive_launched()
        return self._reader.hidden_states(texts)

    @property
    def head(self) -> Tensor:
        """Weight of the output layer, [vocab, hidden]."""
        return self._runner.model.decoder.lm_head.weight

    def _sequences(self, request_ids: Collection[str] | None) -> set[Sequence] | None:
        """Return the sequences of these requests; None for all."""
        if request_ids is None:
            return None
        known = (self._requests[i] for i in request_ids if i in self._requests)
        return {sequence for request in known for sequence in request.sequences}

    def _finish(self, sequence: Sequence) -> None:
        """Count a finished sequence, and free its cache unless it is kept."""
        self._runner.total.finish(sequence.meter.report())
        self._cache_manager.finish(sequence)
        if not self._requests[sequence.request_id].keep_cache:
            self._scheduler.remove(sequence)

    def _advance(self, plan: Schedule[Sequence]) -> None:
        """Compute a planned step, and sample the next tokens.

        Args:
            plan: The step. In-flight tokens of the sequences that it ends are still received.
        """
        before = self._launched
        decoding: list[Sequence] = []
        rest: list[tuple[Sequence, int]] = []
        for sequence, count in plan.batch:
            if self._runner.can_sample(sequence):
                decoding.append(sequence)
            else:
                rest.append((sequence, count))
        launched: list[Launched] = []
        if decoding:
            bursts = self._can_burst(decoding, rest)
            steps = self._scheduler.burst_steps(plan, decoding) if bursts else 1
            launched.append(self._runner.launch(decoding, steps))
        self._launched = launched  # `_give_up` waits for the ones before if a launch fails
        host_knows_tokens = not any(sequence.num_inflight_tokens for sequence, _ in rest)
        if rest and host_knows_tokens and self._runner.can_sample_all(rest):
            self._launched.append(self._runner.launch_pass(rest))
            self._snapshot(rest)
            rest = []
        self._receive(before)
        for sequence in plan.ended:
            self._discard(sequence)
        self._advanced += plan.ended
        rest = [part for part in rest if part[0].status is not FINISHED]
        if rest:
            self._compute(rest)

    def _can_burst(self, decoding: list[Sequence], rest: list[tuple[Sequence, int]]) -> bool:
        """Return whether a burst may run: it delays prompts only, and no request is streamed."""
        if self.options.enable_prefix_caching or not all(s.prefilling for s, _ in rest):
            return False
        taking_part = [*decoding, *(sequence for sequence, _ in rest)]
        return all(self._requests[s.request_id].allows_bursts for s in taking_part)

    def _outputs(self, sequences: list[Sequence]) -> list[RequestOutput]:
        """Return the outputs of advanced sequences, and free sequences that have ended."""
        ended = [sequence for sequence in sequences if sequence.status is FINISHED]
        for sequence in ended:
            sequence.text.finish()
        ids = dict.fromkeys(sequence.request_id for sequence in sequences)
        requests = [self._requests[request_id] for request_id in ids]
        outputs = [r.to_output() for r in requests if r.finished or not r.final_only]
        for sequence in ended:
            self._finish(sequence)
        for request in requests:
            if request.finished:
                self._cache_manager.forget(request.request_id)
            if request.finished and not request.keep_cache:
                del self._requests[request.request_id]
        return outputs

    def _give_up(self, plan: Schedule[Sequence], others: list[Sequence]) -> None:
        """Abort the requests of a failed step and of `others`."""
        launched, self._launched = self._launched, []
        computed = [sequence for sequence, _ in plan.batch]
        failed = [*computed, *plan.admitted, *plan.ended, *others]
        ids = dict.fromkeys(sequence.request_id for sequence in failed)
        self._advanced = [s for s in self._advanced if s.request_id not in ids]
        with ExitStack() as stack:  # runs all callbacks, the last one first
            for part in launched:  # the inputs of a running graph must not change
                stack.callback(self._runner.wait, part)
            for request_id in ids:
                stack.callback(self.abort, request_id)

    def _compute(self, batch: list[tuple[Sequence, int]]) -> None:
        """Compute a pass whose tokens the host samples."""
        forward_pass = self._runner.step(batch)
        self._snapshot(batch)
        chosen = [sequence for sequence, _ in batch if sequence.is_sampled]
        sampled = sample(forward_pass.logits, [s.sampling_row() for s in chosen]) if chosen else []
        self._runner.count(forward_pass)
        self._advanced += [sequence for sequence, _ in batch]
        for sequence, _ in batch:
            if sequence.score_only and not sequence.remaining:
                self._observe(sequence)
                sequence.finish("length")
        for sequence, token in zip(chosen, sampled, strict=True):
            self._observe(sequence)
            sequence.append(token)

    def _snapshot(self, batch: list[tuple[Sequence, int]]) -> None:
        """Take the snapshots that are planned after this pass."""
        for sequence, _ in batch:
            self._cache_manager.take_planned(sequence)

    def _receive(self, launched: list[Launched]) -> None:
        """Receive the tokens of launched bursts and passes."""
        for part in launched:
            if isinstance(part, DecodeBurst):
                self.decoded_steps += part.steps
            for sequence in self._runner.receive(part):
                self._observe(sequence)
                self._advanced.append(sequence)
                if sequence.status is FINISHED:
                    self._discard(sequence)

    def _receive_launched(self) -> None:
        """Receive the tokens of all launched steps."""
        launched, self._launched = self._launched, []
        self._receive(launched)

    def _discard(self, sequence: Sequence) -> None:
        """Drop the in-flight tokens of a sequence that has ended."""
        sequence.num_inflight_tokens = 0
        for part in self._launched:
            part.unwanted.add(sequence)

    def _observe(self, sequence: Sequence) -> None:
        self._scheduler.observe(sequence.meter.tokens, sequence.meter.live_tokens)

    def _report(self, allowed: Collection[Sequence] | None) -> list[Sequence]:
        """Return the sequences that have advanced and are reported now.

        Unfinished sequences are left out if their request is returned only when it has finished.
        """
        now: list[Sequence] = []
        later: list[Sequence] = []
        for sequence in dict.fromkeys(self._advanced):
            request = self._requests.get(sequence.request_id)
            if request is not None and (sequence.status is FINISHED or not request.final_only):
                (now if allowed is None or sequence in allowed else later).append(sequence)
        self._advanced = later
        return now
