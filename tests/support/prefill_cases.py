"""Random prompts with hard decisions, and the checks that the interpreter and a GPU both run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dms_train.kernels.prefill import sparse as prefill
from dms_train.kernels.prefill.lists import Pages, PrefillState, Tokens, recent_tokens
from dms_train.kernels.train_attention import reference


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A problem: sizes, how much is evicted, where it runs."""

    b: int = 1
    h: int = 2
    group: int = 2
    s: int = 150
    d: int = 16
    window: int = 20
    odds: float = 0.7
    page_slots: int = 32
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    sinks: bool = False

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value [b, heads, s, d] and evicted [b, h, s]; heads differ in their odds."""
        draw = torch.Generator().manual_seed(self.seed)

        def normal(heads: int) -> Tensor:
            x = torch.randn(self.b, self.s, heads, self.d, generator=draw, dtype=torch.float64)
            return x.to(self.device, self.dtype).transpose(1, 2)

        query, key, value = normal(self.h * self.group), normal(self.h), normal(self.h)
        odds = self.odds ** torch.linspace(0.5, 2, self.h)[:, None]
        evicted = torch.rand(self.b, self.h, self.s, generator=draw) < odds
        return query, key, value, evicted.to(self.device)

    @property
    def how(self) -> dict:
        sinks = torch.linspace(-4, 4, self.h * self.group, device=self.device)
        own = {"sinks": sinks} if self.sinks else {}
        return {"window": self.window, "scale": self.d**-0.5, **own}


def expected_output(
    query: Tensor, key: Tensor, value: Tensor, evicted: Tensor, p: Prompt
) -> Tensor:
    """Masked dense attention in float64, [b, heads, s, d]."""
    q, k, v = (x.transpose(1, 2).double() for x in (query, key, value))
    log_keep = torch.zeros(evicted.shape, dtype=torch.float64, device=evicted.device)
    log_keep = log_keep.masked_fill(evicted, float("-inf"))
    return reference.dms_attention(q, k, v, log_keep, **p.how).transpose(1, 2)


def assert_near(out: Tensor, exact: Tensor) -> None:
    """Within the rounding of the output's dtype and of weights rounded to it."""
    assert out.dtype != torch.float64
    unit = torch.finfo(out.dtype).eps
    error = (out.double() - exact).norm() / exact.norm()
    assert error < max(unit, 5e-7), f"relative error {error:.2e}"


def nan_pages(key: Tensor, slots: int, page_slots: int) -> Pages:
    """Pages in random order, full of NaN, as memory may be."""
    pages = prefill.fresh_pages(key, slots, page_slots)
    pages.pages.fill_(torch.nan)
    draw = torch.Generator().manual_seed(slots)
    order = torch.randperm(pages.table.numel(), generator=draw, dtype=torch.int32)
    return pages._replace(table=order.to(key.device).view(pages.table.shape))


def in_one_go(p: Prompt) -> tuple[Tensor, Tensor]:
    """Output of a whole prompt through pages that held NaN, and `expected_output`."""
    query, key, value, evicted = p.tensors()
    none = torch.zeros(p.b, p.h, dtype=torch.int32, device=p.device)
    chunk = prefill.count(evicted, none)
    pages = nan_pages(key, int(chunk.lengths.max()), p.page_slots)
    out = prefill.extend(Tokens(query, key, value), chunk, pages, **p.how)
    return out, expected_output(query, key, value, evicted, p)


def as_one_chunk(p: Prompt, query: Tensor, key: Tensor, value: Tensor, evicted: Tensor) -> Tensor:
    """Output of a whole prompt as an engine computes it: one chunk, with the lists as its cache."""
    state = prefill.empty(p.b, p.h, p.window, torch.device(p.device))
    chunk = prefill.plan_chunk(torch.cat([state.evicted, evicted], 2), state, p.window)
    pages = nan_pages(key, int(chunk.lengths.max()), p.page_slots)
    return prefill.extend_prompt(Tokens(query, key, value), chunk, state, pages, **p.how)


class InChunks:
    """A prompt that arrives in chunks; pages are taken as the lists grow.

    Args:
        p: The problem.
        sizes: Tokens of the chunks.
        shift: Distance from a token to the decision that governs it.
        shuffled: Scatter the lists between chunks.
    """

    def __init__(self, p: Prompt, sizes: list[int], shift: int, *, shuffled: bool = False) -> None:
        self.p, self.sizes, self.shift, self.shuffled = p, sizes, shift, shuffled
        assert sum(sizes) == p.s
        self.query, self.key, self.value, self.evicted = p.tensors()
        self.pages = nan_pages(self.key, p.s, p.page_slots)

    def known(self, first: int, last: int, now: int) -> Tensor:
        """Evicted of the tokens first .. last - 1 (0 before token 0) as decided before `now`."""
        padded = torch.zeros(self.p.b, self.p.h, last - first, dtype=torch.bool)
        padded = padded.to(self.p.device)
        decided = min(last, now - self.shift)
        if decided > max(first, 0):
            padded[..., max(first, 0) - first : decided - first] = self.evicted[
                ..., max(first, 0) : decided
            ]
        return padded

    def run(self) -> tuple[Tensor, PrefillState]:
        """Output of all chunks behind each other, and what the last one left behind."""
        p = self.p
        state = prefill.empty(p.b, p.h, p.window, torch.device(p.device))
        outs, first = [], 0
        for size in self.sizes:
            last = first + size
            part = slice(first, last)
            known = self.known(first - recent_tokens(p.window), last, last)
            tokens = Tokens(*(x[:, :, part] for x in (self.query, self.key, self.value)))
            chunk = prefill.plan_chunk(known, state, p.window)
            if self.shuffled:
                state = self.shuffle(state)
            outs.append(prefill.extend_prompt(tokens, chunk, state, self.pages, **p.how))
            state = prefill.state_after(chunk, state, p.window)
            first = last
        return torch.cat(outs, 2), state

    def shuffle(self, state: PrefillState) -> PrefillState:
        """Scatter each list over its slots, as decoding does."""
        slots = prefill.last_slots(state.lengths, state.seen, self.p.window)
        for b in range(self.p.b):
            for h in range(self.p.h):
                length = int(state.lengths[b, h])
                key, value = self.held(b, h, length)
                draw = torch.Generator().manual_seed(length)
                order = torch.randperm(length, generator=draw).to(key.device)  # new slot by old
                page, offset = self.place(b, h, order)
                self.pages.pages[page, 0, offset] = key
                self.pages.pages[page, 1, offset] = value
                kv_list = slots[b, h]
                kv_list[kv_list >= 0] = order[kv_list[kv_list >= 0].long()].int()
        return state._replace(slots=slots)

    def expected_list(self, b: int, h: int) -> Tensor:
        """Tokens that the list of a KV list must hold, in this order."""
        tokens = torch.arange(self.p.s)
        recent = tokens >= self.p.s - self.p.window - 1
        return tokens[recent | ~self.evicted[b, h].cpu()]

    def held(self, b: int, h: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values in the list of a KV list, [length, d]."""
        page, offset = self.place(b, h, torch.arange(length, device=self.p.device))
        found = self.pages.pages[page, :, offset]
        return found[:, 0], found[:, 1]

    def place(self, b: int, h: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Page and offset of slots of a KV list."""
        size = self.pages.pages.shape[2]
        return self.pages.table[b, h, slots // size].long(), slots % size


def check_chunks(run: InChunks) -> None:
    """Every chunk's output equals `expected_output`, and the pages hold exactly the kept tokens."""
    out, state = run.run()
    assert_near(out, expected_output(run.query, run.key, run.value, run.evicted, run.p))
    for b in range(run.p.b):
        for h in range(run.p.h):
            tokens = run.expected_list(b, h)
            assert int(state.lengths[b, h]) == len(tokens)
            pairs = torch.cat([run.key[b, h], run.value[b, h]], 1)[tokens.to(run.key.device)]
            held = torch.cat(run.held(b, h, len(tokens)), 1)
            if run.shuffled:  # any order will do; one channel of 16 bits does not distinguish rows
                pairs, held = (torch.unique(x.float(), dim=0) for x in (pairs, held))
            assert torch.equal(held, pairs)


def check_ragged(p: Prompt, starts: list[int], stops: list[int]) -> None:
    """Sequences that fill only a part of the chunk come out as if they were alone."""
    p = replace(p, b=len(starts))
    query, key, value, evicted = p.tensors()
    put = {"dtype": torch.int32, "device": p.device}
    none = torch.zeros(p.b, p.h, **put)
    start, stop = torch.tensor(starts, **put), torch.tensor(stops, **put)
    chunk = prefill.count(evicted, none, start=start, stop=stop)
    pages = nan_pages(key, p.s, p.page_slots)
    out = prefill.extend(Tokens(query, key, value), chunk, pages, **p.how)
    for row, (first, last) in enumerate(zip(starts, stops, strict=True)):
        alone = [x[row : row + 1, :, first:last] for x in (query, key, value, evicted)]
        assert_near(out[row : row + 1, :, first:last], expected_output(*alone, p))
        kept = (~alone[3]).sum(-1)
        assert torch.equal(chunk.lengths[row : row + 1], kept.int())
