"""How the engine is set up, and how one request is sampled."""

from __future__ import annotations

from dataclasses import dataclass

from dms_train.inference.errors import InferenceError

POLICIES = ("auto", "dms", "window", "keep_all")
CACHES = ("compact", "dense")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KERNELS = ("auto", "triton", "reference")
CACHE_DTYPES = ("auto", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Everything about an engine except its model.

    Attributes:
        policy: Which tokens the cache keeps; `auto` is what the model was trained for.
        window: Tokens of the `window` policy; None takes the model's own.
        cache: `compact` frees what is evicted, `dense` masks it (the full-size baseline).
        max_num_seqs: Sequences in the cache at the same time.
        prefill_chunk: Most prompt tokens of a sequence in one forward pass.
        page_slots: Tokens of one page of one KV head.
        slab_pages: Pages by which memory is taken and returned.
        dtype: Compute and cache dtype; `auto` is the stored one.
        device: Where to run.
        kernels: `triton` decodes with fused kernels, `reference` with torch operations; `auto`
            takes triton on a GPU for the policies it supports.
        cache_dtype: `fp8` stores keys and values as e4m3 (triton only); `auto` in `dtype`.
    """

    policy: str = "auto"
    window: int | None = None
    cache: str = "compact"
    max_num_seqs: int = 16
    prefill_chunk: int = 512
    page_slots: int = 16
    slab_pages: int = 256
    dtype: str = "auto"
    device: str = "cpu"
    kernels: str = "auto"
    cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("policy", POLICIES),
            ("cache", CACHES),
            ("dtype", DTYPES),
            ("kernels", KERNELS),
            ("cache_dtype", CACHE_DTYPES),
        ):
            if getattr(self, name) not in allowed:
                raise InferenceError(
                    f"{name}={getattr(self, name)!r}: choose one of {', '.join(allowed)}"
                )
        for name in ("max_num_seqs", "prefill_chunk", "page_slots", "slab_pages"):
            if getattr(self, name) < 1:
                raise InferenceError(f"{name}={getattr(self, name)}: at least 1")
        if self.window is not None and self.window < 1:
            raise InferenceError(f"window={self.window}: at least 1 token")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request continues.

    Attributes:
        max_tokens: Most tokens to generate.
        temperature: 0 takes the most likely token.
        top_p: Share of the probability that is sampled from.
        top_k: Tokens that are sampled from; -1 takes all.
        seed: Of this request's own generator; None draws one.
        stop: Texts that end the request; the output's text ends before them.
        stop_token_ids: Tokens that end the request besides the model's own.
        ignore_eos: Do not stop at the model's end-of-text tokens.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InferenceError(f"max_tokens={self.max_tokens}: at least 1")
        if not self.temperature >= 0:
            raise InferenceError(f"temperature={self.temperature}: 0 or more")
        if not 0 < self.top_p <= 1:
            raise InferenceError(f"top_p={self.top_p}: above 0 and up to 1")
        if self.top_k < 1 and self.top_k != -1:
            raise InferenceError(f"top_k={self.top_k}: at least 1, or -1 for all")
        if isinstance(self.stop, str) or not all(self.stop):
            raise InferenceError(f"stop={self.stop!r}: a tuple of texts that are not empty")
