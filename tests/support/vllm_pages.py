"""vLLM's scheduler without a model: the pages that requests hold are computed by a formula."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from prometheus_client import generate_latest
from vllm import LLM, SamplingParams
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.loggers import StatLoggerManager, load_stat_logger_plugin_factories
from vllm.v1.metrics.prometheus import get_prometheus_registry
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dms_train.vllm_plugin.credit import CreditManager, DMSCacheSpec
from dms_train.vllm_plugin.scheduler import DMSScheduler
from tests.support.vllm_cpu import MEMORY

LISTS, PAGE, WINDOW = 8, 16, 32


class Late(Future[Any]):
    """Result that counts as missing until somebody asks for it, so that steps overlap."""

    asked = False

    def done(self) -> bool:
        return self.asked

    def result(self, timeout: float | None = None) -> Any:
        self.asked = True
        return super().result(timeout)


@dataclass
class Held:
    """Lengths of the KV lists of a request, which keep different shares of its older tokens."""

    prompt: int
    shares: list[float]
    computed: int = 0
    lengths: list[int] = field(default_factory=lambda: [0] * LISTS)

    def add(self, tokens: int) -> int:
        """Compute tokens and return the most pages that this takes."""
        most = pages(n + tokens for n in self.lengths)
        self.computed += tokens
        outside = max(self.computed - WINDOW, 0)
        self.lengths = [self.computed - outside + int(share * outside) for share in self.shares]
        return most


def pages(lengths: Iterator[int] | list[int]) -> int:
    return sum(-(-n // PAGE) for n in lengths)


class Formula(Executor):
    """Executor that samples token 7 and records each step."""

    supported_tasks = ("generate",)
    keep = 1.0
    spread = 0.0
    held: dict[str, Held]
    steps: list[dict[str, Any]]

    def _init_executor(self) -> None:
        self.held, self.steps = {}, []

    def determine_available_memory(self) -> list[int]:
        return [MEMORY]

    def get_kv_cache_specs(self) -> list[Any]:
        kinds = {"block_size": PAGE, "num_kv_heads": LISTS, "head_size": 16}
        return [{"model.layers.0.self_attn.attn": DMSCacheSpec(**kinds, dtype=torch.float32)}]

    def initialize_from_config(self, configs: list[Any]) -> None:
        self.pool = (configs[0].num_blocks - 1) * LISTS

    def collective_rpc(self, *_: Any, **__: Any) -> list[None]:
        return [None]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["NHD"]]

    def set_kv_cache_layout(self, *_: Any) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    def check_health(self) -> None:
        pass

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        for name in {*output.finished_req_ids, *(output.preempted_req_ids or ())}:
            self.held.pop(name, None)
        for new in output.scheduled_new_reqs:
            draw = random.Random(str(new.prompt_token_ids))
            shares = [self.keep * (1 + self.spread * draw.uniform(-1, 1)) for _ in range(LISTS)]
            self.held[new.req_id] = Held(len(new.prefill_token_ids), shares)
        counts = output.num_scheduled_tokens
        most = sum(self.held[name].add(count) for name, count in counts.items())
        idle = sum(pages(h.lengths) for name, h in self.held.items() if name not in counts)
        assert most + idle <= self.pool, "requests hold more pages than there are"
        self.steps.append(
            {
                "preempted": sorted(output.preempted_req_ids or ()),
                "counts": counts,
                "prompts": {name: self.held[name].prompt for name in counts},
                "running": len(self.held),
            }
        )
        self.sampled = self._sample(counts)
        return self._returned(None if counts else EMPTY_MODEL_RUNNER_OUTPUT, non_block)

    def _sample(self, counts: dict[str, int]) -> ModelRunnerOutput:
        held = [self.held[name] for name in counts]
        return ModelRunnerOutput(
            req_ids=list(counts),
            req_id_to_index={name: index for index, name in enumerate(counts)},
            sampled_token_ids=[[7] if h.computed >= h.prompt else [] for h in held],
            num_nans_in_logits={
                name: pages(h.lengths) for name, h in zip(counts, held, strict=True)
            },
        )

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        return self._returned(self.sampled, non_block)

    @staticmethod
    def _returned(output: Any, non_block: bool) -> Any:
        if not non_block:
            return output
        future = Late()
        future.set_result(output)
        return future


def build(job: dict[str, Any]) -> LLM:
    """Build the engine of a job."""
    Formula.keep, Formula.spread = job["keep"], job["spread"]
    return LLM(
        model=job["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        generation_config="vllm",
        enforce_eager=True,
        disable_custom_all_reduce=True,
        distributed_executor_backend=Formula,
        num_gpu_blocks_override=job["blocks"],
        block_size=PAGE,
        **job["options"],
    )


def schedule(job: dict[str, Any]) -> dict[str, Any]:
    """Run prompts of given lengths; the steps. `without` names parts that are left out."""
    known = {"measured prompts": (CreditManager, "observe_prompt", lambda *_: None)}
    known["shrink and wait"] = (DMSScheduler, "_tokens_that_fit", lambda self: self._most_tokens)
    kept = {name: getattr(*known[name][:2]) for name in job["without"]}
    for name in kept:
        setattr(*known[name])
    try:
        return _run(job)
    finally:
        for name, value in kept.items():
            setattr(*known[name][:2], value)


def watch(scheduler: DMSScheduler) -> list[list[int]]:
    """Return the limits that later steps get: chosen, exact, and whether requests were asked."""
    limits: list[list[int]] = []
    choose, compute, pool = (
        scheduler._tokens_that_fit,
        scheduler._exact_tokens_that_fit,
        scheduler._manager.block_pool,
    )

    def both() -> int:
        asked: list[int] = []
        scheduler._exact_tokens_that_fit = lambda free: asked.append(1) or compute(free)
        limits.append([choose(), compute(pool.get_num_free_blocks()), len(asked)])
        return limits[-1][0]

    scheduler._tokens_that_fit = both
    return limits


def _run(job: dict[str, Any]) -> dict[str, Any]:
    llm = build(job)
    core = llm.llm_engine.engine_core.engine_core
    limits = watch(core.scheduler)
    prompts = [
        {"prompt_token_ids": [number % 50 + 3] * length}
        for number, length in enumerate(job["prompts"])
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in job["max_tokens"]
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {
        "limits": limits,
        "lengths": [len(o.outputs[0].token_ids) for o in outputs],
        "steps": core.model_executor.steps,
        "free_blocks": core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }


def refuse(job: dict[str, Any]) -> str:
    """Build an engine; the error, or nothing."""
    try:
        build(job)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run a number of steps; the metrics, the log line and what requests hold."""
    sys.path.insert(0, job["site"])
    engine = build(job).llm_engine
    factories = load_stat_logger_plugin_factories()
    engine.logger_manager = Transported(engine.vllm_config, custom_stat_loggers=factories)
    for number, length in enumerate(job["prompts"]):
        params = SamplingParams(temperature=0, max_tokens=job["max_tokens"][number])
        params.ignore_eos, params.detokenize = True, False
        engine.add_request(str(number), {"prompt_token_ids": [number + 3] * length}, params)
    for _ in range(job["steps"]):
        engine.step()
    executor = engine.engine_core.engine_core.model_executor
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("vllm.dms")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    engine.do_log_stats()
    engine.do_log_stats()
    return {
        "metrics": generate_latest(get_prometheus_registry()).decode(),
        "lines": lines,
        "held": [[held.computed, held.lengths] for held in executor.held.values()],
        "pool": executor.pool,
        "preempted": sum(len(step["preempted"]) for step in executor.steps),
    }


class Transported(StatLoggerManager):
    """Loggers that receive statistics as another process would send them."""

    def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=scheduler_stats))
        received = MsgpackDecoder(EngineCoreOutputs).decode(sent)
        super().record(received.scheduler_stats, *args, **kwargs)
