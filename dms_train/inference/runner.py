"""One forward pass over several sequences: token ids in, logits and cache statistics out.

On a GPU, the decoding sequences of a step, or of a group of steps, are one CUDA graph that samples
as well. The next one can be launched before the host knows the tokens of this one. Behind prompts
the same kernel samples, so that the host does not wait for them either.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from dms_train.inference.accounting import GroupCounts, PassCounts, TotalMeter
from dms_train.inference.cache_builder import build_cache, longest_sequence
from dms_train.inference.decode_inputs import Floats, Integers, PackedInputs
from dms_train.inference.devices import Fetched, sent
from dms_train.inference.graphs import DecodeGraphs, LaunchedGroup
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
class DecodeGroup:
    """A group of decode steps on its way.

    Attributes:
        sequences: Those that take part.
        counts: In how many of the steps each of them does.
        prefill: Whether the first step computes a prompt token of it.
        inputs: Of the steps.
        launched: Their results.
        unwanted: Sequences that have ended since.
    """

    sequences: list[Sequence]
    counts: list[int]
    prefill: list[bool]
    inputs: PackedInputs
    launched: LaunchedGroup
    unwanted: set[Sequence] = field(default_factory=set)

    @property
    def steps(self) -> int:
        """How many."""
        return len(self.inputs.fields)


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPass:
    """A forward pass on its way.

    Attributes:
        logits: float [b, vocab] behind the last token of each sequence that `is_sampled` now, in
            the order of the batch; [0, vocab] if hidden states were asked for.
        hidden: Last hidden states of all tokens, [t, hidden], until the next pass; None unless
            asked for.
        sequences: Those that take part, single tokens first.
        prefill: Whether the pass computes prompt tokens of each of them.
        generates: Whether a token is sampled behind each of them.
        computed: Tokens of each of them that are computed then.
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
    """A forward pass on its way behind which the kernels sample.

    Attributes:
        done: The pass.
        sampled: Sequences that get a token.
        fetched: int64, `live`, then `lists` of the pass, then the tokens.
        unwanted: Sequences that have ended since.
    """

    done: ForwardPass
    sampled: list[Sequence]
    fetched: Fetched
    unwanted: set[Sequence] = field(default_factory=set)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that take part."""
        return self.done.sequences


Launched: TypeAlias = DecodeGroup | LaunchedPass


class ModelRunner:
    """A model with its cache.

    Args:
        model: The model.
        options: How the engine is set up.

    Attributes:
        model: As given.
        cache: Its cache.
        total: What the cache has cost so far.
        limits: What a step may take.
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
        """Start to compute the next tokens of sequences; advances `computed`.

        Log-probabilities of given tokens are noted in the sequences, for which the host waits.

        Args:
            batch: Sequences with rows and how many tokens each computes.
            hidden_states: Return those of every token instead of logits.
        """
        order = sorted(range(len(batch)), key=lambda i: (batch[i][1], batch[i][0].row))
        ordered = [batch[i] for i in order]
        wanted, sequences = wanted_logits(ordered), [sequence for sequence, _ in ordered]
        # or computed again
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
        """Wait for a pass, and note what it has cost in its sequences; updates their `pages`."""
        self._note(done, done.lists.cpu(), int(done.live))

    def _note(
        self,
        done: ForwardPass,
        lists: Tensor,
        live: int,
        unwanted: Collection[Sequence] = (),
    ) -> None:
        """Note what a pass has cost, once its numbers are on the host."""
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
            if sequence.row is not None:  # taken away since
                sequence.pages = counts.sums[index][2] // self.limits.page_slots
        self.total.step(live)

    def samples_behind(self, batch: list[tuple[Sequence, int]]) -> bool:
        """Whether `launch_pass` takes a pass: all sequences are sampled in a plain way."""
        return self._graphs is not None and all(
            s.params.plain and s.given is None and not s.given_only for s, _ in batch
        )

    def launch_pass(self, batch: list[tuple[Sequence, int]]) -> LaunchedPass:
        """Start a pass and sample behind it; the host does not wait.

        Advances `computed`, and `ahead` of the sequences that get a token.

        Args:
            batch: One that `samples_behind`.
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
        """The last hidden states of all tokens, and slots attended; single tokens come first.

        Returns:
            [t, hidden] and int64 [layers, b, kv_heads].
        """
        parts = [(s.row or 0, s.computed, s.take(count)) for s, count in batch]
        batches = None if self._prompts is None else self._prompts.batches(parts)
        if self._prompts is not None and batches is not None:
            return self._prompts.step(parts, batches)
        tokens = TokenBatch.ragged(parts, self._device)
        with self.cache.reserved([(row, len(tokens)) for row, _, tokens in parts]):
            found: tuple[Tensor, Tensor] = self.model.decoder(tokens, self.cache)
        return found

    def samples(self, sequence: Sequence) -> bool:
        """Whether `launch` takes the next token of a sequence, which is sampled in a plain way."""
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

    def launch(self, sequences: list[Sequence], steps: int) -> DecodeGroup:
        """Start a group of decode steps; the host does not wait. Advances `computed` and `ahead`.

        Args:
            sequences: Those that `samples` accepts.
            steps: 1 or the limit; each sequence takes part up to its own limit. One step is taken
                where no sequence takes part in all.
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
        return DecodeGroup(sequences, counts, prefill, inputs, launched)

    def wait(self, launched: Launched) -> None:
        """Wait for a group or a pass whose tokens are not wanted."""
        (launched.launched if isinstance(launched, DecodeGroup) else launched.fetched).wait()

    def receive(self, launched: Launched) -> list[Sequence]:
        """Wait for a group of decode steps or a pass; its sequences get their tokens and costs.

        Returns:
            Those that still wanted them.

        Raises:
            RuntimeError: A token found no page, so that the contents of the cache are invalid.
        """
        if isinstance(launched, DecodeGroup):
            return self._receive_group(launched)
        return self._receive_pass(launched)

    def _receive_pass(self, launched: LaunchedPass) -> list[Sequence]:
        done, unwanted = launched.done, launched.unwanted
        numbers = launched.fetched.wait()
        behind = 1 + done.lists.numel()
        self._note(done, numbers[1:behind].view_as(done.lists), int(numbers[0]), unwanted)
        for sequence, token in zip(launched.sampled, numbers[behind:].tolist(), strict=True):
            if sequence not in unwanted:
                sequence.ahead -= 1
                sequence.extend([token])
        return [sequence for sequence in done.sequences if sequence not in unwanted]

    def _receive_group(self, group: DecodeGroup) -> list[Sequence]:
        cache = self._capturable
        assert cache is not None
        status = group.launched.wait()
        cache.sync_free_count(status.left, status.fault, group.launched.reserved)
        reads, live = (lists.numpy() for lists in cache.counts(status.lists))
        counts = GroupCounts(reads, live, self.limits.page_slots)
        self.total.step(counts.most_live)
        taken = []  # 0 of a sequence that has ended
        sampled = zip(group.sequences, group.counts, status.tokens.T.tolist(), strict=True)
        for sequence, count, tokens in sampled:
            if sequence in group.unwanted:
                taken.append(0)
            else:
                sequence.ahead -= count
                taken.append(sequence.extend(tokens[:count]))
        return self._count(group, counts, np.array(taken))

    def _count(self, group: DecodeGroup, counts: GroupCounts, taken: Integers) -> list[Sequence]:
        """Note what the first `taken` [b] tokens have cost; the sequences that took some."""
        (wanted,) = taken.nonzero()
        sequences = [group.sequences[index] for index in wanted.tolist()]
        taken, prefill = taken[wanted], np.array(group.prefill)[wanted]
        costs = counts.costs(group.inputs.rows[0, wanted], taken, prefill)
        computed = group.inputs.position[0, wanted] + taken
        slot_bytes, slots = self.cache.slot_bytes, self.limits.page_slots
        numbers = zip(sequences, costs, taken.tolist(), computed.tolist(), strict=True)
        for sequence, cost, steps, tokens in numbers:
            sequence.meter.decode(cost, steps=steps, tokens=tokens, slot_bytes=slot_bytes)
            if sequence.row is not None:
                sequence.pages = cost.held // slots
        return sequences


def _inputs(sequences: list[Sequence], counts: Integers, steps: int) -> PackedInputs:
    """Of each step and sequence; a sequence takes part in its first `counts` [b] steps."""
    columns = [
        (
            # a token that the step before samples is not known yet
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
    """What may be drawn in each step, top-k, top-p and the logarithm of min-p, [b] each."""
    top_p, log_min_p = np.array([(p.top_p, p.log_min_p) for p in params], np.float64).T
    top_k = np.array([p.top_k for p in params], np.int64)
    return top_k, top_p, log_min_p
