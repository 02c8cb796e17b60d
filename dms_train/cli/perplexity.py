"""`dms-eval perplexity`: perplexity of a text through the KV cache, beside the original's."""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dms_train.cli.engine_arguments import add_engine, engine_options

_EPILOG = """\
examples:
  dms-eval perplexity EXPORT --original MODEL --text wikitext2_test.txt --device cuda
  dms-eval perplexity MODEL --original MODEL --text wikitext2_test.txt --policy h2o --cr 4
"""


def measure_perplexity(words: list[str]) -> None:
    """Run the command.

    Args:
        words: Arguments after `dms-eval perplexity`.

    Raises:
        EvaluationError: The text or the model cannot be used.
    """
    args = _parser().parse_args(words)
    from dms_train.evaluation.perplexity import PerplexityOptions, perplexity
    from dms_train.hf.directory import resolve

    options = PerplexityOptions(
        text=args.text, length=args.length, prompt=args.prompt, limit=args.limit
    )
    engine = engine_options(args)
    if engine.max_model_len is None:
        engine = replace(engine, max_model_len=args.length)
    for model in (args.model, args.original):
        if model is not None:
            resolve(model)
    results: dict[str, Any] = {}
    if args.original is not None:
        dense = replace(engine, policy="auto", policy_options={})
        results["original"] = perplexity(args.original, dense, options)
        _write(results, args.output)
        gc.collect()  # the engine is part of reference cycles and holds the GPU's memory
    results["model"] = perplexity(args.model, engine, options)
    _write(results, args.output)
    for part in ("window", "continuation"):
        for name, found in results.items():
            print(
                f"{part:12}  {name:8}  {_line(found[part], results.get('original', {}).get(part))}"
            )
    print(args.output)


def _write(results: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _line(found: dict[str, Any], original: dict[str, Any] | None) -> str:
    above = "" if original is None else f"  nats above {found['nats'] - original['nats']:+.4f}"
    return f"perplexity {found['perplexity']:.3f}  cr_factor {found['cr_factor']:.2f}{above}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dms-eval perplexity",
        description="Measure the perplexity of a text through the KV cache: of whole windows, and "
        "of the tokens after a prompt.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", help="model directory or export, dense or retrofitted, with a tokenizer")
    add("--text", type=Path, required=True, help="UTF-8 text file, such as WikiText-2's test set")
    add("--original", metavar="MODEL", help="measure this model too, with all tokens kept")
    add("--length", type=int, default=2048, help="tokens of a window (%(default)s)")
    add("--prompt", type=int, default=1536, help="tokens before the continuation (%(default)s)")
    add("--limit", type=int, metavar="N", help="maximum number of windows (all)")
    add("--output", type=Path, default=Path("outputs/perplexity.json"), help="(%(default)s)")
    add_engine(parser)
    return parser
