"""Paged cache for policies with a budget.

The kernels of `PagedKVCache` store and attend generated tokens. After the attention of a layer, one
more kernel chooses the token of each KV list that is evicted; the next token takes its slot. Inside
and at the end of a prompt, the policy's own hooks decide in torch operations. The tokens that stay
then move to the front of their KV lists.

Positions and scores belong to KV lists and not to pages: KV lists may share a page, but each has
its own positions and scores.

Shape letters: b sequences, h KV heads, r query heads per KV head, n arriving tokens, s slots,
m recent queries, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dms_train.inference.cache.base import Attended
from dms_train.inference.cache.device_pool import DevicePool
from dms_train.inference.cache.hook_sizes import HookPlan, HookSizes
from dms_train.inference.cache.interface import AttentionStep
from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.cache.paged_prompt import Chunk
from dms_train.inference.cache.policy_hooks import QUERIES, join, received_from
from dms_train.inference.cache.row_requests import RowRequests
from dms_train.inference.cache.sizes import CacheSizes
from dms_train.inference.devices import sent
from dms_train.inference.errors import InferenceError
from dms_train.inference.policies import kernel_rules as rules
from dms_train.inference.policies.base import (
    CachePolicy,
    NewTokens,
    RequestSizes,
    Sequences,
    Slots,
)
from dms_train.inference.policies.kernel_rules import BudgetRule, KernelRule
from dms_train.kernels import dispatch
from dms_train.kernels.decode.slots import attend_slots
from dms_train.kernels.decode.types import (
    CHOSEN,
    DECAYED,
    LEAST,
    MAXIMUM,
    MEAN,
    NEVER,
    OLDEST,
    SUM,
    SUMMED,
    Choice,
    Decisions,
    HeadNorms,
    PagedCache,
    SlotLogits,
    Step,
)
from dms_train.method.base import MethodSpec

_KINDS = {rules.COLUMN_SUMS: SUMMED, rules.NEWEST_WEIGHTS: LEAST, rules.RETENTION: DECAYED}
_REDUCTIONS = {"mean": MEAN, "max": MAXIMUM, "sum": SUM}


class BudgetPagedCache(PagedKVCache):
    """Paged cache whose KV lists keep to the budget of a policy.

    Args:
        pool: As for `PagedKVCache`, in the dtype of the model.
        policy: Policy whose kernel rule is a `BudgetRule`.
        sizes: Sizes of the cache.
    """

    captures_prompts = False  # the host chooses how much memory they take
    changes_known_pages = False  # the evicted token may lie in any page

    def __init__(self, pool: DevicePool, policy: CachePolicy, sizes: CacheSizes) -> None:
        super().__init__(pool, policy, sizes)
        rule = policy.kernel_rule()
        assert isinstance(rule, BudgetRule)
        self._budget_rule = rule
        self._scored = rule.score is not None  # evicts after the attention
        self._retains = rule.score == rules.RETENTION  # and does not read it
        self.decodes_prompts, self.eviction_interval = rule.streams, rule.interval
        layers, rows, h = lists = sizes[:3]
        put: dict[str, Any] = {"device": pool.device}
        slots = self.lists.tables.shape[-1] * pool.page_slots
        self._positions = torch.zeros(*lists, slots, dtype=torch.int32, **put)
        kept = rule.score in (rules.COLUMN_SUMS, rules.RETENTION)
        self._scores = torch.zeros(*lists, slots if kept else 0, **put)
        self._requests = RowRequests(layers, rows, pool.device)
        self._recent = policy.recent_queries
        shape = (layers, rows + 1, self._recent, h, sizes.group, pool.pages.shape[-1])
        self._queries = torch.zeros(shape, dtype=pool.dtype, **put)
        self._query_index: tuple[Tensor, Tensor]  # belongs to the current step
        self._choice: Choice | None = None  # belongs to the current step
        self._plans: dict[int, HookPlan] = {}  # of the current pass, by micro-batch
        self._sizes: HookSizes | None = None  # belongs to the current step; None if kernels decide
        self._logits: SlotLogits | None = None
        if self._scored and not self._retains:
            most = min(slots, _largest_budget(policy, layers, sizes.longest) + 1)
            queries = ((1 << (rows - 1).bit_length()) * h, sizes.group)
            self._logits = SlotLogits(
                torch.zeros(*queries, most, **put), torch.zeros(queries, **put)
            )

    def _decisions_for(self, rule: KernelRule) -> tuple[Decisions, int]:
        """Return the rule for prompts: store the whole prompt, evict nothing yet."""
        return Decisions(NEVER), 0

    def _rule_of(self, spec: MethodSpec | None, head_size: int) -> Decisions:
        if spec is None and self._retains:
            name = type(self.policy).__name__
            raise InferenceError(f"{name}: reads eviction channels; give a retrofitted model")
        rule = super()._rule_of(spec, head_size)
        return rule if self._budget_rule.evicts == rules.NEVER else rule._replace(source=CHOSEN)

    def _policy_tensors(self) -> list[Tensor]:
        return [self._positions, self._scores, self._queries, *(self._logits or ())]

    def view(self, layer: int) -> PagedCache:
        """Return one layer in the form that the kernels take."""
        return super().view(layer)._replace(positions=self._positions[layer])

    def status(self) -> list[Tensor]:
        """Return the status of `PagedKVCache`, and the rings; odd entries are evicted tokens."""
        return [*super().status(), *([self._rings.view(-1)] if self._scored else [])]

    def counts(self, lists: Tensor) -> tuple[Tensor, Tensor]:
        """Return the counts of `PagedKVCache`; scored tokens are read before their eviction."""
        return lists[0], lists[0] - lists[1] % 2 if self._scored else lists[0]

    def live(self, rows: Tensor) -> Tensor:
        """Return the live tokens, int64 [layers, b, h]."""
        lengths = self.lists.lengths[:, rows].long()
        return lengths - self._rings[:, rows, :, 0] % 2 if self._scored else lengths

    def held_slots(self, rows: Tensor) -> Tensor:
        """Return the slots of the pages held, int64 [layers, b, h]."""
        return self.lists.pages(self.lists.lengths[:, rows].long()) * self.pool.page_slots

    def positions(self, row: int) -> list[list[Tensor]]:
        """Return the positions of a row's live tokens by layer and head, int64 on the CPU."""
        at, rows = [], torch.tensor([row], device=self.pool.device)
        stored = int(self.lists.lengths[:, row].max())
        for layer in range(len(self.lists.lengths)):
            position = self._stored_positions(layer, rows, stored)
            slot = torch.arange(position.shape[-1], device=position.device)
            if self._scored:
                position = position.masked_fill(2 * slot + 1 == self._rings[layer, rows], -1)
            at.append([head[head >= 0].sort().values.cpu() for head in position[0]])
        return at

    def most_copies(self, row: int, tokens: int) -> int:
        """Return the shared pages of a row; the last token of a prompt may rewrite all of them."""
        return super().most_copies(row, tokens if self.decodes_prompts else max(2, tokens))

    def assign(self, row: int, sizes: RequestSizes) -> None:
        """Store the sizes of the request, or turn, that takes a row; keep the cached tokens."""
        self._requests.assign(row, sizes)
        if self._budget_rule.evicts != rules.OLDEST:
            return
        if stored := int(self.lists.lengths[:, row].max()):
            rows = sent([row], self.pool.device)
            # another budget may keep the marked token
            for layer in range(len(self.lists.lengths)):
                self._mark_oldest(layer, rows, stored)

    def free(self, rows: Tensor) -> None:
        """Release all pages of these rows, int64 [b]."""
        super().free(rows)
        self._rings[:, rows] = 0

    def _row_tensors(self) -> list[Tensor]:
        return [*super()._row_tensors(), self._queries]

    def _page_tensors(self) -> list[Tensor]:
        size = self.pool.page_slots
        own = [x for x in (self._positions, self._scores) if x.numel()]
        return [*super()._page_tensors(), *(x.view(*x.shape[:3], -1, size) for x in own)]

    def step(self, layer: int, step: AttentionStep) -> Attended:
        """Store tokens, evict and attend; the host waits once if the policy's hooks decide."""
        if self._recording:
            return self._decode(layer, step)
        if layer == 0:  # of each micro-batch, before any of them enters the next layer
            self._plans[step.micro_batch] = self._plan(step)
        self._sizes, mixed = self._plans[step.micro_batch]
        if self._sizes is None:
            return self._decode(layer, step)
        if mixed is None:
            return self._prompt(layer, step)
        output = torch.empty_like(step.query.flatten(2, 3).transpose(1, 2))
        reads = torch.empty_like(self.lists.lengths[layer, step.rows], dtype=torch.int64)
        for compute, index in zip((self._decode, self._prompt), mixed, strict=True):
            attended = compute(layer, step.some(index))
            output[index], reads[index] = attended.output, attended.reads
        return Attended(output, reads)

    def _plan(self, step: AttentionStep) -> HookPlan:
        """Find out who decides after the tokens of a step, and read the sizes that hooks need."""
        one = step.position.shape[1] == 1
        if one and self.decodes_prompts:
            return HookPlan()
        sizes = self._read_sizes(step, one)
        hooks = [i for i, by_hooks in enumerate(sizes.by_hooks) if by_hooks]
        if not hooks:
            return HookPlan()
        if len(hooks) == len(sizes.by_hooks):
            return HookPlan(sizes)
        kernels = [i for i, by_hooks in enumerate(sizes.by_hooks) if not by_hooks]
        device = step.rows.device
        return HookPlan(sizes.of(hooks), (sent(kernels, device), sent(hooks, device)))

    def _read_sizes(self, step: AttentionStep, one: bool) -> HookSizes:
        """Read the sizes of a step whose sequences have one token each, or of any other step."""
        end, added = step.position.amax(1) + 1, (step.position >= 0).sum(1)
        sequences = self._requests.sequences(step.rows, end - added, end)
        due = self.policy.evicts_after(sequences)
        by_hooks = torch.ones_like(due)
        if one:
            by_hooks = end <= sequences.prompt
            if self.eviction_interval is not None:
                by_hooks = by_hooks | due
        kept = end
        if self._budget_rule.evicts == rules.OLDEST:
            kept = sum(self.policy.limits(sequences), torch.zeros_like(end))
        lengths = self.lists.lengths[:, step.rows]
        pending = torch.zeros_like(lengths)
        if self._scored:
            pending = self._rings[:, step.rows, :, 0] % 2
        return HookSizes.read(lengths, pending, added, [by_hooks, due, kept])

    def _append_and_attend(
        self, layer: int, token: Step, rule: Decisions, norms: HeadNorms | None
    ) -> Tensor:
        cache, b, d = self.view(layer), len(token.rows), token.query.shape[-1]
        kernels = dispatch.triton_kernels()
        rotated = kernels.append(token, cache, rule, norms=norms)
        if layer == 0:
            self._choice = self._choice_of(token)
            if self._recent:
                self._query_index = token.rows.long(), token.position.long() % self._recent
        if self._recent:
            newest = rotated.view(b, *self._queries.shape[3:])
            self._queries[layer].index_put_(self._query_index, newest)
        if b not in self._memory:
            self._memory[b] = kernels.attention_workspace(rotated, cache)
        logits = None
        if self._logits is not None:
            lists = b * self.lists.lengths.shape[2]
            logits = SlotLogits(self._logits.logits[:lists], self._logits.totals[:lists])
        output = kernels.attend(rotated, cache, token.rows, d**-0.5, self._memory[b], logits=logits)
        if self._choice is not None:
            scores = self._scores[layer] if self._scores.numel() else None
            brought = self._brought(token, rule, norms) if self._retains else None
            given = (token.rows, token.position)
            kernels.choose(
                cache, self._choice, *given, logits=logits, scores=scores, brought=brought
            )
        return output

    def _brought(self, token: Step, rule: Decisions, norms: HeadNorms | None) -> Tensor:
        """Return the numbers that the tokens of a step bring, float32 [b, h]."""
        b, h, d = token.key.shape
        query = token.query.view(b, h, -1, d)[:, :, 0]
        if norms is not None:
            wide = query.float()
            scale = (wide.square().mean(-1, keepdim=True) + norms.epsilon).rsqrt()
            query = (wide * scale).to(query.dtype) * norms.query
        return self.policy.retention(query[..., rule.channel])

    def _choice_of(self, token: Step) -> Choice | None:
        """Return the rule that selects the evicted token after a step; None to evict none."""
        rule = self._budget_rule
        if rule.evicts == rules.NEVER:
            return None
        end = token.position.long() + 1
        if rule.evicts == rules.OLDEST:  # decided before the next token is attended
            sequences = self._requests.sequences(token.rows, end, end + 1)
            return Choice(OLDEST, *self.policy.limits(sequences))
        assert rule.score is not None
        limits = self.policy.limits(self._requests.sequences(token.rows, end - 1, end))
        return Choice(_KINDS[rule.score], *limits, _REDUCTIONS[rule.reduce], rule.together)

    def _prompt(self, layer: int, step: AttentionStep) -> Attended:
        """Compute tokens, then let the policy's hooks decide."""
        query, arrival = step.rotated_by_kernel(decides=False)
        if self._retains:
            rule = self._rule_at(layer, step.spec, step.query.shape[-1])
            brought = self.policy.retention(step.query[:, :, :, 0, rule.channel])
            arrival = arrival._replace(signal=brought.transpose(1, 2))
        if self._budget_rule.evicts == rules.OLDEST:
            return self._stream(layer, step.rows, query, arrival)
        self._close(layer, step.rows)
        before = self.lists.lengths[layer, step.rows]
        pages = sum(self._most_pages(step))
        attended = self._prefill(layer, Chunk(step.rows, query, arrival, pages, step.begins))
        self._note(layer, step.rows, before, query, arrival)
        self._evict(layer, step.rows, query, arrival.position)
        return attended

    def _stream(self, layer: int, rows: Tensor, query: Tensor, arrival: NewTokens) -> Attended:
        """Compute tokens in blocks; each query reads the tokens left at its position."""
        assert self._sizes is not None
        held, outputs, reads = max(self._sizes.before[layer]), [], []
        for start in range(0, query.shape[2], QUERIES):
            part = slice(start, start + QUERIES)
            attended = self._stream_block(
                layer, rows, query[:, :, part], _part(arrival, part), held
            )
            held = min(held + attended.output.shape[2], max(self._sizes.kept))
            outputs.append(attended.output)
            reads.append(attended.reads)
        self._mark_oldest(layer, rows, held)
        return Attended(torch.cat(outputs, 2), torch.stack(reads).sum(0))

    def _note(
        self, layer: int, rows: Tensor, before: Tensor, query: Tensor, arrival: NewTokens
    ) -> None:
        """Keep queries, positions and scores of tokens stored after the first `before` [b, h]."""
        assert self._sizes is not None
        position = arrival.position
        most = max(self._sizes.after[layer])
        column = torch.arange(most, dtype=torch.int32, device=before.device)
        since, count = column - before[..., None], (position >= 0).sum(1)
        new = (since >= 0) & (since < count[:, None, None])
        known = self._positions[layer, rows, :, :most]
        arrived = (position[:, :1, None] + since).int()
        self._positions[layer, rows, :, :most] = torch.where(new, arrived, known)
        if self._scores.numel():
            known = self._scores[layer, rows, :, :most]
            score = torch.zeros_like(known)
            if arrival.signal is not None:
                score = arrival.signal.gather(2, since.clamp(0, position.shape[1] - 1)).to(known)
            self._scores[layer, rows, :, :most] = torch.where(new, score, known)
        if m := self._recent:
            index = count[:, None] - m + torch.arange(m, device=rows.device)  # padding is last
            column, sequence = index.clamp(min=0), torch.arange(len(rows), device=rows.device)
            newest = query.transpose(1, 2)[sequence[:, None], column]
            newest = newest.view(*index.shape, *self._queries.shape[3:]).to(self._queries.dtype)
            row = torch.where(index >= 0, rows[:, None], -1)  # the last row is never read
            self._queries[layer][row, position.gather(1, column) % m] = newest

    def _recent_queries(self, layer: int, rows: Tensor, end: Tensor) -> Tensor | None:
        """Return the newest queries [b, h, m, r, d]; 0 for missing ones."""
        m = self._recent
        if not m:
            return None
        at = end[:, None] - m + torch.arange(m, device=end.device)
        queries = self._queries[layer][rows[:, None], at % m]
        return queries.masked_fill((at < 0)[..., None, None, None], 0).transpose(1, 2)

    def _evict(self, layer: int, rows: Tensor, query: Tensor, position: Tensor) -> None:
        """Drop the tokens that the policy evicts after a stored chunk of a prompt."""
        end = position.amax(1) + 1
        start = end - (position >= 0).sum(1)
        sequences = self._requests.sequences(
            rows, start, end, self._recent_queries(layer, rows, end)
        )
        assert self._sizes is not None
        if self._budget_rule.evicts == rules.NEVER or self._retains:
            if not any(self._sizes.due):
                return
            pairs = zip(self._sizes.after[layer], self._sizes.due, strict=True)
            sequences = sequences._replace(held=[tokens * due for tokens, due in pairs])
        slots = self._contents(layer, rows, max(self._sizes.after[layer]))
        slots = slots._replace(sequences=sequences)
        if self._scored and not self._retains:
            seen = received_from(slots, query, position)
            slots = slots._replace(state=self.policy.observe(slots, seen))
            if self._scores.numel():
                self._scores[layer, rows, :, : slots.state.shape[2]] = slots.state[..., 0]
        held = slots.position >= 0
        keep = held & ~self.policy.evict_mask(slots, end[:, None] - 1)[:, :, 0]
        self._fill(layer, rows, slots, keep, (keep != held).any(-1))

    def _stream_block(
        self, layer: int, rows: Tensor, query: Tensor, arrival: NewTokens, stored: int
    ) -> Attended:
        """Compute a block of a prompt for KV lists of up to `stored` tokens."""
        at = arrival.position
        end = at.amax(1) + 1
        sequences = self._requests.sequences(rows, end - (at >= 0).sum(1), end)
        slots = join(self._contents(layer, rows, stored), arrival)._replace(sequences=sequences)
        assert slots.key is not None
        assert slots.value is not None
        held = slots.position >= 0
        mask = held[:, :, None] & (slots.position[:, :, None] <= at[:, None, :, None])
        mask = mask & ~self.policy.evict_mask(slots, at)
        output, _ = attend_slots(query, slots.key, slots.value, mask[:, :, None])
        keep = held & ~self.policy.evict_mask(slots, end[:, None] - 1)[:, :, 0]
        lists = len(rows) * self.lists.lengths.shape[2]
        pages = lists * self._pages_of(at.shape[1])
        self._fill(layer, rows, slots, keep, torch.ones_like(keep[..., 0]), pages)
        return Attended(output, mask.sum((2, 3)))

    def _mark_oldest(self, layer: int, rows: Tensor, stored: int) -> None:
        """Mark the token of each KV list, of up to `stored` tokens, that the next one replaces."""
        position = self._stored_positions(layer, rows, stored)
        following = position.amax((1, 2)) + 1
        limits = self.policy.limits(self._requests.sequences(rows, following, following + 1))
        first, last = (x[:, None, None] for x in limits)
        due = (position >= first) & (position <= following[:, None, None] - last)
        oldest = torch.where(due, position, torch.iinfo(position.dtype).max).argmin(-1)
        self._rings[layer, rows, :, 0] = torch.where(due.any(-1), 2 * oldest + 1, 0).int()

    def _close(self, layer: int, rows: Tensor) -> None:
        """Remove the tokens that were evicted after the last step."""
        assert self._sizes is not None
        if not any(self._sizes.pending[layer]):
            return
        entry = self._rings[layer, rows]
        slots = self._contents(layer, rows, max(self._sizes.before[layer]))
        column = torch.arange(slots.position.shape[-1], device=entry.device)
        keep = (slots.position >= 0) & (2 * column + 1 != entry)
        self._fill(layer, rows, slots, keep, entry[..., 0] % 2 > 0)
        self._rings[layer, rows] = 0

    def _stored_positions(self, layer: int, rows: Tensor, stored: int) -> Tensor:
        """Return the positions in the pages of up to `stored` slots, int64 [b, h, s]; -1: empty."""
        # the bound may come from two sequences, and then exceed the longest possible one
        pages = min(max(1, self._pages_of(stored)), self.lists.tables.shape[-1])
        most = pages * self.pool.page_slots
        held = torch.arange(most, device=rows.device) < self.lists.lengths[layer, rows][..., None]
        return self._positions[layer, rows, :, :most].long().masked_fill(~held, -1)

    def _contents(self, layer: int, rows: Tensor, stored: int) -> Slots:
        """Return the tokens of KV lists of up to `stored` slots, by slot; 0 in empty slots."""
        position = self._stored_positions(layer, rows, stored)
        num_pages = position.shape[-1] // self.pool.page_slots
        pages = self.pool.pages[self.lists.tables[layer, rows, :, :num_pages].long()]
        content = pages.transpose(2, 3).flatten(3, 4)  # [b, h, 2, s, d]
        content = content.masked_fill((position < 0)[:, :, None, :, None], 0)
        state = torch.zeros(*position.shape, self.policy.state_width, device=position.device)
        if self._scores.numel():
            state = self._scores[layer, rows, :, : position.shape[-1], None]
            state = state.masked_fill((position < 0)[..., None], 0)
        return Slots(layer, position, state, content[:, :, 0], content[:, :, 1])

    def _fill(
        self, layer: int, rows: Tensor, slots: Slots, keep: Tensor, changed: Tensor, pages: int = 0
    ) -> None:
        """Reduce KV lists to the kept tokens, in the order of their positions.

        Args:
            layer: Layer number.
            rows: int64 [b].
            slots: Tokens of the lists.
            keep: bool [b, h, s].
            changed: bool [b, h]; the other lists keep all of their tokens, which do not move.
            pages: Most pages that the lists grow by.
        """
        assert slots.key is not None
        assert slots.value is not None
        size, before = self.pool.page_slots, self.lists.lengths[layer, rows]
        counts, lists = keep.sum(-1, dtype=torch.int32), self.lists.numbers(layer, rows)
        table = self._allocate(layer, rows, lists, torch.maximum(counts, before).flatten(), pages)
        if self.pool.sharing:
            written = self.lists.places() < self.lists.pages(counts)[..., None]
            self.lists.copy_on_write(lists, (written & changed[..., None]).flatten(0, 1))
            table = self.lists.tables[layer, rows]
        most = min(slots.position.shape[-1], table.shape[-1] * size)
        column = torch.arange(most, device=rows.device)
        order = slots.position.masked_fill(~keep, torch.iinfo(torch.int64).max)
        order = order.argsort(-1)[..., :most]
        inside = (column < counts[..., None]) & changed[..., None]
        page = table[..., column // size].masked_fill(~inside, 0).long()  # page 0 is never read
        for kind, content in enumerate((slots.key, slots.value)):
            moved = content.gather(2, order[..., None].expand(-1, -1, -1, content.shape[-1]))
            self.pool.pages[page, kind, column % size] = moved.to(self.pool.pages.dtype)
        known = self._positions[layer, rows, :, :most]
        position = slots.position.gather(2, order).int()
        self._positions[layer, rows, :, :most] = torch.where(inside, position, known)
        if self._scores.numel():
            known, score = self._scores[layer, rows, :, :most], slots.state[..., 0]
            self._scores[layer, rows, :, :most] = torch.where(inside, score.gather(2, order), known)
        self.lists.release(lists, counts.flatten().contiguous())


def _largest_budget(policy: CachePolicy, layers: int, longest: int) -> int:
    """Return the budget of a sequence whose prompt has the maximum length."""
    end, seed = torch.tensor([longest]), torch.zeros(1, dtype=torch.int64)
    whole = Sequences(layers, end - 1, end, prompt=end, limit=end, seed=seed, lists={})
    return int(policy.limits(whole).most)


def _part(arrival: NewTokens, part: slice) -> NewTokens:
    """Return a block of prompt tokens."""
    key, value = arrival.key[:, :, part], arrival.value[:, :, part]
    return NewTokens(arrival.position[:, part], key, value, None)
