"""One forward pass over several sequences: token ids in, logits and cache statistics out.

On a GPU, the decoding sequences of a step are one CUDA graph that samples as well. The next one can
be launched before the host knows the tokens of this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from dms_train.inference.accounting import PassCounts, TotalMeter
from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.cache_builder import build_cache, longest_sequence
from dms_train.inference.graphs import DecodeGraphs, LaunchedStep
from dms_train.inference.models.batch import TokenBatch
from dms_train.inference.models.loader import LoadedModel
from dms_train.inference.options import EngineOptions
from dms_train.inference.policies.registry import build_policy
from dms_train.inference.prompt_graphs import PromptGraphs
from dms_train.inference.sampler import stream_keys
from dms_train.inference.scheduler import SchedulerLimits
from dms_train.inference.scoring import score, wanted_logits
from dms_train.inference.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A sequence in a step on its way.

    Attributes:
        sequence: The sequence.
        row: Its cache row then.
        computed: Its computed tokens after the step.
        prefill: Whether the step computed a prompt token.
    """

    sequence: Sequence
    row: int
    computed: int
    prefill: bool


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """A decode step on its way.

    Attributes:
        places: Its sequences.
        launched: Its results.
        unwanted: Sequences that have ended since.
    """

    places: list[_Place]
    launched: LaunchedStep
    unwanted: set[Sequence] = field(default_factory=set)


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
                model.decoder, self.cache, options.max_num_seqs, self.longest
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
            self._count(sequence, counts, index, tokens=sequence.computed, prefill=prompt)
        self.total.step()
        return hidden

    def _count(
        self, sequence: Sequence, counts: PassCounts, index: int, *, tokens: int, prefill: bool
    ) -> None:
        slot_bytes = self.cache.slot_bytes
        sequence.meter.step(counts, index, tokens=tokens, slot_bytes=slot_bytes, prefill=prefill)
        sequence.pages = counts.sums[index][2] // self.limits.page_slots

    def samples(self, sequence: Sequence) -> bool:
        """Whether `launch` takes the next token of a sequence, which is sampled in a plain way."""
        last = sequence.remaining == 1 and sequence.computed + 1 >= sequence.prompt_end
        if sequence.prefilling and not self._decodes_prompts:
            return False
        return self._graphs is not None and last and sequence.params.plain

    def launch(self, batch: list[tuple[Sequence, int]]) -> DecodeStep:
        """Start a decode step; the host does not wait. Advances `computed` and `ahead`.

        Args:
            batch: Sequences that `samples` accepts, and 1.
        """
        assert self._graphs is not None
        sequences = [sequence for sequence, _ in batch]
        # the token that the step before samples is not known yet
        tokens = [s.tokens[s.computed] if s.computed < len(s.tokens) else -1 for s in sequences]
        inputs = [
            tokens,
            [s.computed for s in sequences],
            [s.row or 0 for s in sequences],
            stream_keys([s.stream for s in sequences]).tolist(),
        ]
        launched = self._graphs.launch(inputs, [s.params.temperature for s in sequences])
        places = []
        for s in sequences:
            places.append(_Place(s, s.row or 0, s.computed + 1, s.prefilling))
            s.computed += 1
            s.ahead += 1
        return DecodeStep(places, launched)

    def receive(self, step: DecodeStep) -> list[tuple[Sequence, int]]:
        """Wait for a step. Counts it for the sequences that still want its tokens.

        Returns:
            These sequences and the tokens sampled for them.

        Raises:
            RuntimeError: A token found no page, so that the contents of the cache are invalid.
        """
        assert isinstance(self.cache, PagedKVCache)
        status = step.launched.wait()
        self.cache.pool.learn(status.left, status.fault, step.launched.reserved)
        read, held = self.cache.counts(status.lists)
        self.total.step(held)
        rows, slots = [place.row for place in step.places], self.limits.page_slots
        read, held = read[:, rows], held[:, rows]
        filled = torch.maximum(read, held)
        counts = PassCounts(read, held, (filled + slots - 1) // slots * slots)
        wanted = []
        sampled = status.tokens.tolist()
        for index, (place, token) in enumerate(zip(step.places, sampled, strict=True)):
            sequence = place.sequence
            if sequence not in step.unwanted:
                sequence.ahead -= 1
                self._count(sequence, counts, index, tokens=place.computed, prefill=place.prefill)
                wanted.append((sequence, token))
        return wanted
