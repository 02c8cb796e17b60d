"""Options of an engine and sampling parameters of a request."""

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
# options of vLLM that users may try, each with the behaviour of this engine
NOT_SUPPORTED = {
    "quantization": "weights are not quantised; they run as float32, bfloat16 or float16",
    "tensor_parallel_size": "the engine runs on one device",
    "pipeline_parallel_size": "the engine runs on one device",
    "data_parallel_size": "the engine runs on one device; start a server on each",
}
_OPTIONAL = ("logprobs", "prompt_logprobs", "seed")
_LARGEST = 1e6  # largest temperature or penalty, far above any sensible value
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
    """Options of an engine.

    Attributes:
        policy: Name of the cache policy, which selects the kept tokens. `auto` is the policy that
            the model was trained for.
        policy_options: Options of the policy, by name.
        cache: `compact` frees evicted tokens; `dense` only masks them, as a full-size baseline.
        max_num_seqs: Sequences in the cache at the same time.
        max_num_batched_tokens: Most tokens of a step, over all sequences.
        prefill_chunk: Most prompt tokens of a sequence in a step.
        decode_steps: Decode steps that the kernels run in one burst. Bursts need requests that are
            returned only when they have finished, and no `enable_prefix_caching`. Tokens computed
            after the end of a sequence are dropped.
        max_model_len: Most tokens of a sequence; None takes what the model was trained for.
        cache_bytes: Most bytes of a compact cache: keys, values and the state of the policy, but
            not page tables. Sequences that do not fit wait, or are preempted and computed again
            later. None sets no limit on a CPU.
        gpu_memory_utilization: Share of a GPU's memory for the model, its computation and the
            cache; used if `cache_bytes` is None.
        enable_prefix_caching: Keep snapshots of the cache of finished requests and of common
            prefixes of prompts. A request that begins with the tokens of a snapshot starts after
            them. At most `max_num_seqs` snapshots are kept, and fewer if their memory is needed.
            Policies that evict at the end of a prompt share common prefixes only, and policies
            whose decisions inside a prompt depend on the whole request share nothing.
        page_slots: Tokens of one page of one KV head.
        slab_pages: Number of pages that are allocated and returned at a time. The cache of the
            kernels ignores it and is allocated once.
        dtype: Dtype of computation and cache; `auto` is the dtype of the stored weights.
        device: Device to run on.
        kernels: `triton` decodes with fused kernels, `reference` with torch operations. `auto`
            takes triton on a GPU for the policies that it supports.
        cache_dtype: `fp8` stores keys and values as e4m3 (triton only); `auto` stores in `dtype`.
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
    """Return `options`, or build options from single values.

    Args:
        options: The options; None to build them.
        values: Fields of `EngineOptions` by name.

    Raises:
        InferenceError: Both are given, an option does not exist, or a value is out of range.
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
    """Sampling parameters of a request, named as in vLLM.

    Attributes:
        n: Number of continuations of the prompt.
        max_tokens: Most tokens to generate; 0 computes the prompt only.
        temperature: Divisor of the logits. 0 takes the most likely token; values below 1e-5 count
            as 0.
        top_p: Sample from the most likely tokens whose probabilities add up to this share.
        top_k: Number of the most likely tokens to sample from; -1 takes all.
        min_p: Exclude tokens below this share of the most likely token's probability.
        presence_penalty: Amount subtracted from the logit of every token generated so far.
        frequency_penalty: Amount subtracted from a token's logit for each time it was generated.
        repetition_penalty: Divisor of positive logits, and factor on negative logits, of all tokens
            in the prompt and the generated text.
        logit_bias: Amounts added to the logits, by token id.
        logprobs: Number of the most likely tokens to return at each position, with their
            log-probabilities. 0 returns the log-probability of the chosen token only. None returns
            nothing.
        prompt_logprobs: The same for the tokens of the prompt, except the first one. Such tokens
            are always computed, never taken from a snapshot.
        seed: Seed of the random numbers; None draws one. The same seed gives the same tokens in
            any batch.
        stop: Texts that end the request; the output's text ends before them.
        stop_token_ids: Tokens that end the request, in addition to the model's own.
        ignore_eos: Do not stop at the model's end-of-text tokens.
        kv_trace: Return the cost of the cache at each generated token, 16 bytes per token.
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
            object.__setattr__(self, name, value)  # Python types, because numpy integers overflow
        if self.max_tokens == 0 and self.n > 1:
            raise InferenceError(f"n={self.n}: max_tokens=0 generates no continuations; use n=1")

    @property
    def plain(self) -> bool:
        """True if sampling needs unchanged logits only and returns no log-probabilities."""
        changed = self.penalizes or bool(self.logit_bias)
        return not changed and self.logprobs is None and self.max_tokens > 0

    @property
    def restricts(self) -> bool:
        """True if top-k, top-p or min-p may exclude tokens; False at temperature 0."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def log_min_p(self) -> float:
        """Logarithm of `min_p`."""
        return math.log(self.min_p) if self.min_p > 0 else -math.inf

    @property
    def penalizes(self) -> bool:
        """True if penalties make the logits depend on the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


def _biases(given: Any) -> dict[int, float]:
    """Return a checked `logit_bias` with Python numbers."""
    if not isinstance(given, Mapping):
        raise InferenceError(f"logit_bias={given!r}: must map token ids to numbers")
    tokens = token_ids("logit_bias", given)
    values = given.values()
    return {t: number(f"logit_bias[{t}]", v, _BIAS) for t, v in zip(tokens, values, strict=True)}
