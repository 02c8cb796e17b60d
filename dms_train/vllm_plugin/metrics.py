"""Pages and compression ratio in vLLM's metrics and in its log.

vLLM's scheduler sends its statistics to the front end in a fixed structure. Its counts by LoRA
adapter are unused with DMS, which refuses LoRA, and carry the counts of the cache.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import cache
from typing import Any

from prometheus_client import Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from dms_train.vllm_plugin.credit import CacheCounts
from dms_train.vllm_plugin.plugin import retrofitted_architectures

_LABELS = ("model_name", "engine")
# below the logger that vLLM configures
_logger = logging.getLogger("vllm.dms")


@cache
def _gauges() -> tuple[Gauge, Gauge]:
    """Return the gauges, which a process can register only once.

    vLLM drops all metrics whose names begin with `vllm:` before it registers its own.
    """
    fill = Gauge(
        "dms:page_usage_perc",
        "Pages that requests hold, as a share of the pool. 1 means 100 percent usage.",
        _LABELS,
        multiprocess_mode="mostrecent",
    )
    ratio = Gauge(
        "dms:compression_ratio",
        "Tokens of running requests per slot of their pages.",
        _LABELS,
        multiprocess_mode="mostrecent",
    )
    return fill, ratio


def attach_counts(stats: Any, counts: CacheCounts) -> None:
    """Add the counts of the cache to vLLM's statistics of a step."""
    stats.running_lora_adapters = counts._asdict()


class DMSStatLogger(AggregateStatLoggerBase):
    """Statistics logger of the plugin; it does nothing for other models.

    Args:
        vllm_config: vLLM's configuration.
        engine_indexes: Numbers of the engines.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        model = vllm_config.model_config
        self._is_active = model.architecture in retrofitted_architectures()
        self._is_one_of_several = vllm_config.parallel_config._api_process_count > 1
        self._model = model.served_model_name
        self._counts: dict[int, CacheCounts] = {}
        self._preemptions = Counter[int]()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        *args: Any,
        engine_idx: int = 0,
        **kwargs: Any,
    ) -> None:
        """Record the statistics of a step.

        Args:
            scheduler_stats: Statistics of the scheduler, or None.
            iteration_stats: Statistics of the step, or None.
            *args: Not used.
            engine_idx: Number of the engine.
            **kwargs: Not used.
        """
        if not self._is_active:
            return
        if iteration_stats is not None:
            self._preemptions[engine_idx] += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None and scheduler_stats.running_lora_adapters:
            counts = CacheCounts(**scheduler_stats.running_lora_adapters)
            self._counts[engine_idx] = counts
            fill, ratio = (g.labels(self._model, str(engine_idx)) for g in _gauges())
            fill.set(counts.fill)
            ratio.set(counts.compression_ratio)

    def log(self) -> None:
        """Log a line for each engine that had steps since the last line.

        Nothing is logged if several processes answer HTTP: each knows a part of the requests.
        """
        if self._is_one_of_several:
            return
        for engine, counts in self._counts.items():
            _logger.info(
                "Engine %03d: DMS page usage: %.1f%%, compression ratio: %.2f, preemptions: %d",
                engine,
                counts.fill * 100,
                counts.compression_ratio,
                self._preemptions[engine],
            )
        self._counts.clear()
        self._preemptions.clear()

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM logs the size of the cache."""
