"""How the engine is set up, and how one request is sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dms_train.inference.checks import Range, integer, number, require_flag, texts, token_ids
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
# options of vLLM that an engineer may try, and what this engine does instead
NOT_SUPPORTED = {
    "quantization": "weights are not quantised; they run as float32, bfloat16 or float16",
    "tensor_parallel_size": "the engine runs on one device",
    "pipeline_parallel_size": "the engine runs on one device",
    "data_parallel_size": "the engine runs on one device; start a server on each",
}
_OPTIONAL = ("logprobs", "prompt_logprobs", "seed")
_LARGEST = 1e6  # of a temperature or penalty; no sensible value is near it
_GREEDY = 1e-5  # temperatures below it count as 0
_COUNT = Range(0, math.inf, "an integer of at least 0")
_POSITIVE = Range(1, math.inf, "an integer of at least 1")
_SHARE = Range(math.ulp(0.0), 1, "a number above 0 and up to 1")
_PENALTY = Range(-_LARGEST, _LARGEST, "a number from -1e6 to 1e6")
_BIAS = Range(-1e30, 1e30, "a number from -1e30 to 1e30")  # logits are float32
_INTEGERS = {
    "n": Range(1, 2**16, "an integer from 1 to 65536"),
    "max_tokens": _COUNT,
    "top_k": Range(-1, 2**31 - 1, "an integer of at least 1, or -1 for all"),
    "logprobs": _COUNT,
    "prompt_logprobs": _COUNT,
    "seed": Range(-math.inf, math.inf, "an integer"),
}
_NUMBERS = {
    "temperature": Range(0, _LARGEST, "a number from 0 to 1e6"),
    "top_p": _SHARE,
    "min_p": Range(0, 1, "a number from 0 to 1"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": Range(1 / _LARGEST, _LARGEST, "a number from 1e-6 to 1e6"),
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
        require_flag("enable_prefix_caching", self.enable_prefix_caching)
        for name in (*_COUNTS, "max_model_len", "cache_bytes"):
            value = getattr(self, name)
            if value is not None or name in _COUNTS:
                object.__setattr__(self, name, integer(name, value, _POSITIVE))
        number("gpu_memory_utilization", self.gpu_memory_utilization, _SHARE)
        if self.cache_bytes is not None and self.cache == "dense":
            raise InferenceError("cache_bytes: a dense cache has no limit; use cache=compact")


def named_options(options: EngineOptions | None, values: Mapping[str, Any]) -> EngineOptions:
    """Return given options, or those that single values make.

    Args:
        options: The options; None if there are single values, or neither.
        values: Fields of `EngineOptions` by name.

    Raises:
        InferenceError: Both are given, an option does not exist, or a value is out of its range.
    """
    if options is not None and values:
        raise InferenceError("options and single values: give one or the other")
    known = [item.name for item in fields(EngineOptions)]
    for name, value in values.items():
        if name not in known:
            reason = NOT_SUPPORTED.get(name, f"no such option; choose from {', '.join(known)}")
            raise InferenceError(f"{name}={value!r}: {reason}")
    return options or EngineOptions(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request continues.

    Attributes:
        n: Continuations of the prompt.
        max_tokens: Most tokens to generate; 0 computes the prompt only.
        temperature: 0 takes the most likely token, and so does anything below 1e-5.
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
        for name in ("ignore_eos", "kv_trace"):
            require_flag(name, getattr(self, name))
        values: dict[str, Any] = {
            "stop": texts("stop", self.stop),
            "stop_token_ids": tuple(token_ids("stop_token_ids", self.stop_token_ids)),
            "logit_bias": _biases(self.logit_bias),
        }
        for ranges, check in ((_INTEGERS, integer), (_NUMBERS, number)):
            for name, allowed in ranges.items():
                value = getattr(self, name)
                if value is not None or name not in _OPTIONAL:
                    values[name] = check(name, value, allowed)
        if values["temperature"] < _GREEDY:
            values["temperature"] = 0.0
        if values["top_k"] == 0:
            raise InferenceError("top_k=0: must be an integer of at least 1, or -1 for all")
        for name, value in values.items():
            object.__setattr__(self, name, value)  # integers of numpy overflow, for example
        if self.max_tokens == 0 and self.n > 1:
            raise InferenceError(f"n={self.n}: max_tokens=0 generates no continuations; use n=1")

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


def _biases(given: Any) -> dict[int, float]:
    """Return a checked `logit_bias` with numbers of Python."""
    if not isinstance(given, Mapping):
        raise InferenceError(f"logit_bias={given!r}: must have numbers by token id")
    tokens = token_ids("logit_bias", given)
    values = given.values()
    return {t: number(f"logit_bias[{t}]", v, _BIAS) for t, v in zip(tokens, values, strict=True)}
