"""Credit for pages: the KV cache spec and its manager, in the scheduler's process.

A block is a credit for one page of each of the A KV lists of a request (layers x KV heads). Blocks
have no address, so that no block id reaches a worker.

A list of n tokens takes ceil(n / P) pages of P slots, and ceil((n + m) / P) is at most
ceil(n / P) + ceil(m / P). After a report of `pages` pages at token `seen`, a request that is
scheduled up to token t therefore needs at most ceil(pages / A) + ceil((t - seen) / P) blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from dms_train.vllm_plugin.estimate import BlockEstimate

# One block that vLLM never grants, and one because the two terms of the bound are rounded up.
_SPARE_BLOCKS = 2


@dataclass(frozen=True, kw_only=True)
class DMSCacheSpec(FullAttentionSpec):
    """KV cache of all layers of a rank; `num_kv_heads` is the number of its KV lists per request.

    The first attention layer states it for the whole model.
    """

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes that a request of the longest length takes if nothing is evicted."""
        dense: int = super().max_memory_usage_bytes(vllm_config)
        return dense + _SPARE_BLOCKS * self.page_size_bytes

    @property
    def prefix_cacheable(self) -> bool:
        """Return False: blocks hold no tokens."""
        return False

    @property
    def uses_slot_mapping(self) -> bool:
        """Return False: blocks have no address."""
        return False


@dataclass(eq=False, slots=True)
class Account:
    """Credit of a request.

    Attributes:
        blocks: Blocks that the request holds.
        pages: Pages of the last report.
        seen: Tokens that were computed when these pages were counted.
        scheduled: Tokens that are scheduled so far.
    """

    blocks: list[KVCacheBlock] = field(default_factory=list)
    pages: int = 0
    seen: int = 0
    scheduled: int = 0


class CacheCounts(NamedTuple):
    """Use of the cache by all requests, as far as reported.

    Attributes:
        pages: Pages that they hold.
        all_pages: Pages of the pool.
        slots: Slots of the pages that they hold.
        tokens: Slots that they would fill if nothing was evicted.
    """

    pages: int
    all_pages: int
    slots: int
    tokens: int

    @property
    def fill(self) -> float:
        """Return the share of the pool that is held."""
        return self.pages / self.all_pages

    @property
    def compression_ratio(self) -> float:
        """Return tokens per slot; 1 if no slot is held."""
        return self.tokens / self.slots if self.slots else 1.0


class CreditManager(SingleTypeKVCacheManager):
    """Manager that charges each request an upper bound of the pages that it can hold."""

    def __init__(self, kv_cache_spec: DMSCacheSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self._lists = kv_cache_spec.num_kv_heads
        self._accounts: dict[str, Account] = {}
        self._prompts = BlockEstimate(1, 1.0, self.block_size)

    def expect(self, window: int, ratio: float) -> None:
        """Estimate the blocks of prompts, at first by the compression ratio of an export.

        Args:
            window: Tokens that are never evicted.
            ratio: Tokens per token that is kept, among all other tokens.
        """
        self._prompts = BlockEstimate(window, ratio, self.block_size)

    def observe_prompt(self, account: Account) -> None:
        """Add a finished prompt to the estimate, by the last report of its request."""
        slots = account.pages * self.block_size / self._lists
        self._prompts.observe(account.seen, slots)

    def account(self, request_id: str) -> Account | None:
        """Return the account of a request; None if it holds nothing."""
        return self._accounts.get(request_id)

    def report(self, account: Account, pages: int, seen: int) -> None:
        """Update an account by the pages that its request held, and free what it does not need.

        Args:
            account: The account.
            pages: Pages that the request held.
            seen: Tokens that were computed then.
        """
        account.pages, account.seen = pages, seen
        needed = self._bound(account, account.scheduled)
        surplus = account.blocks[needed:]
        if surplus:  # rare, and an empty list takes vLLM as long as the rest of this function
            del account.blocks[needed:]
            self.block_pool.free_blocks(reversed(surplus))

    def counts(self) -> CacheCounts:
        """Count what all requests hold by their last reports."""
        pages = sum(account.pages for account in self._accounts.values())
        seen = sum(account.seen for account in self._accounts.values())
        granted = self.block_pool.num_gpu_blocks - 1  # vLLM never grants one
        return CacheCounts(
            pages, granted * self._lists, pages * self.block_size, seen * self._lists
        )

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """Return the blocks that a request needs besides its own.

        Args:
            request_id: The request.
            num_tokens: Tokens that it is scheduled up to.
            *args: Not used.
            apply_admission_cap: Whether the whole prompt is estimated before its first chunk.
            **kwargs: Not used.
        """
        if apply_admission_cap:
            return self._prompts.blocks(num_tokens)
        account = self._accounts.get(request_id) or Account()
        return max(0, self._bound(account, num_tokens) - len(account.blocks))

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> list[KVCacheBlock]:
        """Take the blocks that a request needs, and return none of them to the worker.

        Args:
            request_id: The request.
            num_tokens: Tokens that it is scheduled up to.
            *args: Not used.
            **kwargs: Not used.
        """
        account = self._accounts.setdefault(request_id, Account())
        account.scheduled = num_tokens
        missing = self._bound(account, num_tokens) - len(account.blocks)
        if missing > 0:
            account.blocks += self.block_pool.get_new_blocks(missing)
        return []

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Close the account of a request and return its blocks."""
        super().pop_blocks_for_free(request_id)
        account = self._accounts.pop(request_id, None)
        return [] if account is None else account.blocks

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Return 0: requests share no blocks."""
        return 0

    @classmethod
    def find_longest_cache_hit(cls, *args: Any, **kwargs: Any) -> tuple[Sequence[Any], ...]:
        """Fail: there is no prefix cache."""
        raise NotImplementedError("DMS has no prefix cache in vLLM")

    def _bound(self, account: Account, tokens: int) -> int:
        """Return the most blocks that a request can need when it has `tokens` tokens."""
        added = max(0, tokens - account.seen)
        return _ceil(account.pages, self._lists) + _ceil(added, self.block_size)


def _ceil(x: int, y: int) -> int:
    return -(-x // y)
