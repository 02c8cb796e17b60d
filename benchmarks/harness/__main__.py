"""lm-evaluation-harness on the inference engine beside its own class for transformers.

    python -m benchmarks.harness MODEL --device cuda --dtype bfloat16 --output outputs/harness.json
    python -m benchmarks.harness Llama-3.2-1B --device cuda --dtype float32

A shape of `benchmarks.serve` in place of a model is exported first, with random weights.

`ours` is `EngineLM`: scheduled requests on the compact cache. `transformers` is the harness' `HFLM`
on the code that a DMS export carries, by default with the torch operations of the export
(`--export-kernels auto` takes the kernels of this package where it is installed), in batches of
`--batch-size`. Both answer the same requests over texts of random tokens: one warm-up, then
`--repeats` times with other texts.

- generate: greedy answers of at most `--new-tokens` tokens.
- choices: likelihoods of `--choices` answers to each question. All questions begin with the same
  examples, which are three quarters of the prompt.
- rolling: likelihoods of whole texts.

On a CPU only the ratios mean something. Answers are compared: the share of texts that are equal,
and the largest difference of log-likelihoods, which `--dtype` decides.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from benchmarks.harness.random_export import write_random_export
from benchmarks.records import origin
from benchmarks.serve.models import SHAPES
from benchmarks.timing import device_name, versions
from dms_train.cli.errors import run_main
from dms_train.evaluation.harness.model import EngineLM
from dms_train.hf.directory import resolve
from dms_train.hf.formats import read_spec
from dms_train.inference.options import DTYPES, EngineOptions

CASES = {
    "generate": "generate_until",
    "choices": "loglikelihood",
    "rolling": "loglikelihood_rolling",
}
_EXAMPLES = 0.75  # share of a prompt that all questions have in common
_ANSWER_TOKENS = 6


class Texts:
    """Texts of random tokens of a model.

    Args:
        lm: Has the tokenizer.
        seed: Of the tokens.
    """

    def __init__(self, lm: EngineLM, seed: int) -> None:
        self._tokenizer, self._draw = lm.tokenizer, random.Random(seed)
        special = set(lm.tokenizer.all_special_ids)
        self._ids = [token for token in range(len(lm.tokenizer)) if token not in special]

    def draw(self, tokens: int) -> str:
        """A text of about so many tokens."""
        text: str = self._tokenizer.decode(self._draw.choices(self._ids, k=tokens))
        return text or " "


def requests(case: str, texts: Texts, args: argparse.Namespace) -> list[Instance]:
    """The requests of a case, in the form of the harness."""
    shared = texts.draw(int(_EXAMPLES * args.prompt_tokens))
    rest = args.prompt_tokens - int(_EXAMPLES * args.prompt_tokens)
    found: list[tuple[Any, ...]] = []
    for _ in range(args.documents):
        if case == "generate":
            how = {"until": [], "do_sample": False, "max_gen_toks": args.new_tokens}
            found.append((texts.draw(args.prompt_tokens), how))
        elif case == "choices":
            question = f"{shared} {texts.draw(rest)}"
            found += [(question, " " + texts.draw(_ANSWER_TOKENS)) for _ in range(args.choices)]
        else:
            found.append((texts.draw(args.prompt_tokens),))
    return [Instance(CASES[case], {}, given, number) for number, given in enumerate(found)]


def timed(
    lm: Any, case: str, asked: list[Instance], device: torch.device
) -> tuple[float, list[Any]]:
    """Seconds and answers."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    since = time.perf_counter()
    answers: list[Any] = getattr(lm, CASES[case])(asked, disable_tqdm=True)
    return time.perf_counter() - since, answers


def agreement(case: str, ours: list[Any], theirs: list[Any]) -> dict[str, float]:
    """How far the answers to the same requests agree."""
    if case == "generate":
        equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
        return {"equal_texts": equal / len(ours)}
    values = [answer[0] if case == "choices" else answer for answer in ours]
    others = [answer[0] if case == "choices" else answer for answer in theirs]
    return {"largest_difference": max(abs(a - b) for a, b in zip(values, others, strict=True))}


def compare(
    case: str,
    models: dict[str, Any],
    draw: Callable[[int], list[Instance]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Times of both models and their agreement.

    Args:
        case: Of `CASES`.
        models: `ours` and `transformers`.
        draw: Requests of a repeat; 0 is the warm-up.
        args: Of the command.
    """
    device = torch.device(args.device)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    agreed: list[dict[str, float]] = []
    for repeat in range(args.repeats + 1):
        asked, answers = draw(repeat), {}
        for name, lm in models.items():
            took, answers[name] = timed(lm, case, asked, device)
            if repeat:
                seconds[name].append(took)
        agreed.append(agreement(case, answers["ours"], answers["transformers"]))
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    worst = min if case == "generate" else max
    return {
        "requests": len(asked),
        "seconds": seconds,
        "ratio": middle["transformers"] / middle["ours"],
        **{name: worst(row[name] for row in agreed) for name in agreed[0]},
    }


def build(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Both classes over a model directory."""
    directory = resolve(model)
    options = EngineOptions(
        device=args.device,
        dtype=args.dtype,
        max_num_seqs=args.batch_size,
        enable_prefix_caching=True,
    )
    exported = read_spec(directory) is not None
    other = HFLM(
        pretrained=str(directory),
        trust_remote_code=exported,
        dtype=args.dtype,
        device=args.device,
        batch_size=args.batch_size,
    )
    generation = other.model.generation_config
    if generation.eos_token_id is None:  # else rows of a batch go on behind their end of text
        generation.eos_token_id = other.eot_token_id
    if exported:
        other.model.dms_kernels = args.export_kernels
    return {"ours": EngineLM(model, options), "transformers": other}


def _run(args: argparse.Namespace) -> None:
    if args.model not in SHAPES or Path(args.model).exists():
        _compare(args, args.model)
        return
    with TemporaryDirectory() as folder:
        write_random_export(args.model, Path(folder) / "model", torch.device(args.device))
        _compare(args, f"{folder}/model")


def _compare(args: argparse.Namespace, model: str) -> None:
    models, device = build(args, model), torch.device(args.device)
    found = {}
    for number, case in enumerate(args.cases.split(",")):

        def draw(repeat: int, case: str = case, number: int = number) -> list[Instance]:
            return requests(case, Texts(models["ours"], 1000 * number + repeat), args)

        found[case] = compare(case, models, draw, args)
        shown = {name: value for name, value in found[case].items() if name != "seconds"}
        middle = {k: f"{statistics.median(v):.3f} s" for k, v in found[case]["seconds"].items()}
        print(f"{case}: {middle} {shown}")
    total = models["ours"].engine.kv
    record = {
        "device": device_name(device),
        "versions": versions(device),
        **origin(),
        "setting": {name: str(value) for name, value in vars(args).items()},
        "cases": found,
        "cr_factor": total.cr_factor,
    }
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(record, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.harness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    shapes = ", ".join(SHAPES)
    add("model", help=f"model directory or export with a tokenizer, or one of {shapes}")
    add("--cases", default=",".join(CASES), help="(%(default)s)")
    add("--device", default="cpu")
    add("--dtype", default="auto", choices=DTYPES)
    add("--batch-size", type=int, default=32, help="also the rows of the engine (%(default)s)")
    add("--documents", type=int, default=64, help="questions or texts (%(default)s)")
    add("--prompt-tokens", type=int, default=512, help="(%(default)s)")
    add("--new-tokens", type=int, default=64, help="(%(default)s)")
    add("--choices", type=int, default=4, help="(%(default)s)")
    add("--repeats", type=int, default=3, help="(%(default)s)")
    add("--export-kernels", default="reference", choices=("reference", "auto", "triton"))
    add("--output", type=Path, help="JSON file")
    return run_main(lambda: _run(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
