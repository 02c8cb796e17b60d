"""Content of `/metrics`, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dms_train.server.generation import Generation, Timing

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_FACTORS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)


class Metrics:
    """Counters of one server, in their own registry."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._answers = Counter(
            "dms_http_responses",
            "Answers by route and status",
            ("route", "status"),
            registry=registry,
        )
        self._prompt_tokens = Counter("dms_prompt_tokens", "Prompt tokens", registry=registry)
        self._generated = Counter("dms_generated_tokens", "Generated tokens", registry=registry)
        self._kv_reads = Counter(
            "dms_kv_reads", "Cache slots attended while decoding", registry=registry
        )
        self._seconds = Histogram(
            "dms_request_seconds", "Time of a request", buckets=_SECONDS, registry=registry
        )
        self._first = Histogram(
            "dms_first_token_seconds",
            "Time to the first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self._each = Histogram(
            "dms_token_seconds",
            "Time of each token after the first",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self._factor = Histogram(
            "dms_cr_factor", "cr_factor of a finished request", buckets=_FACTORS, registry=registry
        )

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is read together with the metrics."""
        Gauge(name, text, registry=self._registry).set_function(value)

    def answered(self, route: str, status: int) -> None:
        """Count an answer."""
        self._answers.labels(route, str(status)).inc()

    def finished(self, generation: Generation, now: float) -> None:
        """Count a finished generation."""
        usage = generation.usage()
        timing, tokens = generation.timing, usage["completion_tokens"]
        self._prompt_tokens.inc(usage["prompt_tokens"])
        self._generated.inc(tokens)
        self._kv_reads.inc(usage["kv"]["kv_reads"])
        self._factor.observe(usage["kv"]["cr_factor"])
        self._time(timing, now, tokens / generation.job.sequences)

    def text(self) -> bytes:
        """Return all metrics."""
        return generate_latest(self._registry)

    def _time(self, timing: Timing, now: float, tokens: float) -> None:
        self._seconds.observe(now - timing.started)
        if timing.first_token is None:
            return
        self._first.observe(timing.first_token - timing.started)
        if tokens > 1:
            self._each.observe((now - timing.first_token) / (tokens - 1))


def seconds_text(usage: dict[str, Any]) -> str:
    """Return the numbers of a request for a log line, without text of prompt or answer."""
    return (
        f"{usage['prompt_tokens']} + {usage['completion_tokens']} tokens, "
        f"cr_factor {usage['kv']['cr_factor']:.2f}"
    )
