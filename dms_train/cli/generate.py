"""`dms-generate MODEL --prompt TEXT`: continue prompts and say what the cache cost."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dms_train.cli.errors import run_main
from dms_train.inference.accounting import RequestKV, TotalKV
from dms_train.inference.engine import LLM, Prompt
from dms_train.inference.errors import InferenceError
from dms_train.inference.heatmap import draw_heatmap
from dms_train.inference.options import CACHES, DTYPES, POLICIES, EngineOptions, SamplingParams
from dms_train.inference.outputs import RequestOutput

_COLUMNS = (
    "tokens",
    "kv_reads",
    "prefill_reads",
    "live_tokens",
    "peak_live_tokens",
    "live_bytes",
    "peak_live_bytes",
    "allocated_bytes",
    "peak_allocated_bytes",
    "cr_factor",
)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dms-generate", description=__doc__)
    parser.add_argument("model", help="model directory or export, dense or DMS")
    parser.add_argument("--prompt", action="append", default=[], help="text; may be repeated")
    parser.add_argument("--prompt-file", type=Path, help="one prompt per line")
    parser.add_argument("--token-ids", action="append", default=[], help="prompt such as 1,17,5")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=-1)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--policy", choices=POLICIES, default="auto")
    parser.add_argument("--window", type=int, help="tokens of --policy window")
    parser.add_argument("--cache", choices=CACHES, default="compact")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--prefill-chunk", type=int, default=512)
    parser.add_argument("--json", type=Path, help="also write everything as JSON")
    parser.add_argument("--plot", type=Path, help="write a PNG of cr_factor by layer and KV head")
    return parser.parse_args(arguments)


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    prompts: list[Prompt] = list(args.prompt)
    if args.prompt_file is not None:
        prompts += [line for line in args.prompt_file.read_text().splitlines() if line.strip()]
    for text in args.token_ids:
        try:
            prompts.append([int(part) for part in text.split(",")])
        except ValueError:
            raise InferenceError(f"--token-ids {text}: whole numbers with commas") from None
    if not prompts:
        raise InferenceError("no prompt; give --prompt, --prompt-file or --token-ids")
    return prompts


def _options(args: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        policy=args.policy,
        window=args.window,
        cache=args.cache,
        max_num_seqs=args.max_num_seqs,
        prefill_chunk=args.prefill_chunk,
        dtype=args.dtype,
        device=args.device,
    )


def _sampling(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )


def _numbers(kv: RequestKV | TotalKV) -> dict[str, Any]:
    values = {name: getattr(kv, name) for name in _COLUMNS if hasattr(kv, name)}
    return {**values, "cr_factors": kv.cr_factors.tolist()}


def _print(outputs: list[RequestOutput], total: TotalKV) -> None:
    for output in outputs:
        done = output.outputs[0]
        shown = done.text or " ".join(map(str, done.token_ids))
        print(f"[{output.request_id}] {output.prompt or ''}{shown}  ({done.finish_reason})")
    names = [*(f"[{output.request_id}]" for output in outputs), "total"]
    rows = [*(_numbers(output.kv) for output in outputs), _numbers(total)]
    print("\n" + f"{'':22s}" + "".join(f"{name:>14s}" for name in names))
    for column in _COLUMNS:
        cells = (row.get(column) for row in rows)
        print(f"{column:22s}" + "".join(f"{_cell(cell):>14s}" for cell in cells))
    print("\ncr_factor by layer (rows) and KV head, all requests")
    for layer, factors in enumerate(total.cr_factors.tolist()):
        print(f"{layer:>4d}  " + " ".join(f"{factor:6.2f}" for factor in factors))


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,d}" if isinstance(value, int) else f"{value:,.2f}"


def _generate(args: argparse.Namespace) -> None:
    llm = LLM(args.model, _options(args))
    outputs = llm.generate(_prompts(args), _sampling(args))
    total = llm.kv
    assert total is not None
    _print(outputs, total)
    if args.json is not None:
        record = [
            {
                "prompt": o.prompt,
                "prompt_token_ids": o.prompt_token_ids,
                "text": o.outputs[0].text,
                "token_ids": o.outputs[0].token_ids,
                "finish_reason": o.outputs[0].finish_reason,
                "kv": _numbers(o.kv),
            }
            for o in outputs
        ]
        written = {"requests": record, "total": _numbers(total)}
        args.json.write_text(json.dumps(written, indent=1) + "\n")
    if args.plot is not None:
        draw_heatmap(total.cr_factors, args.plot, f"cr_factor {total.cr_factor:.2f}")


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    args = _parse(arguments)
    return run_main(lambda: _generate(args))


if __name__ == "__main__":
    sys.exit(main())
