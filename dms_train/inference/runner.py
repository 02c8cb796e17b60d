"""One forward pass over several sequences: token ids in, logits and cache statistics out.

On a GPU, the decoding sequences of a step, or of a group of steps, are one CUDA graph that samples
as well. The next one can be launched before the host knows the tokens of this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from dms_train.inference.accounting import GroupCounts, PassCounts, TotalMeter
from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.cache_builder import build_cache, longest_sequence
from dms_train.inference.graphs import DecodeGraphs, LaunchedGroup
from dms_train.inference.models.batch import TokenBatch
from dms_train.inference.models.fused import DecodeInputs
from dms_train.inference.models.loader import LoadedModel
from dms_train.inference.options import EngineOptions, SamplingParams
from dms_train.inference.policies.registry import build_policy
from dms_train.inference.prompt_graphs import PromptGraphs
from dms_train.inference.sampler import signed_seed, stream_keys
from dms_train.inference.scheduler import SchedulerLimits
from dms_train.inference.scoring import score, wanted_logits
from dms_train.inference.sequence import Sequence
from dms_train.kernels.layers.sampling_limits import Limits


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A sequence in a group of decode steps on its way.

    Attributes:
        sequence: The sequence.
        row: Its cache row then.
        computed: Its computed tokens before.
        steps: In how many of the steps it takes part.
        prefill: Whether the first step computes a prompt token.
    """

    sequence: Sequence
    row: int
    computed: int
    steps: int
    prefill: bool


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGroup:
    """A group of decode steps on its way.

    Attributes:
        places: Its sequences.
        steps: How many.
        launched: Its results.
        unwanted: Sequences that have ended since.
    """

    places: list[_Place]
    steps: int
    launched: LaunchedGroup
    unwanted: set[Sequence] = field(default_factory=set)


@dataclass(frozen=True, slots=True, eq=False)
class DecodedTokens:
    """Tokens of one sequence that a group of decode steps has sampled.

    Attributes:
        sequence: The sequence.
        tokens: At least one.
        place: The sequence in the group.
        counts: Of the group.
        index: The number of the sequence in it.
    """

    sequence: Sequence
    tokens: list[int]
    place: _Place
    counts: GroupCounts
    index: int


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
        if isinstance(self.cache, PagedKVCache):
            self._graphs = DecodeGraphs(
                model.decoder,
                self.cache,
                options.max_num_seqs,
                self.longest,
                options.decode_steps,
            )
            self._decodes_prompts = self.cache.decodes_prompts
            if self._device.type == "cuda" and self.cache.captures_prompts:
                chunk = min(options.prefill_chunk, options.max_num_batched_tokens)
                with torch.no_grad():
                    self._prompts = PromptGraphs(model.decoder, self.cache, chunk, self.longest)
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
    def step(self, batch: list[tuple[Sequence, int]], *, every: bool = False) -> Tensor:
        """Compute the next tokens of sequences; advances `computed` and updates `pages`.

        Log-probabilities of given tokens are noted in the sequences.

        Args:
            batch: Sequences with rows and how many tokens each computes.
            every: Return the logits of every token instead of each sequence's last.

        Returns:
            float [b, vocab] in the order of the batch; of one sequence with `every`, [n, vocab].
        """
        # one token each, then parts of prompts
        order = sorted(range(len(batch)), key=lambda i: (batch[i][1] > 1, batch[i][0].row))
        ordered = [batch[i] for i in order]
        wanted = wanted_logits(ordered)
        hidden = self._forward(ordered)
        score(self.model.decoder, hidden, wanted)
        if not every:
            ends = list(accumulate(batch[i][1] for i in order))
            last = [end - 1 for _, end in sorted(zip(order, ends, strict=True))]
            hidden = hidden[torch.tensor(last, device=self._device)]
        return self.model.decoder.logits(hidden)

    def _forward(self, batch: list[tuple[Sequence, int]]) -> Tensor:
        """The last hidden states of all tokens, [t, hidden]; single tokens come first."""
        parts = [(s.row or 0, s.computed, s.take(count)) for s, count in batch]
        if len(parts) == 1 and self._prompts and self._prompts.takes(parts[0][1], len(parts[0][2])):
            hidden, reads = self._prompts.step(*parts[0])
        else:
            tokens = TokenBatch.ragged(parts, self._device)
            hidden, reads = self.model.decoder(tokens, self.cache)
        rows = torch.tensor([row for row, _, _ in parts], device=self._device)
        counts = PassCounts(reads, self.cache.live(rows), self.cache.held_slots(rows))
        for index, (sequence, count) in enumerate(batch):
            prompt = sequence.prefilling or sequence.given_only
            prompt = prompt or sequence.remaining > 1  # or computed again
            sequence.computed += count
            sequence.meter.step(
                counts,
                index,
                tokens=sequence.computed,
                slot_bytes=self.cache.slot_bytes,
                prefill=prompt,
                generates=not sequence.remaining and not sequence.given_only,
            )
            sequence.pages = counts.sums[index][2] // self.limits.page_slots
        self.total.step()
        return hidden

    def samples(self, sequence: Sequence) -> bool:
        """Whether `launch` takes the next token of a sequence, which is sampled in a plain way."""
        last = sequence.remaining == 1 and sequence.computed + 1 >= sequence.prompt_end
        if sequence.prefilling and not self._decodes_prompts:
            return False
        return self._graphs is not None and last and sequence.params.plain

    def launch(self, sequences: list[Sequence], steps: int) -> DecodeGroup:
        """Start a group of decode steps; the host does not wait. Advances `computed` and `ahead`.

        Args:
            sequences: Those that `samples` accepts.
            steps: 1 or the limit; each sequence takes part up to its own limit. One step is taken
                where no sequence takes part in all.
        """
        assert self._graphs is not None
        counts = [s.tokens_left(steps) for s in sequences]
        if max(counts) < steps:
            steps, counts = 1, [1] * len(counts)
        launched = self._graphs.launch(self._inputs(sequences, torch.tensor(counts), steps))
        places = []
        for s, count in zip(sequences, counts, strict=True):
            places.append(_Place(s, s.row or 0, s.computed, count, s.prefilling))
            s.computed += count
            s.ahead += count
        return DecodeGroup(places, steps, launched)

    def _inputs(self, sequences: list[Sequence], counts: Tensor, steps: int) -> DecodeInputs:
        """Of each step and sequence, [k, b]; a sequence takes part in its first `counts` [b]."""
        number = torch.arange(steps)[:, None]
        # a token that the step before samples is not known yet
        tokens = torch.full((steps, len(sequences)), -1)
        tokens[0] = torch.tensor([next(iter(s.take(1)), -1) for s in sequences])
        columns = [
            (s.computed, s.row or 0, signed_seed(s.seed), s.index, s.length - s.prompt_end)
            for s in sequences
        ]
        position, rows, seed, index, place = torch.tensor(columns).T
        temperature = [s.params.temperature for s in sequences]
        restricted = any(s.params.restricts for s in sequences)
        return DecodeInputs(
            tokens=tokens,
            position=position + number.minimum(counts - 1),
            rows=torch.where(number < counts, rows, -1),
            keys=stream_keys(seed, index, place + number),
            temperature=torch.tensor(temperature, dtype=torch.float64).expand(steps, -1),
            limits=_limits([s.params for s in sequences], steps) if restricted else None,
        )

    def wait(self, group: DecodeGroup | None) -> None:
        """Wait for a group whose tokens are not wanted, if there is one."""
        if group is not None:
            group.launched.wait()

    def receive(self, group: DecodeGroup) -> list[DecodedTokens]:
        """Wait for a group of decode steps.

        Returns:
            The tokens of each sequence that still wants them, to be counted by `count`.

        Raises:
            RuntimeError: A token found no page, so that the contents of the cache are invalid.
        """
        assert isinstance(self.cache, PagedKVCache)
        status = group.launched.wait()
        self.cache.pool.learn(status.left, status.fault, group.launched.reserved)
        read, held = self.cache.counts(status.lists)
        self.total.step(held)
        rows = [place.row for place in group.places]
        counts = GroupCounts(read[:, :, rows], held[:, :, rows], self.limits.page_slots)
        wanted = []
        sampled = status.tokens.T.tolist()
        for index, (place, tokens) in enumerate(zip(group.places, sampled, strict=True)):
            sequence = place.sequence
            if sequence not in group.unwanted:
                sequence.ahead -= place.steps
                tokens = tokens[: place.steps]
                wanted.append(DecodedTokens(sequence, tokens, place, counts, index))
        return wanted

    def count(self, decoded: DecodedTokens, taken: int) -> None:
        """Note what the first `taken` of these tokens have cost."""
        place, meter = decoded.place, decoded.sequence.meter
        meter.decode(
            decoded.counts,
            decoded.index,
            steps=taken,
            tokens=place.computed + taken,
            slot_bytes=self.cache.slot_bytes,
            prefill=place.prefill,
        )
        slots = decoded.counts.held[1][taken - 1][decoded.index]
        decoded.sequence.pages = slots // self.limits.page_slots


def _limits(params: list[SamplingParams], steps: int) -> Limits:
    """What may be drawn in each step, [k, b]."""
    top_k = torch.tensor([p.top_k for p in params])
    shares = torch.tensor([[p.top_p, p.log_min_p] for p in params], dtype=torch.float64)
    return Limits(*(x.expand(steps, -1) for x in (top_k, *shares.T)))
