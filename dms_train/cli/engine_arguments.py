"""Arguments of the engine, the same for every command that runs it."""

from __future__ import annotations

import argparse

from dms_train.inference.options import CACHES, DTYPES, POLICIES, EngineOptions


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the group `engine` to a command."""
    add = parser.add_argument_group("engine").add_argument
    add(
        "--policy",
        choices=POLICIES,
        default="auto",
        help="which tokens stay in the cache; auto is what the model was trained for",
    )
    add("--window", type=int, help="tokens of --policy window")
    add(
        "--cache",
        choices=CACHES,
        default="compact",
        help="compact frees evicted tokens, dense keeps and masks them (%(default)s)",
    )
    add("--cache-bytes", type=int, metavar="N", help="most bytes of a compact cache (no limit)")
    add(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="share of a GPU's memory to use if --cache-bytes is not given (%(default)s)",
    )
    add("--max-model-len", type=int, metavar="N", help="most tokens of a sequence (the model's)")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep snapshots of the cache, from which prompts with the same first tokens start",
    )
    add("--dtype", choices=DTYPES, default="auto", help="auto is the stored one")
    add("--device", default="cpu", help="torch device (%(default)s)")
    add("--max-num-seqs", type=int, default=16, help="prompts run at the same time (%(default)s)")
    add("--prefill-chunk", type=int, default=512, help="prompt tokens of one pass (%(default)s)")


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """The options that the arguments of `add_engine` give.

    Raises:
        InferenceError: A value is out of its range.
    """
    return EngineOptions(
        policy=args.policy,
        window=args.window,
        cache=args.cache,
        cache_bytes=args.cache_bytes,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_model_len=args.max_model_len,
        enable_prefix_caching=args.enable_prefix_caching,
        max_num_seqs=args.max_num_seqs,
        prefill_chunk=args.prefill_chunk,
        dtype=args.dtype,
        device=args.device,
    )
