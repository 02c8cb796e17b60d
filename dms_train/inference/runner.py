"""One forward pass over several sequences: token ids in, logits and cache statistics out.

On a GPU, the decoding sequences of a step, or of a burst of steps, are one CUDA graph that samples
as well. The next graph can be launched before the host knows the tokens of this one. The same
kernel samples after prompts, so that the host does not wait for them either.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from dms_train.inference.accounting import BurstCounts, PassCounts, TotalMeter
from dms_train.inference.cache_builder import build_cache, longest_sequence
from dms_train.inference.decode_inputs import Floats, Integers, PackedInputs
from dms_train.inference.devices import Fetched, sent
from dms_train.inference.graphs import DecodeGraphs, LaunchedBurst
from dms_train.inference.models.batch import TokenBatch
from dms_train.inference.models.loader import LoadedModel
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.policies.local_layers import with_windows
from dms_train.inference.policies.registry import build_policy
from dms_train.inference.prompt_graphs import PromptGraphs
from dms_train.inference.sampler import signed_seed, stream_keys
from dms_train.inference.scheduler import SchedulerLimits
from dms_train.inference.scoring import score, wanted_logits
from dms_train.inference.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class DecodeBurst:
    """A burst of decode steps in flight.

    Attributes:
        sequences: Sequences that take part.
        counts: Number of steps of each sequence.
        prefill: For each sequence, True if its first step computes a prompt token.
        inputs: Inputs of the steps.
        launched: Results of the steps.
        unwanted: Sequences that have ended since the launch.
    """

    sequences: list[Sequence]
    counts: list[int]
    prefill: list[bool]
    inputs: PackedInputs
    launched: LaunchedBurst
    unwanted: set[Sequence] = field(default_factory=set)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.inputs.fields)


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPass:
    """A forward pass in flight.

    Attributes:
        logits: float [b, vocab] after the last token of each sequence that `is_sampled`, in the
            order of the batch; [0, vocab] if hidden states were requested.
        hidden: Last hidden states of all tokens, [t, hidden], valid until the next pass; None
            unless requested.
        sequences: Sequences that take part, single tokens first.
        prefill: For each sequence, True if the pass counts as prefill.
        generates: For each sequence, True if a token is sampled after the pass.
        num_computed_tokens: For each sequence, number of computed tokens after the pass.
        lists: Slots attended, tokens held and slots reserved by the KV lists of each sequence,
            int64 [3, layers, b, kv_heads].
        totals: Tokens held by all KV lists of the cache, int64 [1]; of a capturable cache [3], with
            its free pages and its fault.
        reserved: `CapturableCache.reserved_pages` after the launch; 0 for another cache.
    """

    logits: Tensor
    hidden: Tensor | None
    sequences: list[Sequence]
    prefill: list[bool]
    generates: list[bool]
    num_computed_tokens: list[int]
    lists: Tensor
    totals: Tensor
    reserved: int


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedPass:
    """A launched forward pass, followed by on-device sampling.

    Attributes:
        forward_pass: The pass.
        sampled: Sequences for which a token is sampled.
        fetched: int64, `totals` of the pass, then its `lists`, then the sampled tokens.
        unwanted: Sequences that have ended since the launch.
    """

    forward_pass: ForwardPass
    sampled: list[Sequence]
    fetched: Fetched
    unwanted: set[Sequence] = field(default_factory=set)

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences that take part."""
        return self.forward_pass.sequences


Launched: TypeAlias = DecodeBurst | LaunchedPass


class ModelRunner:
    """A model with its cache.

    Args:
        model: The model.
        options: Options of the engine.

    Attributes:
        model: As given.
        cache: Its cache.
        total: Cost of the cache so far.
        limits: Limits of a step.
        longest: Most tokens of a sequence.
    """

    def __init__(self, model: LoadedModel, options: EngineOptions) -> None:
        self.model = model
        self._device = torch.device(options.device)
        self.longest = longest_sequence(model.architecture, options)
        policy = build_policy(options.policy, options.policy_options, model.spec)
        a = model.architecture
        windows = [a.attention_layers[layer].window for layer in a.cache_layers]
        policy = with_windows(policy, options.policy, windows, sinks=a.described.sinks)
        self.cache = build_cache(model, policy, options)
        rows = torch.arange(options.max_num_seqs, device=self._device)
        self.total = TotalMeter(self.cache, rows, model.architecture.method_layers)
        self._graphs: DecodeGraphs | None = None
        self._prompts: PromptGraphs | None = None
        self._decodes_prompts = True
        self._eviction_interval: int | None = None
        cache = self._capturable = self.cache.capturable
        # with linear attention, steps are launched kernel by kernel
        if cache is not None and a.linear is None:
            self._graphs = DecodeGraphs(
                model.decoder,
                cache,
                options.max_num_seqs,
                self.longest,
                options.decode_steps,
            )
            self._decodes_prompts = cache.decodes_prompts
            self._eviction_interval = cache.eviction_interval
            if cache.captures_prompts:
                chunk = min(options.prefill_chunk, options.max_num_batched_tokens)
                self._prompts = PromptGraphs(model.decoder, cache, chunk)
        a = model.architecture
        self.limits = SchedulerLimits(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            prefill_chunk=options.prefill_chunk,
            kv_lists=len(a.cache_layers) * a.num_query_groups,
            page_slots=options.page_slots,
            window=policy.window,
            pages=self.cache.max_pages,
            decode_steps=1 if self._graphs is None else options.decode_steps,
        )

    def capture(self) -> None:
        """Capture all decode steps now, if the cache's steps can be captured."""
        if self._graphs is not None:
            self._graphs.capture()

    @torch.no_grad()
    def step(
        self, batch: list[tuple[Sequence, int]], *, hidden_states: bool = False
    ) -> ForwardPass:
        """Start to compute the next tokens of sequences, and advance `num_computed_tokens`.

        Log-probabilities of given tokens are stored in the sequences; the host waits for them.

        Args:
            batch: Admitted sequences, each with the number of tokens to compute.
            hidden_states: Return hidden states of every token instead of logits.
        """
        order = sorted(range(len(batch)), key=lambda i: (batch[i][1], batch[i][0].batch_slot))
        ordered = [batch[i] for i in order]
        wanted, sequences = wanted_logits(ordered), [sequence for sequence, _ in ordered]
        # prompt tokens, given tokens, and tokens that are computed again after a preemption
        prefill = [s.prefilling or s.score_only or s.remaining > 1 for s in sequences]
        hidden, reads = self._forward(ordered)
        rows = sent([s.batch_slot for s in sequences], self._device)
        lists = torch.stack([reads, self.cache.live(rows), self.cache.held_slots(rows)])
        totals, reserved = self._totals()
        for sequence, count in ordered:
            sequence.num_computed_tokens += count
        sampled = hidden[:0]
        if not hidden_states:
            ends = accumulate(batch[i][1] for i in order)
            ends_in_batch_order = sorted(zip(order, ends, strict=True))
            last = [end - 1 for i, end in ends_in_batch_order if batch[i][0].is_sampled]
            sampled = hidden[sent(last, self._device)] if last else sampled
        logits = self.model.decoder.logits(sampled)
        score(self.model.decoder, hidden, wanted)
        return ForwardPass(
            logits=logits,
            hidden=hidden if hidden_states else None,
            sequences=sequences,
            prefill=prefill,
            generates=[s.is_sampled for s in sequences],
            num_computed_tokens=[s.num_computed_tokens for s in sequences],
            lists=lists,
            totals=totals,
            reserved=reserved,
        )

    def _totals(self) -> tuple[Tensor, int]:
        """Return `totals` and `reserved` of a pass that has been launched."""
        live, cache = self.total.live().view(1), self._capturable
        if cache is None:
            return live, 0
        left, fault, *_ = cache.status()
        return torch.cat([live, left, fault]), cache.reserved_pages

    def count(self, forward_pass: ForwardPass) -> None:
        """Wait for a pass, add its cost to its sequences, and update their `pages`."""
        self._count_pass(forward_pass, forward_pass.lists.cpu(), forward_pass.totals.tolist())

    def _count_pass(
        self,
        forward_pass: ForwardPass,
        lists: Tensor,
        totals: list[int],
        unwanted: Collection[Sequence] = (),
    ) -> None:
        """Add the cost of a pass to its sequences, once its numbers are on the host."""
        counts = PassCounts(lists, self.model.architecture.method_layers)
        passed = zip(
            forward_pass.sequences,
            forward_pass.prefill,
            forward_pass.generates,
            forward_pass.num_computed_tokens,
            strict=True,
        )
        for index, (sequence, prefill, generates, num_computed_tokens) in enumerate(passed):
            if sequence in unwanted:
                continue
            sequence.meter.step(
                counts,
                index,
                tokens=num_computed_tokens,
                slot_bytes=self.cache.slot_bytes,
                prefill=prefill,
                generates=generates,
            )
            if sequence.batch_slot is not None:  # a preempted sequence holds no pages
                sequence.pages = counts.by_sequence[index][2] // self.limits.page_slots
        live, *pool = totals
        if self._capturable is not None:
            left, fault = pool
            self._capturable.sync_free_count(left, fault, forward_pass.reserved)
        self.total.step(live)

    def can_sample_all(self, batch: list[tuple[Sequence, int]]) -> bool:
        """Return whether `launch_pass` supports a pass: no sequence needs the host for sampling."""
        return self._graphs is not None and all(
            s.params.plain and s.given is None and not s.score_only for s, _ in batch
        )

    def launch_pass(self, batch: list[tuple[Sequence, int]]) -> LaunchedPass:
        """Launch a pass and on-device sampling after it; the host does not wait.

        Advances `num_computed_tokens`, and `num_inflight_tokens` where a token is sampled.

        Args:
            batch: A batch that `can_sample_all` accepts.
        """
        assert self._graphs is not None
        forward_pass = self.step(batch)
        numbers = [forward_pass.totals, forward_pass.lists.flatten()]
        sampled = [sequence for sequence, _ in batch if sequence.is_sampled]
        if sampled:
            inputs = _inputs(sampled, np.ones(len(sampled), np.int64), 1)
            numbers.append(self._graphs.sample(forward_pass.logits, inputs))
            for sequence in sampled:
                sequence.num_inflight_tokens += 1
        return LaunchedPass(forward_pass, sampled, Fetched.of(torch.cat(numbers)))

    def _forward(self, batch: list[tuple[Sequence, int]]) -> tuple[Tensor, Tensor]:
        """Compute the last hidden states of all tokens and the slots attended.

        Args:
            batch: Sequences with single tokens come first.

        Returns:
            [t, hidden] and int64 [layers, b, kv_heads].
        """
        chunks = [
            (s.batch_slot or 0, s.num_computed_tokens, s.next_known(count)) for s, count in batch
        ]
        batches = None if self._prompts is None else self._prompts.batches(chunks)
        if self._prompts is not None and batches is not None:
            return self._prompts.step(chunks, batches)
        tokens = TokenBatch.ragged(chunks, self._device)
        with self.cache.reserved([(row, len(tokens)) for row, _, tokens in chunks]):
            result: tuple[Tensor, Tensor] = self.model.decoder(tokens, self.cache)
        return result

    def can_sample(self, sequence: Sequence) -> bool:
        """Return whether `launch` supports the next token of a sequence, sampling included."""
        plain = sequence.params.plain and not sequence.score_only
        if self._graphs is None or sequence.remaining != 1 or not plain:
            return False
        generated = sequence.num_computed_tokens - sequence.prompt_end
        if self._eviction_interval is not None and self._steps_to_eviction(sequence) == 0:
            return False
        return generated >= 0 or (generated == -1 and self._decodes_prompts)

    def _steps_to_eviction(self, sequence: Sequence) -> int:
        """Return the number of tokens to generate before the next one that triggers the hooks."""
        assert self._eviction_interval is not None
        generated = sequence.num_computed_tokens - sequence.prompt_end
        return self._eviction_interval - 1 - generated % self._eviction_interval

    def launch(self, sequences: list[Sequence], steps: int) -> DecodeBurst:
        """Launch a burst of decode steps without waiting.

        Advances `num_computed_tokens` and `num_inflight_tokens`.

        Args:
            sequences: Sequences that `can_sample` accepts.
            steps: 1 or `limits.decode_steps`. Each sequence takes part until it has
                `max_total_tokens`. Only one step is launched if no sequence takes part in all.
        """
        assert self._graphs is not None
        counts = [s.tokens_left(steps) for s in sequences]
        if self._eviction_interval is not None:
            counts = [
                min(count, self._steps_to_eviction(s))
                for s, count in zip(sequences, counts, strict=True)
            ]
        if max(counts) < steps:
            steps, counts = 1, [1] * len(counts)
        inputs = _inputs(sequences, np.array(counts), steps)
        prefill = [s.prefilling for s in sequences]
        launched = self._graphs.launch(inputs)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.num_computed_tokens += count
            sequence.num_inflight_tokens += count
        return DecodeBurst(sequences, counts, prefill, inputs, launched)

    def wait(self, launched: Launched) -> None:
        """Wait for a burst or a pass, and drop its tokens."""
        (launched.launched if isinstance(launched, DecodeBurst) else launched.fetched).wait()

    def receive(self, launched: Launched) -> list[Sequence]:
        """Wait for a burst or a pass, and add tokens and costs to its sequences.

        Returns:
            Sequences that took part and have not ended since the launch.

        Raises:
            RuntimeError: A token found no page, so the contents of the cache are invalid.
        """
        if isinstance(launched, DecodeBurst):
            return self._receive_burst(launched)
        return self._receive_pass(launched)

    def _receive_pass(self, launched: LaunchedPass) -> list[Sequence]:
        forward_pass, unwanted = launched.forward_pass, launched.unwanted
        numbers = launched.fetched.wait()
        begin = len(forward_pass.totals)
        end = begin + forward_pass.lists.numel()
        lists = numbers[begin:end].view_as(forward_pass.lists)
        self._count_pass(forward_pass, lists, numbers[:begin].tolist(), unwanted)
        for sequence, token in zip(launched.sampled, numbers[end:].tolist(), strict=True):
            if sequence not in unwanted:
                sequence.num_inflight_tokens -= 1
                sequence.extend([token])
        return [sequence for sequence in forward_pass.sequences if sequence not in unwanted]

    def _receive_burst(self, burst: DecodeBurst) -> list[Sequence]:
        cache = self._capturable
        assert cache is not None
        status = burst.launched.wait()
        cache.sync_free_count(status.left, status.fault, burst.launched.reserved)
        reads, live = (lists.numpy() for lists in cache.counts(status.lists))
        layers = self.model.architecture.method_layers
        counts = BurstCounts(reads, live, self.limits.page_slots, layers)
        self.total.step(counts.most_live)
        taken = []  # number of new tokens; 0 for a sequence that has ended
        sampled = zip(burst.sequences, burst.counts, status.tokens.T.tolist(), strict=True)
        for sequence, count, tokens in sampled:
            if sequence in burst.unwanted:
                taken.append(0)
            else:
                sequence.num_inflight_tokens -= count
                taken.append(sequence.extend(tokens[:count]))
        return self._count_burst(burst, counts, np.array(taken))

    def _count_burst(
        self, burst: DecodeBurst, counts: BurstCounts, taken: Integers
    ) -> list[Sequence]:
        """Add the cost of the first `taken` [b] tokens; return the sequences that took any."""
        (wanted,) = taken.nonzero()
        sequences = [burst.sequences[index] for index in wanted.tolist()]
        taken, prefill = taken[wanted], np.array(burst.prefill)[wanted]
        costs = counts.costs(burst.inputs.rows[0, wanted], taken, prefill)
        computed = burst.inputs.position[0, wanted] + taken
        slot_bytes, slots = self.cache.slot_bytes, self.limits.page_slots
        numbers = zip(sequences, costs, taken.tolist(), computed.tolist(), strict=True)
        for sequence, cost, steps, tokens in numbers:
            sequence.meter.decode(cost, steps=steps, tokens=tokens, slot_bytes=slot_bytes)
            if sequence.batch_slot is not None:
                sequence.pages = cost.held // slots
        return sequences


def _inputs(sequences: list[Sequence], counts: Integers, steps: int) -> PackedInputs:
    """Pack the inputs of a burst; each sequence takes part in its first `counts` [b] steps."""
    columns = [
        (
            # -1: the previous step samples this token, and the host does not know it yet
            s.tokens[s.num_computed_tokens] if s.remaining > s.num_inflight_tokens else -1,
            *(
                s.num_computed_tokens,
                s.batch_slot or 0,
                signed_seed(s.seed),
                s.index,
                s.length - s.prompt_end,
            ),
        )
        for s in sequences
    ]
    newest, position, rows, seed, index, draw = np.array(columns, np.int64).T
    number = np.arange(steps)[:, None]
    tokens = np.full((steps, len(sequences)), -1, np.int64)
    tokens[0] = newest
    params = [s.params for s in sequences]
    return PackedInputs.of(
        tokens=tokens,
        position=position + np.minimum(number, counts - 1),
        rows=np.where(number < counts, rows, -1),
        keys=stream_keys(seed, index, draw + number),
        temperature=np.array([p.temperature for p in params], np.float64),
        limits=_limits(params) if any(p.restricts for p in params) else None,
    )


def _limits(params: list[SamplingParams]) -> tuple[Integers, Floats, Floats]:
    """Return top-k, top-p and the logarithm of min-p, [b] each."""
    top_p, log_min_p = np.array([(p.top_p, p.log_min_p) for p in params], np.float64).T
    top_k = np.array([p.top_k for p in params], np.int64)
    return top_k, top_p, log_min_p
