"""Random paged caches and steps; the checks that the interpreter and a GPU both run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dms_train.kernels.decode import reference
from dms_train.kernels.decode.types import (
    ALWAYS,
    FP8,
    NEVER,
    SIGNAL,
    Decisions,
    FreePages,
    PagedCache,
    Step,
)
from dms_train.method.spec import PRESETS
from dms_train.method.visibility import visible


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a problem."""

    rows: int = 3
    heads: int = 2
    group: int = 2
    d: int = 16
    window: int = 5
    page_slots: int = 4
    places: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    device: str = "cpu"
    seed: int = 0

    def draw(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed)


def empty_cache(s: Shape, pages: int | None = None) -> PagedCache:
    """A cache with `pages` free pages (enough for everything if None) in random order."""
    n = s.rows * s.heads * s.places if pages is None else pages
    kind = s.cache_dtype or s.dtype
    put = {"device": s.device}
    slab = torch.full((n + 1, 2, s.page_slots, s.d), torch.nan, **put).to(kind)
    order = torch.randperm(n, generator=s.draw(), dtype=torch.int32, **put) + 1
    kv_lists = (s.rows, s.heads)
    exponents = None
    if kind == FP8:
        exponents = torch.zeros(*kv_lists, s.places, 2, dtype=torch.int8, **put)
    return PagedCache(
        pages=slab,
        table=torch.zeros(*kv_lists, s.places, dtype=torch.int32, **put),
        lengths=torch.zeros(*kv_lists, dtype=torch.int32, **put),
        ring=torch.zeros(*kv_lists, s.window + 1, dtype=torch.int32, **put),
        exponents=exponents,
        free=FreePages.all_of(n, s.device)._replace(numbers=order),
    )


def copied(cache: PagedCache) -> PagedCache:
    """The same in other memory, on the CPU."""
    fields = {
        name: None if x is None else x.clone().cpu()
        for name, x in cache._asdict().items()
        if name != "free"
    }
    free = [None if x is None else x.clone().cpu() for x in cache.free]
    return PagedCache(**fields, free=FreePages(*free))


def filled_cache(s: Shape, lengths: torch.Tensor) -> PagedCache:
    """Random tokens in random pages; what is not live is NaN."""
    cache, draw = empty_cache(s), s.draw()
    need = (lengths + s.page_slots - 1) // s.page_slots
    taken = cache.free.numbers[: int(need.sum())]
    place = torch.arange(s.places, device=s.device)
    cache.table[place < need[..., None]] = taken
    size = (len(taken), 2, s.page_slots, s.d)
    content = torch.randn(size, generator=draw, device=s.device)
    slot = place[:, None] * s.page_slots + torch.arange(s.page_slots, device=s.device)
    used = (slot < lengths[..., None, None])[place < need[..., None]]  # [pages, slots]
    content[~used[:, None].expand(-1, 2, -1)] = torch.nan
    cache.pages[taken.long()] = content.to(cache.pages.dtype)
    if cache.exponents is not None:
        like = cache.exponents
        like.copy_(torch.randint(-6, 7, like.shape, generator=draw, device=s.device))
    cache.lengths.copy_(lengths)
    return cache


def random_step(s: Shape, at: torch.Tensor, seed: int, spread: float = 1.0) -> Step:
    """A token for every row at its position, int32 [rows]; -1 for rows that rest."""
    draw = torch.Generator(s.device).manual_seed(1000 * s.seed + seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw, device=s.device)

    factor = torch.exp(spread * normal(s.rows, s.heads, 1)) if spread != 1.0 else 1.0
    even = torch.arange(s.d // 2, device=s.device) * 2 / s.d
    angle = at.clamp(min=0)[:, None] * 100.0**-even
    angle = torch.cat([angle, angle], -1)
    rows = torch.where(at < 0, -1, torch.arange(s.rows, device=s.device)).int()
    return Step(
        query=normal(s.rows, s.heads * s.group, s.d).to(s.dtype),
        key=(normal(s.rows, s.heads, s.d) * factor).to(s.dtype),
        value=(normal(s.rows, s.heads, s.d) * factor).to(s.dtype),
        cos=angle.cos(),
        sin=angle.sin(),
        position=at.int(),
        rows=rows,
        signal=normal(s.rows, s.heads) > 0,
    )


def rules(window: int) -> dict[str, Decisions]:
    """Every way to decide, at its edges."""
    kv_list = Decisions.of(PRESETS["dms"].override(window=window, alpha_offset=0.0), 16)
    signal = kv_list._replace(source=SIGNAL)
    return {
        "keep_all": Decisions(NEVER),
        "window": Decisions(ALWAYS),
        "kv_list": kv_list,
        "last_channel": kv_list._replace(channel=15, clear_after_rope=True, shift=0),
        "signal": signal,
        "immediate": signal._replace(shift=window),
        "immediate_shifted": signal._replace(shift=window + 1),
    }


def on_cpu(step: Step) -> Step:
    return Step(*(None if x is None else x.cpu() for x in step))


def check_append(append, s: Shape, rule: Decisions, steps: int) -> None:
    """Steps of a kernel against the reference: same slots, same content, same query."""
    cache = empty_cache(s)
    reference_cache = copied(cache)
    start = torch.tensor([0, 3, 40], device=s.device)[: s.rows]
    for t in range(steps):
        at = torch.where(t >= start, t - start, -1)
        step = random_step(s, at, t)
        if rule.source != SIGNAL:
            step = step._replace(signal=None)
        rotated = append(step, cache, rule)
        expected = reference.append(on_cpu(step), reference_cache, rule)
        busy = (at >= 0).cpu()
        close = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[s.dtype]
        torch.testing.assert_close(
            rotated.cpu()[busy].double(), expected[busy], rtol=close, atol=close
        )
    mine = copied(cache)
    assert torch.equal(mine.lengths, reference_cache.lengths)
    assert torch.equal(mine.ring, reference_cache.ring)
    assert int(mine.free.left) == int(reference_cache.free.left)
    assert int(mine.free.fault) == 0
    if mine.exponents is not None:
        assert torch.equal(mine.exponents, reference_cache.exponents)
    for row in range(s.rows):
        for head in range(s.heads):
            for ours, theirs in zip(
                reference.live_slots(mine, row, head),
                reference.live_slots(reference_cache, row, head),
                strict=True,
            ):
                wide = 0.13 if mine.exponents is not None else close
                torch.testing.assert_close(ours, theirs, rtol=wide, atol=close)


def check_shared_pages(append, s: Shape, rule: Decisions, steps: int) -> None:
    """Rows that go on from one row's pages equal rows that have stored all tokens themselves."""
    shared, apart = (empty_cache(s, 4 * s.rows * s.heads * s.places) for _ in range(2))
    first = torch.arange(s.rows, device=s.device) == 0
    for t in range(steps):
        step = random_step(s, torch.full((s.rows,), t, device=s.device), t)
        same = [x[:1].expand_as(x).contiguous() for x in step[:5]]
        step = Step(*same, *step[5:7], step.signal[:1].expand_as(step.signal).contiguous())
        step = step if rule.source == SIGNAL else step._replace(signal=None)
        append(step, apart, rule)
        append(step._replace(rows=torch.where(first, step.rows, -1)), shared, rule)
    used = (shared.lengths[0] + s.page_slots - 1) // s.page_slots
    held = torch.arange(s.places, device=s.device) < used[:, None]
    for x in (shared.table, shared.lengths, shared.ring, shared.exponents):
        if x is not None:
            x[1:] = x[:1]
    shared.free.holders[shared.table[0][held]] = s.rows
    original = shared.pages[shared.table[0][held].long()].float()
    untouched = shared.table[0][held].clone()
    shared.free.holders[untouched] += 1  # a snapshot, which must not change
    for t in range(steps, steps + 2 * s.window):
        step = random_step(s, torch.full((s.rows,), t, device=s.device), t)
        step = step if rule.source == SIGNAL else step._replace(signal=None)
        append(step, apart, rule)
        append(step, shared, rule)
    mine, theirs = copied(shared), copied(apart)
    assert int(mine.free.fault) == 0
    assert torch.equal(mine.ring, theirs.ring)
    assert torch.equal(mine.lengths, theirs.lengths)
    for row in range(s.rows):
        for head in range(s.heads):
            for ours, others in zip(
                reference.live_slots(mine, row, head),
                reference.live_slots(theirs, row, head),
                strict=True,
            ):
                torch.testing.assert_close(ours, others, rtol=0, atol=0)
    torch.testing.assert_close(
        shared.pages[untouched.long()].float(), original, rtol=0, atol=0, equal_nan=True
    )
    used = (mine.lengths + s.page_slots - 1) // s.page_slots
    place = torch.arange(s.places)
    counted = torch.bincount(mine.table[place < used[..., None]], minlength=len(mine.pages))
    counted[untouched.cpu()] += 1
    free = mine.free.numbers[: int(mine.free.left)].long()
    assert not counted[free].any()
    assert (mine.free.holders[free] == 1).all()
    taken = torch.ones(len(mine.pages), dtype=torch.bool)
    taken[free] = False
    assert torch.equal(mine.free.holders[1:][taken[1:]].long(), counted[1:][taken[1:]])


def check_attend(
    attend, s: Shape, lengths: torch.Tensor, tolerance: float, *, sinks: bool = False
) -> None:
    """A kernel over random live slots against float64."""
    cache = filled_cache(s, lengths)
    draw = s.draw()
    query = torch.randn(s.rows, s.heads * s.group, s.d, generator=draw, device=s.device)
    query = query.to(s.dtype)
    order = torch.randperm(s.rows, generator=torch.Generator().manual_seed(s.seed))
    rows = order.int().to(s.device)
    rows[0] = -1
    own = torch.linspace(-4, 4, s.heads * s.group, device=s.device) if sinks else None
    output = attend(query, cache, rows, 0.3, sinks=own).cpu()
    own = None if own is None else own.cpu()
    expected = reference.attend(query.cpu(), copied(cache), rows.cpu(), 0.3, sinks=own)
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


def masked_attention(steps: list[Step], s: Shape, allowed: torch.Tensor, scale: float):
    """Dense float64 attention of every step's query, [rows, steps, h * g, d]; no cache at all."""
    cos, sin = (torch.stack([x[i] for x in steps], 1).double() for i in (3, 4))  # [rows, T, d]
    query, key, value = (torch.stack([x[i] for x in steps], 1).double() for i in range(3))
    rotated_key = reference.rotate(key, cos[:, :, None], sin[:, :, None])
    grouped = reference.rotate(query, cos[:, :, None], sin[:, :, None])
    grouped = grouped.view(*query.shape[:2], s.heads, s.group, s.d)
    scores = torch.einsum("bihgd,bjhd->bhgij", grouped, rotated_key) * scale
    weights = scores.masked_fill(~allowed[:, :, None], -torch.inf).softmax(-1)
    return torch.einsum("bhgij,bjhd->bihgd", weights, value).flatten(2, 3)


def check_visibility(append, attend, s: Shape, preset: str, steps: int, **overrides) -> None:
    """Append and attend for a whole text equal dense attention under the visibility rule."""
    spec = PRESETS[preset].override(window=s.window, **overrides)
    rule = Decisions.of(spec, s.d)._replace(source=SIGNAL, clear=False, clear_after_rope=False)
    cache, at = empty_cache(s), torch.zeros(s.rows, dtype=torch.int32, device=s.device)
    fed = [random_step(s, at + t, t) for t in range(steps)]
    output = [attend(append(x, cache, rule), cache, x.rows, s.d**-0.5).cpu() for x in fed]
    decisions = torch.stack([x.signal.cpu() for x in fed], -1)
    plain = [on_cpu(x) for x in fed]
    expected = masked_attention(plain, s, visible(decisions, spec), s.d**-0.5)
    tolerance = 1e-5 if s.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(
        torch.stack(output, 1).double(), expected, rtol=tolerance, atol=tolerance
    )
