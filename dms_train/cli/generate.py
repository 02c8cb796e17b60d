"""Continue prompts with a model, dense or retrofitted, and print what its KV cache cost.

An export runs on the compact cache, which frees what the model evicts or merges.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dms_train.cli.engine_arguments import add_engine, engine_options
from dms_train.cli.errors import run_main
from dms_train.hf.text_files import read_lines
from dms_train.inference.errors import InferenceError
from dms_train.inference.options import SamplingParams

if TYPE_CHECKING:
    from dms_train.inference.accounting import RequestKV, TotalKV
    from dms_train.inference.llm import LLM
    from dms_train.inference.outputs import RequestOutput
    from dms_train.inference.request_builder import Prompt

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


_EPILOG = """\
examples:
  dms-generate outputs/cr4/exports/final/hf --prompt "Once upon a time" --max-tokens 200
  dms-generate MODEL --chat --prompt "What is the capital of France?" --max-tokens 100
  dms-generate MODEL --policy window --window 256 --prompt-file prompts.txt --json out.json

columns of the printed table:
  kv_reads          cache slots attended while decoding, mean over layers and KV heads
  prefill_reads     the same while reading the prompt
  live_tokens       tokens held at the end; peak_live_tokens is the most ever held
  allocated_bytes   memory reserved for them; live_bytes is the part in use
  cr_factor         tokens seen divided by tokens held, without sliding-window layers
"""


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dms-generate",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="model directory or export, dense or retrofitted")
    _add_prompts(parser)
    _add_sampling(parser)
    add_engine(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="draw cr_factor by layer and KV head"
    )
    return parser.parse_args(arguments)


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prompts, at least one").add_argument
    add("--prompt", action="append", default=[], help="text; may be repeated")
    add("--prompt-file", type=Path, metavar="FILE", help="one prompt per line")
    add("--token-ids", action="append", default=[], help="prompt such as 1,17,5")
    add("--chat", action="store_true", help="make each prompt a user turn of the chat template")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, default=64, help="limit of new tokens (%(default)s)")
    add("--temperature", type=float, default=0.0, help="0 (default) decodes greedily")
    add("--top-p", type=float, default=1.0, help="smallest set with this probability")
    add("--top-k", type=int, default=-1, help="draw from the K most likely; -1 takes all")
    add("--seed", type=int, help="seed of random numbers (default: a new one each time)")
    add("--ignore-eos", action="store_true", help="continue after an end-of-sequence token")


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    prompts: list[Prompt] = list(args.prompt)
    if args.prompt_file is not None:
        prompts += [line for _, line in read_lines(args.prompt_file)]
    for text in args.token_ids:
        try:
            prompts.append([int(part) for part in text.split(",")])
        except ValueError:
            raise InferenceError(f"--token-ids {text}: whole numbers with commas") from None
    if not prompts:
        raise InferenceError("no prompt; give --prompt, --prompt-file or --token-ids")
    return prompts


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
        completion = output.outputs[0]
        shown = completion.text or " ".join(map(str, completion.token_ids))
        print(f"[{output.request_id}] {output.prompt or ''}{shown}  ({completion.finish_reason})")
    names = [*(f"[{output.request_id}]" for output in outputs), "total"]
    rows = [*(_numbers(output.kv) for output in outputs), _numbers(total)]
    print("\n" + f"{'':22s}" + "".join(f"{name:>14s}" for name in names))
    for column in _COLUMNS:
        cells = (row.get(column) for row in rows)
        print(f"{column:22s}" + "".join(f"{_cell(cell):>14s}" for cell in cells))
    print("\ncr_factor by layer (rows) and KV head, all requests")
    for layer, factors in zip(total.layers, total.cr_factors.tolist(), strict=True):
        print(f"{layer:>4d}  " + " ".join(f"{factor:6.2f}" for factor in factors))


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,d}" if isinstance(value, int) else f"{value:,.2f}"


def _outputs(llm: LLM, args: argparse.Namespace) -> list[RequestOutput]:
    prompts = _prompts(args)
    if not args.chat:
        return llm.generate(prompts, _sampling(args))
    if args.token_ids:
        raise InferenceError("--token-ids: --chat takes text; leave one of the two out")
    chats = [[{"role": "user", "content": text}] for text in prompts]
    return llm.chat(chats, _sampling(args))


def _generate(args: argparse.Namespace) -> None:
    from dms_train.inference.heatmap import draw_heatmap
    from dms_train.inference.llm import LLM

    llm = LLM(args.model, engine_options(args))
    outputs = _outputs(llm, args)
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
        written = {"requests": record, "total": {**_numbers(total), "layers": total.layers}}
        args.json.write_text(json.dumps(written, indent=1) + "\n")
    if args.plot is not None:
        title = f"cr_factor {total.cr_factor:.2f}"
        draw_heatmap(total.cr_factors, args.plot, title, layer_numbers=total.layers)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 0, or 2 with one line."""
    args = _parse(arguments)
    return run_main(lambda: _generate(args))


if __name__ == "__main__":
    sys.exit(main())
