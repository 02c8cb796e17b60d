"""Builder that chooses and sizes the KV cache for the options of an engine."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from functools import cache

import torch

from dms_train.hf.architecture import Architecture
from dms_train.inference.cache.compact import CompactCache
from dms_train.inference.cache.dense import DenseCache
from dms_train.inference.cache.device_pool import DevicePool
from dms_train.inference.cache.interface import KVCache
from dms_train.inference.cache.linear_states import LinearStates, state_bytes
from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.cache.paged_budget import BudgetPagedCache
from dms_train.inference.cache.paged_local import LocalPagedCache
from dms_train.inference.cache.paged_merging import MergingPagedCache
from dms_train.inference.cache.paged_selecting import SelectingPagedCache
from dms_train.inference.cache.pool import PagePool
from dms_train.inference.cache.sizes import CacheSizes
from dms_train.inference.errors import InferenceError
from dms_train.inference.models.batch import TokenBatch
from dms_train.inference.models.blocks import layer_frequencies
from dms_train.inference.models.loader import LoadedModel
from dms_train.inference.options import EngineOptions
from dms_train.inference.policies.base import CachePolicy, RequestSizes, find_kernel_rule
from dms_train.inference.policies.kernel_rules import (
    BudgetRule,
    LayeredRule,
    MergeRule,
    PageRule,
    WindowRule,
)
from dms_train.kernels import dispatch
from dms_train.kernels.decode.types import FP8
from dms_train.observe.log import logger

_CACHES: dict[type, type[PagedKVCache]] = {
    WindowRule: PagedKVCache,
    MergeRule: MergingPagedCache,
    BudgetRule: BudgetPagedCache,
    PageRule: SelectingPagedCache,
    LayeredRule: LocalPagedCache,
}
_HOST_BYTES = 2**30  # size of a pool on the CPU; its pages take memory at their first write
_LOGITS = 4  # most float32 copies of the logits in sampling
_GRAPHS = 6  # most copies of all sequences' logits in captured steps


def build_cache(model: LoadedModel, policy: CachePolicy, options: EngineOptions) -> KVCache:
    """Choose and size the KV cache for a set of engine options.

    Raises:
        InferenceError: The options do not fit together, or leave no memory for the cache.
    """
    a, device = model.architecture, torch.device(options.device)
    if a.linear is None:
        return _build(model, policy, options)
    states = LinearStates(a, options.max_num_seqs, model.dtype, device)
    if options.cache_bytes is not None:
        left = options.cache_bytes - states.nbytes * _copies(policy, options)
        if left < 1:
            raise InferenceError(
                f"cache_bytes={options.cache_bytes}: the states of linear attention take "
                f"{options.cache_bytes - left} bytes; raise it, or choose a smaller max_num_seqs"
            )
        options = replace(options, cache_bytes=left)
    cache = _build(model, policy, options)
    cache.states = states
    return cache


def _build(model: LoadedModel, policy: CachePolicy, options: EngineOptions) -> KVCache:
    """Build the cache of the layers with keys and values."""
    a, device = model.architecture, torch.device(options.device)
    if options.cache == "dense":
        frequency = layer_frequencies(a, device)
        sizes = {
            "layers": len(a.cache_layers),
            "rows": options.max_num_seqs,
            "heads": a.num_query_groups,
        }
        like = torch.zeros(0, a.kv_channels, dtype=model.dtype, device=device)
        return DenseCache(policy, like=like, frequency=frequency, **sizes)
    if _uses_kernels(model, policy, options):
        return _paged(model, policy, options, _pages(model, policy, options))
    cache = _compact(model, policy, options, options.max_num_seqs)
    if options.cache_bytes is not None:
        cache.pool.limit(_slabs(model, cache, options, options.cache_bytes))
    return cache


def _compact(
    model: LoadedModel, policy: CachePolicy, options: EngineOptions, rows: int
) -> CompactCache:
    a, device = model.architecture, torch.device(options.device)
    pool = PagePool(
        head_size=a.kv_channels,
        state_width=policy.state_width,
        dtype=model.dtype,
        device=device,
        page_slots=options.page_slots,
        slab_pages=options.slab_pages,
    )
    sizes = {"layers": len(a.cache_layers), "rows": rows, "heads": a.num_query_groups}
    return CompactCache(pool, policy, frequency=layer_frequencies(a, device), **sizes)


def _slabs(
    model: LoadedModel, cache: CompactCache, options: EngineOptions, cache_bytes: int
) -> int:
    """Return the most slabs that fit in addition to the policy's state for all sequences.

    Raises:
        InferenceError: Not even one slab fits.
    """
    pool, tokens = cache.pool, cache.policy.state_tokens
    row_bytes = _policy_bytes(model, cache.policy, options) * _copies(cache.policy, options)
    kv_lists = len(model.architecture.cache_layers) * model.architecture.num_query_groups
    longest = longest_sequence(model.architecture, options)

    def total(slabs: int) -> int:
        """Return the bytes of the slabs and of policy state; one sequence may fill all slabs."""
        slots = slabs * pool.slab_bytes // pool.slot_bytes
        entries = -(-min(longest, -(-slots // kv_lists)) // tokens) if tokens else 1
        return slabs * pool.slab_bytes + options.max_num_seqs * row_bytes * entries

    most = cache_bytes // pool.slab_bytes
    slabs = bisect_right(range(1, most + 1), cache_bytes, key=total)
    if not slabs:
        raise InferenceError(
            f"cache_bytes={cache_bytes}: at least {total(1)}, or choose a smaller max_num_seqs, "
            "slab_pages or page_slots"
        )
    return slabs


@torch.no_grad()
def _policy_bytes(model: LoadedModel, policy: CachePolicy, options: EngineOptions) -> int:
    """Return the bytes of the policy's state for a sequence, or per entry if its tensors grow.

    They are measured by computing one token, because its tensors get their shapes from it.
    """
    cache = _compact(model, policy, replace(options, slab_pages=1), 1)
    cache.assign(0, RequestSizes(1, 2, 0))
    zero = torch.zeros(1, 1, dtype=torch.int64, device=options.device)
    model.decoder(TokenBatch.rectangular(zero, zero, zero[0]), cache)
    return cache.policy_bytes


def kept_bytes(model: LoadedModel, policy: CachePolicy, options: EngineOptions) -> int:
    """Return the bytes that the kernels' cache reserves for the state of a policy."""
    fewest = len(model.architecture.cache_layers) * model.architecture.num_query_groups
    return _paged(model, policy, options, fewest).policy_bytes * _copies(policy, options)


def _copies(policy: CachePolicy, options: EngineOptions) -> int:
    """Return the number of copies of a policy's state per sequence: its own and its snapshot's."""
    shared = policy.shareable or policy.shareable_prompts
    return 2 if options.enable_prefix_caching and shared else 1


def longest_sequence(architecture: Architecture, options: EngineOptions) -> int:
    """Return the most tokens of a sequence.

    Raises:
        InferenceError: `max_model_len` is more than the model was trained for.
    """
    most = architecture.max_position_embeddings
    if options.max_model_len is not None and options.max_model_len > most:
        raise InferenceError(f"max_model_len={options.max_model_len}: the model takes {most}")
    return options.max_model_len or most


def _uses_kernels(model: LoadedModel, policy: CachePolicy, options: EngineOptions) -> bool:
    """Return whether the decode kernels run the model; on a GPU, log the reason if they do not.

    Raises:
        InferenceError: The kernels were requested but cannot run the model.
    """
    obstacle = _obstacle(model, policy, options)
    wanted = options.kernels == "triton" or options.cache_dtype == "fp8"
    if wanted and (obstacle is not None or options.kernels == "reference"):
        cause = obstacle or "kernels=reference stores no fp8"
        raise InferenceError(
            f"kernels={options.kernels} cache_dtype={options.cache_dtype}: {cause}"
        )
    on_gpu = options.device.startswith("cuda") and options.kernels == "auto"
    if on_gpu and obstacle is not None:
        _log_once(f"decoding with torch operations, which are slower than the kernels: {obstacle}")
    return obstacle is None and (wanted or on_gpu)


@cache
def _log_once(message: str) -> None:
    logger().warning(message)


def _obstacle(model: LoadedModel, policy: CachePolicy, options: EngineOptions) -> str | None:
    """Return the reason why the kernels cannot run the model; None if they can."""
    if not dispatch.is_supported(torch.device(options.device)):
        return f"triton does not run on {options.device}"
    if options.page_slots & (options.page_slots - 1):
        return f"page_slots={options.page_slots} is not a power of two"
    rule, name = find_kernel_rule(policy), f"policy={options.policy}"
    if isinstance(rule, str):
        return rule
    spec = model.spec
    if spec is not None and spec.replaces_values and not isinstance(rule, MergeRule):
        return f"{name} reads a model trained for {spec.kind}, whose keys the kernels do not clear"
    if isinstance(rule, PageRule) and rule.page % options.page_slots:
        return f"{name} has pages of {rule.page} tokens, not a multiple of {options.page_slots}"
    if options.cache_dtype == "fp8" and not isinstance(rule, WindowRule | MergeRule):
        windowed = isinstance(rule, LayeredRule)
        stores = "models with sliding-window layers store" if windowed else f"{name} stores"
        return f"{stores} no fp8; use cache_dtype=auto"
    return None


def _paged(
    model: LoadedModel, policy: CachePolicy, options: EngineOptions, pages: int
) -> PagedKVCache:
    """Build a cache for the kernels with a pool of `pages` pages."""
    a = model.architecture
    pool = DevicePool(
        head_size=a.kv_channels,
        dtype=model.dtype,
        stored=_stored(model, options),
        device=torch.device(options.device),
        page_slots=options.page_slots,
        pages=pages,
    )
    sizes = CacheSizes(
        layers=len(a.cache_layers),
        rows=options.max_num_seqs,
        heads=a.num_query_groups,
        group=a.num_attention_heads // a.num_query_groups,
        longest=longest_sequence(a, options),
    )
    return _CACHES[type(find_kernel_rule(policy))](pool, policy, sizes)


def _stored(model: LoadedModel, options: EngineOptions) -> torch.dtype:
    return FP8 if options.cache_dtype == "fp8" else model.dtype


def _pages(model: LoadedModel, policy: CachePolicy, options: EngineOptions) -> int:
    """Return the number of pages: as many as sequences can fill and memory allows.

    Raises:
        InferenceError: Memory is too small for one page per layer and KV head.
    """
    a, size = model.architecture, options.page_slots
    kv_lists = len(a.cache_layers) * a.num_query_groups
    most = (
        options.max_num_seqs * kv_lists * -(-longest_sequence(model.architecture, options) // size)
    )
    page_bytes = 2 * size * a.kv_channels * _stored(model, options).itemsize + 8
    if isinstance(find_kernel_rule(policy), PageRule):  # and its bounds
        page_bytes += 2 * a.kv_channels * model.dtype.itemsize
    state = ""
    if options.cache_bytes is not None:
        setting, memory = f"cache_bytes={options.cache_bytes}", options.cache_bytes
        if kept := kept_bytes(model, policy, options):
            memory -= kept
            state = (
                f"; the policy's state takes {kept} bytes, fewer with a smaller max_num_seqs or "
                "max_model_len"
            )
    elif options.device.startswith("cuda"):
        setting = f"gpu_memory_utilization={options.gpu_memory_utilization}"
        memory = _gpu_bytes(model, policy, options)
    else:
        setting, memory = "cache_bytes", _HOST_BYTES
    pages = min(most, memory // page_bytes - 1)  # one page is never allocated
    if pages < kv_lists:
        raise InferenceError(
            f"{setting}: leaves {max(0, memory)} bytes for the cache, at least "
            f"{(kv_lists + 1) * page_bytes} are needed{state}"
        )
    return pages


@torch.no_grad()
def _gpu_bytes(model: LoadedModel, policy: CachePolicy, options: EngineOptions) -> int:
    """Run the largest step, and return the GPU memory that it leaves for the cache, in bytes."""
    a, device = model.architecture, torch.device(options.device)
    chunk = min(options.prefill_chunk, options.max_num_batched_tokens)
    b = max(1, min(options.max_num_seqs, options.max_num_batched_tokens // chunk))
    chunk = min(chunk, longest_sequence(model.architecture, options))
    pages = b * len(a.cache_layers) * a.num_query_groups * -(-chunk // options.page_slots)
    cache = _paged(model, policy, options, pages)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    position = torch.arange(chunk, device=device).expand(b, -1)
    rows = torch.arange(b, device=device)
    model.decoder(TokenBatch.rectangular(torch.zeros_like(position), position, rows), cache)
    peak = torch.cuda.max_memory_allocated(device) - before
    # page tables and policy state of all rows, and of as many snapshots, which copy states too
    tables = cache.table_bytes + options.max_num_seqs * cache.snapshot_bytes
    tables += options.max_num_seqs * state_bytes(a, model.dtype)
    del cache
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    copies = _LOGITS * 4 + _GRAPHS * model.dtype.itemsize
    logits = copies * options.max_num_seqs * a.vocab_size
    budget = int(options.gpu_memory_utilization * total) - (total - free)
    # twice the peak, because captured chunks have their own memory
    return budget - 2 * peak - logits - tables
