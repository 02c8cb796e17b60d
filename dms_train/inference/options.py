"""How the engine is set up, and how one request is sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dms_train.inference.errors import InferenceError
from dms_train.inference.policies.registry import policy_names

CACHES = ("compact", "dense")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KERNELS = ("auto", "triton", "reference")
CACHE_DTYPES = ("auto", "fp8")
_COUNTS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill_chunk",
    "decode_steps",
    "page_slots",
    "slab_pages",
)
_LARGEST = 1e6  # of a temperature or penalty; no sensible value is near it
_RANGES: dict[str, tuple[float, float, str]] = {
    "n": (1, math.inf, "at least 1"),
    "max_tokens": (0, math.inf, "0 or more"),
    "temperature": (0, _LARGEST, "0 or more"),
    "min_p": (0, 1, "from 0 to 1"),
    "presence_penalty": (-_LARGEST, _LARGEST, "a finite number"),
    "frequency_penalty": (-_LARGEST, _LARGEST, "a finite number"),
    "logprobs": (0, math.inf, "0 or more"),
    "prompt_logprobs": (0, math.inf, "0 or more"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Everything about an engine except its model.

    Attributes:
        policy: Which tokens the cache keeps, by the name of a module of `inference.policies`;
            `auto` is what the model was trained for.
        policy_options: Options of that policy, by name.
        cache: `compact` frees what is evicted, `dense` masks it (the full-size baseline).
        max_num_seqs: Sequences in the cache at the same time.
        max_num_batched_tokens: Most tokens of a step, over all sequences.
        prefill_chunk: Most prompt tokens of a sequence in a step.
        decode_steps: Decode steps that the kernels run at once where all requests are returned only
            when they have finished, without `enable_prefix_caching`; what lies behind the end of a
            sequence is dropped.
        max_model_len: Most tokens of a sequence; None takes what the model was trained for.
        cache_bytes: Most bytes of keys, values and what the policy keeps beside them in a compact
            cache, without page tables; sequences wait, or are preempted and computed again, where
            they do not fit. None sets no limit on a CPU.
        gpu_memory_utilization: Share of a GPU's memory for the model, its computation and the
            cache, where `cache_bytes` is None.
        enable_prefix_caching: Keep snapshots of the cache of finished requests and of prompts that
            begin alike; a request that begins with the tokens of one starts behind it. At most
            `max_num_seqs` are kept, and fewer where their memory is needed. Nothing is kept for a
            policy whose decisions depend on the whole request.
        page_slots: Tokens of one page of one KV head.
        slab_pages: Pages by which memory is taken and returned; the cache of the kernels is
            allocated once.
        dtype: Compute and cache dtype; `auto` is the stored one.
        device: Where to run.
        kernels: `triton` decodes with fused kernels, `reference` with torch operations; `auto`
            takes triton on a GPU for the policies it supports.
        cache_dtype: `fp8` stores keys and values as e4m3 (triton only); `auto` in `dtype`.
    """

    policy: str = "auto"
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    cache: str = "compact"
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 8192
    prefill_chunk: int = 512
    decode_steps: int = 8
    max_model_len: int | None = None
    cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = False
    page_slots: int = 16
    slab_pages: int = 256
    dtype: str = "auto"
    device: str = "cpu"
    kernels: str = "auto"
    cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("policy", policy_names()),
            ("cache", CACHES),
            ("dtype", DTYPES),
            ("kernels", KERNELS),
            ("cache_dtype", CACHE_DTYPES),
        ):
            if getattr(self, name) not in allowed:
                raise InferenceError(
                    f"{name}={getattr(self, name)!r}: choose one of {', '.join(allowed)}"
                )
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise InferenceError(f"{name}={getattr(self, name)}: at least 1")
        if self.cache_bytes is not None and self.cache == "dense":
            raise InferenceError("cache_bytes: a dense cache has no limit; use cache=compact")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise InferenceError(f"max_model_len={self.max_model_len}: at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InferenceError(
                f"gpu_memory_utilization={self.gpu_memory_utilization}: above 0 and up to 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request continues.

    Attributes:
        n: Continuations of the prompt.
        max_tokens: Most tokens to generate; 0 computes the prompt only.
        temperature: 0 takes the most likely token.
        top_p: Share of the probability that is sampled from.
        top_k: Tokens that are sampled from; -1 takes all.
        min_p: Tokens below this share of the most likely token's probability are not sampled.
        presence_penalty: Taken from the logit of every token that was generated before.
        frequency_penalty: The same for each time it was generated.
        repetition_penalty: Divides a positive logit, and multiplies a negative one, of every token
            of the prompt and of the generated text.
        logit_bias: Added to the logits of these tokens.
        logprobs: How many of the most likely tokens to return at each position, with their
            log-probabilities; 0 returns that of the chosen token only, None nothing.
        prompt_logprobs: The same for the tokens of the prompt, of which the first one has none.
            They are computed in any case, not taken from a snapshot.
        seed: Of this request's random numbers; None draws one. The same seed gives the same tokens
            alone and in any batch.
        stop: Texts that end the request; the output's text ends before them.
        stop_token_ids: Tokens that end the request besides the model's own.
        ignore_eos: Do not stop at the model's end-of-text tokens.
        kv_trace: Return what the cache had cost at each generated token, 16 bytes a token.
    """

    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    kv_trace: bool = False

    def __post_init__(self) -> None:
        for name, (least, most, words) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise InferenceError(f"{name}={value}: {words}")
        if not 0 < self.top_p <= 1:
            raise InferenceError(f"top_p={self.top_p}: above 0 and up to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise InferenceError(f"repetition_penalty={self.repetition_penalty}: above 0")
        if self.top_k < 1 and self.top_k != -1:
            raise InferenceError(f"top_k={self.top_k}: at least 1, or -1 for all")
        if not all(math.isfinite(bias) for bias in self.logit_bias.values()):
            raise InferenceError("logit_bias: finite numbers by token id")
        if self.max_tokens == 0 and self.n > 1:
            raise InferenceError(f"n={self.n}: max_tokens=0 generates no continuations; use n=1")
        if isinstance(self.stop, str) or not all(self.stop):
            raise InferenceError(f"stop={self.stop!r}: a tuple of texts that are not empty")

    @property
    def plain(self) -> bool:
        """Whether a token is drawn from the logits as they are, and nothing else is returned."""
        changed = self.penalizes or bool(self.logit_bias)
        return not changed and self.logprobs is None and self.max_tokens > 0

    @property
    def restricts(self) -> bool:
        """Whether tokens may be excluded; the most likely one, taken at temperature 0, is not."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def log_min_p(self) -> float:
        """Logarithm of `min_p`."""
        return math.log(self.min_p) if self.min_p > 0 else -math.inf

    @property
    def penalizes(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)
