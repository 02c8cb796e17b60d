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
        prefill: Whether the first step computes a prompt token of the sequence.
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
        prefill: Whether the pass computes prompt tokens of the sequence.
        generates: Whether a token of the sequence is sampled after the pass.
        computed: Tokens of the sequence that are computed after the pass.
        lists: Slots attended, tokens held and slots reserved by their KV lists, int64 [3, layers,
            b, kv_heads].
        live: Tokens held by all KV lists of the cache, int64.
    """

    logits: Tensor
    hidden: Tensor | None
    sequences: list[Sequence]
    prefill: list[bool]
    generates: list[bool]
    computed: list[int]
    lists: Tensor
    live: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedPass:
    """A launched forward pass, followed by on-device sampling.

    Attributes:
        done: The pass.
        sampled: Sequences that get a token.
        fetched: int64, `live`, then `lists` of the pass, then the tokens.
        unwanted: Sequences that have ended since the launch.
    """

    done: ForwardPass
    sampled: list[Sequence]
    fetched: Fetched
    unwanted: set[Sequence] = field(default_factory=set)

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences that take part."""
        return self.done.sequences


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
        self.cache = build_cache(model, policy, options)
        self.total = TotalMeter(self.cache, torch.arange(options.max_num_seqs, device=self._device))
        self._graphs: DecodeGraphs | None = None
        self._prompts: PromptGraphs | None = None
        self._decodes_prompts = True
        self._eviction_interval: int | None = None
        cache = self._capturable = self.cache.capturable
        if cache is not None:
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
            rows=options.max_num_seqs,
            batch_tokens=options.max_num_batched_tokens,
            chunk=options.prefill_chunk,
            kv_lists=a.num_layers * a.num_query_groups,
            page_slots=options.page_slots,
            window=policy.window,
            pages=self.cache.max_pages,
            decode_steps=1 if self._graphs is None else options.decode_steps,
        )

    @torch.no_grad()
    def step(
        self, batch: list[tuple[Sequence, int]], *, hidden_states: bool = False
    ) -> ForwardPass:
        """Start to compute the next tokens of sequences, and advance `computed`.

        The host waits for log-probabilities of given tokens, which are stored in the sequences.

        Args:
            batch: Sequences with rows, and the number of tokens that each computes.
            hidden_states: Return hidden states of every token instead of logits.
        """
        order = sorted(range(len(batch)), key=lambda i: (batch[i][1], batch[i][0].row))
        ordered = [batch[i] for i in order]
        wanted, sequences = wanted_logits(ordered), [sequence for sequence, _ in ordered]
        # prompt tokens, given tokens, and tokens that are computed again after preemption
        prefill = [s.prefilling or s.given_only or s.remaining > 1 for s in sequences]
        hidden, reads = self._forward(ordered)
        rows = sent([s.row for s in sequences], self._device)
        lists = torch.stack([reads, self.cache.live(rows), self.cache.held_slots(rows)])
        live = self.total.live()
        for sequence, count in ordered:
            sequence.computed += count
        sampled = hidden[:0]
        if not hidden_states:
            ends = accumulate(batch[i][1] for i in order)
            places = sorted(zip(order, ends, strict=True))
            last = [end - 1 for i, end in places if batch[i][0].is_sampled]
            sampled = hidden[sent(last, self._device)] if last else sampled
        logits = self.model.decoder.logits(sampled)
        score(self.model.decoder, hidden, wanted)
        generates, computed = [s.is_sampled for s in sequences], [s.computed for s in sequences]
        kept = hidden if hidden_states else None
        return ForwardPass(logits, kept, sequences, prefill, generates, computed, lists, live)

    def count(self, done: ForwardPass) -> None:
        """Wait for a pass, add its cost to its sequences, and update their `pages`."""
        self._note(done, done.lists.cpu(), int(done.live))

    def _note(
        self,
        done: ForwardPass,
        lists: Tensor,
        live: int,
        unwanted: Collection[Sequence] = (),
    ) -> None:
        """Add the cost of a pass to its sequences, once its numbers are on the host."""
        counts = PassCounts(lists)
        passed = zip(done.sequences, done.prefill, done.generates, done.computed, strict=True)
        for index, (sequence, prefill, generates, computed) in enumerate(passed):
            if sequence in unwanted:
                continue
            sequence.meter.step(
                counts,
                index,
                tokens=computed,
                slot_bytes=self.cache.slot_bytes,
                prefill=prefill,
                generates=generates,
            )
            if sequence.row is not None:  # a preempted sequence has no row
                sequence.pages = counts.sums[index][2] // self.limits.page_slots
        self.total.step(live)

    def can_sample_all(self, batch: list[tuple[Sequence, int]]) -> bool:
        """Return whether `launch_pass` supports a pass: no sequence needs the host for sampling."""
        return self._graphs is not None and all(
            s.params.plain and s.given is None and not s.given_only for s, _ in batch
        )

    def launch_pass(self, batch: list[tuple[Sequence, int]]) -> LaunchedPass:
        """Launch a pass and on-device sampling after it; the host does not wait.

        Advances `computed`, and `ahead` of the sequences that get a token.

        Args:
            batch: A batch that `can_sample_all` accepts.
        """
        assert self._graphs is not None
        done = self.step(batch)
        numbers = [done.live.view(1), done.lists.flatten()]
        sampled = [sequence for sequence, _ in batch if sequence.is_sampled]
        if sampled:
            inputs = _inputs(sampled, np.ones(len(sampled), np.int64), 1)
            numbers.append(self._graphs.sample(done.logits, inputs))
            for sequence in sampled:
                sequence.ahead += 1
        return LaunchedPass(done, sampled, Fetched.of(torch.cat(numbers)))

    def _forward(self, batch: list[tuple[Sequence, int]]) -> tuple[Tensor, Tensor]:
        """Compute the last hidden states of all tokens, and slots attended; single tokens first.

        Returns:
            [t, hidden] and int64 [layers, b, kv_heads].
        """
        parts = [(s.row or 0, s.computed, s.take(count)) for s, count in batch]
        batches = None if self._prompts is None else self._prompts.batches(parts)
        if self._prompts is not None and batches is not None:
            return self._prompts.step(parts, batches)
        tokens = TokenBatch.ragged(parts, self._device)
        with self.cache.reserved([(row, len(tokens)) for row, _, tokens in parts]):
            result: tuple[Tensor, Tensor] = self.model.decoder(tokens, self.cache)
        return result

    def can_sample(self, sequence: Sequence) -> bool:
        """Return whether `launch` supports the next token of a sequence, sampling included."""
        plain = sequence.params.plain and not sequence.given_only
        if self._graphs is None or sequence.remaining != 1 or not plain:
            return False
        ahead = sequence.computed - sequence.prompt_end
        if self._eviction_interval is not None and self._steps_to_eviction(sequence) == 0:
            return False
        return ahead >= 0 or (ahead == -1 and self._decodes_prompts)

    def _steps_to_eviction(self, sequence: Sequence) -> int:
        """Return how many generated tokens are computed before one that the hooks evict after."""
        assert self._eviction_interval is not None
        generated = sequence.computed - sequence.prompt_end
        return self._eviction_interval - 1 - generated % self._eviction_interval

    def launch(self, sequences: list[Sequence], steps: int) -> DecodeBurst:
        """Launch a burst of decode steps without waiting; advance `computed` and `ahead`.

        Args:
            sequences: Sequences that `can_sample` accepts.
            steps: 1 or the limit; each sequence takes part up to its own limit. Only one step is
                launched if no sequence takes part in all of them.
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
            sequence.computed += count
            sequence.ahead += count
        return DecodeBurst(sequences, counts, prefill, inputs, launched)

    def wait(self, launched: Launched) -> None:
        """Wait for a burst or a pass whose tokens are dropped."""
        (launched.launched if isinstance(launched, DecodeBurst) else launched.fetched).wait()

    def receive(self, launched: Launched) -> list[Sequence]:
        """Wait for a burst or a pass, and add tokens and costs to its sequences.

        Returns:
            Sequences that are still wanted.

        Raises:
            RuntimeError: A token found no page, so that the contents of the cache are invalid.
        """
        if isinstance(launched, DecodeBurst):
            return self._receive_burst(launched)
        return self._receive_pass(launched)

    def _receive_pass(self, launched: LaunchedPass) -> list[Sequence]:
        done, unwanted = launched.done, launched.unwanted
        numbers = launched.fetched.wait()
        end = 1 + done.lists.numel()
        self._note(done, numbers[1:end].view_as(done.lists), int(numbers[0]), unwanted)
        for sequence, token in zip(launched.sampled, numbers[end:].tolist(), strict=True):
            if sequence not in unwanted:
                sequence.ahead -= 1
                sequence.extend([token])
        return [sequence for sequence in done.sequences if sequence not in unwanted]

    def _receive_burst(self, burst: DecodeBurst) -> list[Sequence]:
        cache = self._capturable
        assert cache is not None
        status = burst.launched.wait()
        cache.sync_free_count(status.left, status.fault, burst.launched.reserved)
        reads, live = (lists.numpy() for lists in cache.counts(status.lists))
        counts = BurstCounts(reads, live, self.limits.page_slots)
        self.total.step(counts.most_live)
        taken = []  # 0 for a sequence that has ended
        sampled = zip(burst.sequences, burst.counts, status.tokens.T.tolist(), strict=True)
        for sequence, count, tokens in sampled:
            if sequence in burst.unwanted:
                taken.append(0)
            else:
                sequence.ahead -= count
                taken.append(sequence.extend(tokens[:count]))
        return self._count(burst, counts, np.array(taken))

    def _count(self, burst: DecodeBurst, counts: BurstCounts, taken: Integers) -> list[Sequence]:
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
            if sequence.row is not None:
                sequence.pages = cost.held // slots
        return sequences


def _inputs(sequences: list[Sequence], counts: Integers, steps: int) -> PackedInputs:
    """Pack the inputs of a burst; a sequence takes part in its first `counts` [b] steps."""
    columns = [
        (
            # -1: the previous step samples it, and the host does not know it yet
            s.tokens[s.computed] if s.remaining > s.ahead else -1,
            *(s.computed, s.row or 0, signed_seed(s.seed), s.index, s.length - s.prompt_end),
        )
        for s in sequences
    ]
    newest, position, rows, seed, index, place = np.array(columns, np.int64).T
    number = np.arange(steps)[:, None]
    tokens = np.full((steps, len(sequences)), -1, np.int64)
    tokens[0] = newest
    params = [s.params for s in sequences]
    return PackedInputs.of(
        tokens=tokens,
        position=position + np.minimum(number, counts - 1),
        rows=np.where(number < counts, rows, -1),
        keys=stream_keys(seed, index, place + number),
        temperature=np.array([p.temperature for p in params], np.float64),
        limits=_limits(params) if any(p.restricts for p in params) else None,
    )


def _limits(params: list[SamplingParams]) -> tuple[Integers, Floats, Floats]:
    """Return top-k, top-p and the logarithm of min-p, [b] each."""
    top_p, log_min_p = np.array([(p.top_p, p.log_min_p) for p in params], np.float64).T
    top_k = np.array([p.top_k for p in params], np.int64)
    return top_k, top_p, log_min_p
