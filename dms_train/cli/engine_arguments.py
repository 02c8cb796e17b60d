"""Command-line arguments of the engine, shared by every command that runs it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from dms_train.inference.options import CACHES, DTYPES, EngineOptions
from dms_train.inference.policies.registry import parse_options, policy_names

_SHORT = ("window", "budget", "cr")  # policy options that have their own argument


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the group `engine` to a command."""
    add = parser.add_argument_group("engine").add_argument
    add(
        "--policy",
        choices=policy_names(),
        default="auto",
        help="cache policy; auto takes the one that the model was trained for",
    )
    add("--window", type=int, metavar="N", help="window of the policy, in tokens")
    add("--budget", type=int, metavar="N", help="tokens to keep of a sequence")
    add("--cr", type=float, metavar="RATIO", help="compression ratio in place of a budget")
    add(
        "--policy-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other option of the policy; may be repeated",
    )
    add(
        "--cache",
        choices=CACHES,
        default="compact",
        help="compact frees evicted tokens, dense keeps and masks them (%(default)s)",
    )
    add_memory(add)
    add("--max-model-len", type=int, metavar="N", help="token limit of a sequence (the model's)")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep snapshots of the cache, from which prompts with the same first tokens start",
    )
    add("--dtype", choices=DTYPES, default="auto", help="auto takes the stored dtype")
    add("--device", default="cpu", help="torch device (%(default)s)")
    add("--max-num-seqs", type=int, default=16, help="concurrent sequences (%(default)s)")
    add("--prefill-chunk", type=int, default=512, help="prompt tokens in one pass (%(default)s)")
    add(
        "--max-num-batched-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="tokens of all sequences in one pass (%(default)s)",
    )
    add(
        "--decode-steps",
        type=int,
        default=8,
        metavar="N",
        help="tokens that the kernels decode at once for requests that are not streamed"
        " (%(default)s)",
    )


def add_memory(add: Callable[..., argparse.Action]) -> None:
    """Add the arguments that limit the memory of the cache.

    Args:
        add: `add_argument` of a parser or of a group.
    """
    add("--cache-bytes", type=int, metavar="N", help="size limit of a compact cache (none)")
    add(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="share of a GPU's memory to use if --cache-bytes is not given (%(default)s)",
    )


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Return the options that the arguments of `add_engine` give.

    Raises:
        InferenceError: A value is out of its range.
    """
    return EngineOptions(
        policy=args.policy,
        policy_options=_policy_options(args),
        cache=args.cache,
        cache_bytes=args.cache_bytes,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_model_len=args.max_model_len,
        enable_prefix_caching=args.enable_prefix_caching,
        max_num_seqs=args.max_num_seqs,
        prefill_chunk=args.prefill_chunk,
        max_num_batched_tokens=args.max_num_batched_tokens,
        decode_steps=args.decode_steps,
        dtype=args.dtype,
        device=args.device,
    )


def _policy_options(args: argparse.Namespace) -> dict[str, Any]:
    """Parse the options of the policy."""
    given = {key: getattr(args, key) for key in _SHORT}
    options = {key: value for key, value in given.items() if value is not None}
    return options | parse_options(args.policy_option)
