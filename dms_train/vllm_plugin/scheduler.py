"""Schedulers that learn from each step how many pages its requests hold.

A chunk of m tokens is charged ceil(m / P) blocks until its report arrives, although it may shrink
to a few. Steps are therefore limited to what fits the free blocks: a long chunk is reduced. If not
even one token of each running request fits, the scheduler waits for the reports in flight.
vLLM preempts a request only when there is none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from dms_train.hf.directory import resolve
from dms_train.hf.formats import read_target_cr
from dms_train.vllm_plugin.credit import Account, CreditManager
from dms_train.vllm_plugin.metrics import attach_counts
from dms_train.vllm_plugin.settings import layer_windows, read_dms_spec


class Expected(NamedTuple):
    """Report that a step will bring.

    Attributes:
        account: Account of the request.
        seen: Tokens of the request that are computed after the step.
        ends_prompt: Whether the step computes the last token of the prompt.
    """

    account: Account
    seen: int
    ends_prompt: bool


class DMSScheduler(Scheduler):
    """Scheduler of vLLM that updates the accounts of requests by the reports of steps."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        assert isinstance(manager, CreditManager)
        self._manager = manager
        self._expected: dict[int, dict[str, Expected]] = {}
        self._most_tokens = self.max_num_scheduled_tokens
        model = vllm_config.model_config.model
        windows = [read_dms_spec(model).window + 1, *filter(None, layer_windows(model))]
        manager.expect(max(windows), read_target_cr(resolve(model)))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step, limited to the tokens that fit the free blocks."""
        self.max_num_scheduled_tokens = self._tokens_that_fit()
        return super().schedule(*args, **kwargs)

    def _tokens_that_fit(self) -> int:
        """Return the most tokens of the next step; 0 to wait for reports."""
        free, size = self._manager.block_pool.get_num_free_blocks(), self._manager.block_size
        # asking for each request takes time; one more token of it needs two blocks at most
        if (free - 2 * len(self.running)) * size >= self._most_tokens:
            return self._most_tokens
        return self._exact_tokens_that_fit(free)

    def _exact_tokens_that_fit(self, free: int) -> int:
        """Compute the limit from the free blocks and those that each running request needs."""
        growing = [r for r in self.running if not _is_complete(r)]
        needed = sum(
            self._manager.get_num_blocks_to_allocate(r.request_id, r.num_computed_tokens + 1)
            for r in growing
        )
        if needed > free and self._expected:
            return 0
        prompt_tokens = max(0, free - needed) * self._manager.block_size
        return min(self._most_tokens, prompt_tokens + len(growing))

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        expected = {}
        for request_id, added in scheduler_output.num_scheduled_tokens.items():
            account = self._manager.account(request_id)
            assert account is not None
            request = self.requests[request_id]
            seen = request.num_computed_tokens
            ends_prompt = seen - added < request.num_prompt_tokens <= seen
            expected[request_id] = Expected(account, seen, ends_prompt)
        if expected:
            # not in the output itself, which is pickled for the workers
            self._expected[id(scheduler_output)] = expected

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Apply the reports of a step, then continue as vLLM does.

        Raises:
            RuntimeError: A worker had no page for a token.
        """
        pages = model_runner_output.num_nans_in_logits or {}
        model_runner_output.num_nans_in_logits = None  # vLLM would report broken logits
        for request_id, expected in self._expected.pop(id(scheduler_output), {}).items():
            if pages[request_id] < 0:
                raise RuntimeError(f"request {request_id}: a token of its batch found no page")
            if self._manager.account(request_id) is not expected.account:
                continue  # preempted or finished
            self._manager.report(expected.account, pages[request_id], expected.seen)
            if expected.ends_prompt:
                self._manager.observe_prompt(expected.account)
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Add the counts of the cache to the statistics of a step, if vLLM collects any."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            attach_counts(stats, self._manager.counts())
        return stats


class DMSAsyncScheduler(DMSScheduler, AsyncScheduler):
    """The same for asynchronous scheduling: the report of a step arrives after the next one."""


def _is_complete(request: Any) -> bool:
    """Return whether all tokens of a request are scheduled, so that vLLM passes over it."""
    scheduled = request.num_computed_tokens + 2 - request.num_output_placeholders
    return bool(
        request.num_output_placeholders > 0
        and scheduled >= request.num_prompt_tokens + request.max_tokens
    )


def build_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> DMSScheduler:
    """Build the scheduler for the resolved configuration; vLLM takes this for its class."""
    is_async = vllm_config.scheduler_config.async_scheduling
    kind = DMSAsyncScheduler if is_async else DMSScheduler
    return kind(vllm_config, *args, **kwargs)
