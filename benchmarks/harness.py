"""lm-evaluation-harness on the inference engine and on its own class for transformers.

    python -m benchmarks harness MODEL --device cuda --dtype bfloat16
    python -m benchmarks harness Llama-3.2-1B --device cuda --dtype float32

A shape of the benchmark `serve` in place of a model is exported first, with random weights.

`ours` is `EngineLM`: scheduled requests on the compact cache. `transformers` is the harness' `HFLM`
on the code of a DMS export, in batches of `--batch-size`. By default it uses the export's torch
operations; `--export-kernels auto` takes the kernels of this package if it is installed. Both
answer the same requests over texts of random tokens: one warm-up, then `--repeats` times with
other texts.

- generate: greedy answers of at most `--new-tokens` tokens.
- choices: likelihoods of `--choices` answers to each question. All questions begin with the same
  examples, which are three quarters of the prompt.
- rolling: likelihoods of whole texts.

On a CPU only the ratios mean something. The comparison of answers gives the share of equal texts
and the largest difference of log-likelihoods, which depends on `--dtype`.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.benchmark import Args, Benchmark, add_fields, comma_separated, one_of
from benchmarks.records import Table
from benchmarks.serve.models import SHAPES
from benchmarks.serve.random_export import write_random_export
from benchmarks.tables import Column, field, table
from dms_train.hf.directory import resolve
from dms_train.hf.formats import read_spec
from dms_train.inference.options import DTYPES, EngineOptions

if TYPE_CHECKING:  # lm-evaluation-harness is optional
    from lm_eval.api.instance import Instance

    from dms_train.evaluation.harness.model import EngineLM

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
        lm: Model with the tokenizer.
        seed: Seed of the tokens.
    """

    def __init__(self, lm: EngineLM, seed: int) -> None:
        self._tokenizer, self._draw = lm.tokenizer, random.Random(seed)
        special = set(lm.tokenizer.all_special_ids)
        self._ids = [token for token in range(len(lm.tokenizer)) if token not in special]

    def draw(self, tokens: int) -> str:
        """Draw a text of about `tokens` tokens."""
        text: str = self._tokenizer.decode(self._draw.choices(self._ids, k=tokens))
        return text or " "


def requests(case: str, texts: Texts, args: Args) -> list[Instance]:
    """Return the requests of a case, in the form of the harness."""
    from lm_eval.api.instance import Instance

    shared = texts.draw(int(_EXAMPLES * args.prompt_tokens))
    rest = args.prompt_tokens - int(_EXAMPLES * args.prompt_tokens)
    arguments: list[tuple[Any, ...]] = []
    for _ in range(args.documents):
        if case == "generate":
            how = {"until": [], "do_sample": False, "max_gen_toks": args.new_tokens}
            arguments.append((texts.draw(args.prompt_tokens), how))
        elif case == "choices":
            question = f"{shared} {texts.draw(rest)}"
            arguments += [(question, " " + texts.draw(_ANSWER_TOKENS)) for _ in range(args.choices)]
        else:
            arguments.append((texts.draw(args.prompt_tokens),))
    return [Instance(CASES[case], {}, given, number) for number, given in enumerate(arguments)]


def timed(
    lm: Any, case: str, asked: list[Instance], device: torch.device
) -> tuple[float, list[Any]]:
    """Return seconds and answers."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    since = time.perf_counter()
    answers: list[Any] = getattr(lm, CASES[case])(asked, disable_tqdm=True)
    return time.perf_counter() - since, answers


def agreement(case: str, ours: list[Any], theirs: list[Any]) -> dict[str, float]:
    """Return how far the answers to the same requests agree."""
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
    args: Args,
) -> dict[str, Any]:
    """Measure the times of both models and their agreement.

    Args:
        case: One of `CASES`.
        models: `ours` and `transformers`.
        draw: Requests of a repeat; 0 is the warm-up.
        args: Options.
    """
    seconds: dict[str, list[float]] = {name: [] for name in models}
    agreed: list[dict[str, float]] = []
    for repeat in range(args.repeats + 1):
        asked, answers = draw(repeat), {}
        for name, lm in models.items():
            took, answers[name] = timed(lm, case, asked, args.device)
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


def build(args: Args, model: str) -> dict[str, Any]:
    """Build both classes over a model directory."""
    from lm_eval.models.huggingface import HFLM

    from dms_train.evaluation.harness.model import EngineLM

    directory = resolve(model)
    options = EngineOptions(
        device=str(args.device),
        dtype=args.dtype,
        max_num_seqs=args.batch_size,
        enable_prefix_caching=True,
    )
    exported = read_spec(directory) is not None
    other = HFLM(
        pretrained=str(directory),
        trust_remote_code=exported,
        dtype=args.dtype,
        device=str(args.device),
        batch_size=args.batch_size,
    )
    generation = other.model.generation_config
    if generation.eos_token_id is None:  # otherwise a batch continues after an end of text
        generation.eos_token_id = other.eot_token_id
    if exported:
        other.model.dms_kernels = args.export_kernels
    return {"ours": EngineLM(model, options), "transformers": other}


def measure(_: None, args: Args) -> Iterator[dict[str, Any]]:
    """Yield all cases measured so far, after each case."""
    if args.model not in SHAPES or Path(args.model).exists():
        yield from _compare(args, args.model)
        return
    with TemporaryDirectory() as folder:
        write_random_export(args.model, Path(folder) / "model", args.device)
        yield from _compare(args, f"{folder}/model")


def _compare(args: Args, model: str) -> Iterator[dict[str, Any]]:
    models = build(args, model)
    by_case = {}
    for number, case in enumerate(args.cases):

        def draw(repeat: int, case: str = case, number: int = number) -> list[Instance]:
            return requests(case, Texts(models["ours"], 1000 * number + repeat), args)

        by_case[case] = compare(case, models, draw, args)
        yield {"cases": by_case, "cr_factor": models["ours"].engine.kv.cr_factor}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    shapes = ", ".join(SHAPES)
    add("model", help=f"model directory or export with a tokenizer, or one of {shapes}")
    add("--cases", type=comma_separated(one_of(CASES)), default=list(CASES), help="default: all")
    add("--dtype", default="auto", choices=DTYPES)
    add("--batch-size", type=int, default=32, help="also the rows of the engine (%(default)s)")
    add("--documents", type=int, default=64, help="questions or texts (%(default)s)")
    add("--prompt-tokens", type=int, default=512, help="(%(default)s)")
    add("--new-tokens", type=int, default=64, help="(%(default)s)")
    add("--choices", type=int, default=4, help="(%(default)s)")
    add("--export-kernels", default="reference", choices=("reference", "auto", "triton"))


def check(_: Args) -> None:
    """Refuse to start without lm-evaluation-harness."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("needs lm-evaluation-harness: pip install 'dms-train[eval]'")


def settings(args: Args) -> dict[str, Any]:
    """Return the options that affect the numbers."""
    names = (
        *("model", "cases", "device", "dtype", "batch_size", "documents", "prompt_tokens"),
        *("new_tokens", "choices", "repeats", "export_kernels"),
    )
    given = {name: getattr(args, name) for name in names} | {"cases": ",".join(args.cases)}
    return {"setting": {name: str(value) for name, value in given.items()}}


COLUMNS: tuple[Column, ...] = (
    ("case", field("name")),
    ("requests", field("requests")),
    ("s, ours", lambda row: f"{statistics.median(row['seconds']['ours']):.2f}"),
    ("s, transformers", lambda row: f"{statistics.median(row['seconds']['transformers']):.2f}"),
    ("times as fast", field("ratio", ".1f")),
    ("equal texts", field("equal_texts", ".3f")),
    ("largest difference", field("largest_difference", ".1e")),
)


def tables(record: dict[str, Any]) -> str:
    """Return a row for each case."""
    return table(COLUMNS, [{"name": name, **case} for name, case in record["cases"].items()])


BENCHMARK = Benchmark(
    record="harness",
    options=options,
    check=check,
    repeats=3,
    measure=measure,
    settings=settings,
    store=add_fields,
    tables=tables,
    stored=(
        Table(
            "*/harness*.json",
            "docs/guides/evaluation.md",
            (
                "dms_train/evaluation/harness",
                "dms_train/inference",
                "dms_train/kernels/decode",
                "dms_train/kernels/prefill",
            ),
        ),
    ),
)
