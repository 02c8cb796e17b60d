"""Schedulers that learn from each step how many pages its requests hold."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from dms_train.hf.directory import resolve
from dms_train.hf.formats import read_target_cr
from dms_train.vllm_plugin.credit import Account, CreditManager
from dms_train.vllm_plugin.settings import read_dms_spec


class DMSScheduler(Scheduler):
    """Scheduler of vLLM that updates the accounts of requests by the reports of steps."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        assert isinstance(manager, CreditManager)
        self._manager = manager
        self._expected: dict[int, dict[str, tuple[Account, int]]] = {}
        model = vllm_config.model_config.model
        manager.expect(read_dms_spec(model).window + 1, read_target_cr(resolve(model)))

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        expected = {}
        for request_id in scheduler_output.num_scheduled_tokens:
            account = self._manager.account(request_id)
            assert account is not None
            expected[request_id] = (account, self.requests[request_id].num_computed_tokens)
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
        for request_id, (account, seen) in self._expected.pop(id(scheduler_output), {}).items():
            if pages[request_id] < 0:
                raise RuntimeError(f"request {request_id}: a token of its batch found no page")
            if self._manager.account(request_id) is account:  # neither preempted nor finished
                self._manager.report(account, pages[request_id], seen)
        return super().update_from_output(scheduler_output, model_runner_output)


class DMSAsyncScheduler(DMSScheduler, AsyncScheduler):
    """The same for asynchronous scheduling: the report of a step arrives after the next one."""


def build_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> DMSScheduler:
    """Build the scheduler for the resolved configuration; vLLM takes this for its class."""
    is_async = vllm_config.scheduler_config.async_scheduling
    kind = DMSAsyncScheduler if is_async else DMSScheduler
    return kind(vllm_config, *args, **kwargs)
