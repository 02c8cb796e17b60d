"""Compare settings of the retrofit of a small model, one short run to CR 4 for each.

    python -m research recipe-sweep smollm2_135m --model DIR --plain PREFIX [--sampled PREFIX]
        --held-out wikitext2_test.txt --haystack essays.txt [--benchmarks DIR] [--minutes 9]
    python -m research recipe-sweep --table FOLDER/sweep.json

Each variant changes the named settings of the base: the experiment to CR 4 with 50 steps per unit
of the ratio and 60 steps at each end, on the plain text. `trim-kv` and `kvzap` train gates on the
frozen model for as many steps; `trim-kv` then has a budget at CR 4, `trim-kv-cr-8` the same gates
at CR 8, and `kvzap` also exports with other thresholds, of which each reaches a ratio of its own.
`last-channel` has the eviction channel that third parties' formats read, and `fastdms` every
constant of FastDMS' format except the window. `sinks` is the base, but its first four tokens stay.
`fp8` and `bf16-layers` need Transformer Engine and differ in FP8 products alone. `stored-teacher`
first stores the 64 most probable tokens of the original, in seven gigabytes, and trains on them.

`FOLDER/sweep.json` has a row for each measured variant: KL to the original on held-out text with
hard evictions, perplexity of the text of `--held-out`, and the share of needles that are found.
With `--benchmarks` it has the scores of the recipe's tasks too. The same command continues.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from benchmarks.records import origin, show
from dms_train.cli.config_source import compose
from dms_train.cli.errors import run_main
from dms_train.evaluation.devices import resolve_device
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.harness.comparison import read_results
from dms_train.evaluation.plots import read_rows
from dms_train.evaluation.scaling.results import load
from dms_train.tables import markdown_table
from research.lab.arguments import count, duration, list_of
from research.lab.run import UNFINISHED, run_steps
from research.lab.step import Step
from research.recipe.evaluations import limited
from research.recipe.measured import comparable, scores
from research.recipe.report import interval
from research.recipe.steps import EVALUATE, NEEDLES, ORIGINAL, RECIPES, TRAIN

_BASE = (
    "stage.run=[zero_neuron,retrofit,hold,export]",
    "stage.retrofit.target_cr=4",
    "stage.retrofit.steps_per_cr=50",
    "stage.hold.steps=60",
    "stage.hold.branch_ratios=null",
)
_STEPS = 270  # of the base
_NO_EVICTION = ("stage.zero_neuron.steps=210", "stage.retrofit.target_cr=1")
_LONG = ("data.seq_length=4096", "data.micro_batch_size=8", "data.global_batch_size=16")
_LAYERS = ("parallel.layers=transformer_engine",)
_FROZEN = (  # gates alone, for as many steps
    *("method.train=channel", "optim.lr=3e-4"),
    *("stage.zero_neuron.steps=1", "stage.hold.steps=119"),
)
_TRIM_KV = ("method=trim_kv", "method.window=0", "stage.export.format=trim_kv", *_FROZEN)
_OFFSETS = (3, 3.5, 4, 4.5)  # thresholds of kvzap, whose own is 5
_KVZAP = ("method=kvzap", "method.window=128", "stage.export.format=kvzap", *_FROZEN)
VARIANTS: dict[str, tuple[str, ...]] = {
    "base": (),
    "no-eviction": _NO_EVICTION,
    "channel-0": ("method.channel=0",),
    "last-channel": ("method.channel=-1",),
    "fastdms": ("method=dms_fastdms", "method.window=64", "stage.export.format=fastdms"),
    "lr-1e-4": ("optim.lr=1e-4",),
    "lr-5e-5": ("optim.lr=5e-5",),
    "lr-1e-5": ("optim.lr=1e-5",),
    "lr-5e-4": ("optim.lr=5e-4",),
    "window-16": ("method.window=16",),
    "window-256": ("method.window=256",),
    "train-attention": ("method.train=attention",),
    "train-lora": ("method.train=lora", "optim.lr=1e-3"),
    "train-channel": ("method.train=channel", "optim.lr=1e-3"),
    "text-of-the-model": (),
    "both-texts": (),
    "samples-of-4k-tokens": _LONG,
    "25-steps-per-unit": ("stage.retrofit.steps_per_cr=25", "stage.hold.steps=30"),
    "150-steps-per-unit": ("stage.retrofit.steps_per_cr=150", "stage.hold.steps=120"),
    "400-steps-per-unit": ("stage.retrofit.steps_per_cr=400", "stage.hold.steps=240"),
    "1500-steps-per-unit": ("stage.retrofit.steps_per_cr=1500", "stage.hold.steps=540"),
    "zeroing-in-10-steps": ("stage.zero_neuron.steps=10",),
    "zeroing-in-240-steps": ("stage.zero_neuron.steps=240",),
    "KL-from-the-student": ("loss.kl_direction=student_teacher",),
    "temperature-2": ("loss.kl_temperature=2",),
    "bf16-layers": _LAYERS,
    "fp8": ("parallel.fp8=true", *_LAYERS),
    "sinks": ("stage.run=[export]",),
    "stored-teacher": (),
    "trim-kv": _TRIM_KV,
    "trim-kv-cr-8": (*_TRIM_KV, "stage.run=[export]"),
    "kvzap": _KVZAP,
    **{
        f"kvzap-offset-{offset}": (*_KVZAP, f"method.alpha_offset={offset}", "stage.run=[export]")
        for offset in _OFFSETS
    },
}
_EXPORTED = {"sinks": "base", "trim-kv-cr-8": "trim-kv"}
_EXPORTED |= {f"kvzap-offset-{offset}": "kvzap" for offset in _OFFSETS}
_POLICIES = {  # policy and its option, by variant
    "trim-kv": ("trim_kv", "cr=4"),
    "trim-kv-cr-8": ("trim_kv", "cr=8"),
    "sinks": ("dms", "sinks=4"),
}
_STORED = ("stored-teacher",)
_SAMPLED = {"text-of-the-model": (0.0, 1.0), "both-texts": (0.5, 0.5)}  # shares: plain, sampled
_CACHE = "8000000000"  # bytes of a measurement beside a training


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Choices of the user.

    Attributes:
        name: Name of the recipe, whose experiment is the base.
        root: Folder of all files.
        model: Directory of the original.
        plain: Token file of plain text.
        sampled: Token file of text that the model wrote; None leaves its variants out.
        held_out: Text for the perplexity.
        haystack: Text that hides needles.
        benchmarks: Folder of `dms-eval data`; None leaves the tasks out.
        limit: Documents of each task.
        contexts: Tokens of prompts with needles.
        variants: Names of variants.
        device: Device of the commands.
    """

    name: str
    root: Path
    model: Path
    plain: Path
    sampled: Path | None
    held_out: Path
    haystack: Path
    benchmarks: Path | None
    limit: int
    contexts: tuple[int, ...]
    variants: tuple[str, ...]
    device: str

    def folder(self, name: str) -> Path:
        """Return the folder of a variant."""
        return self.root / name

    def export(self, name: str) -> Path:
        """Return the directory of a variant's model, or of the original."""
        return self.model if name == ORIGINAL else self.folder(name) / "train/exports/final/hf"


def overrides(sweep: Sweep, name: str) -> list[str]:
    """Return the overrides of a variant's training."""
    return [
        *_inputs(sweep, name, "train"),
        *_BASE,
        *VARIANTS[name],
        *([f"run.load={sweep.export(_EXPORTED[name])}"] if name in _EXPORTED else []),
        *([f"teacher.logits={sweep.folder(name) / 'teacher'}"] if name in _STORED else []),
    ]


def _inputs(sweep: Sweep, name: str, folder: str) -> list[str]:
    """Return the overrides of a run's experiment, model, text and folder."""
    shares = _SAMPLED.get(name, (1.0, 0.0))
    data = {sweep.plain: shares[0], sweep.sampled: shares[1]}
    used = {path: share for path, share in data.items() if share}
    return [
        f"experiment={RECIPES[sweep.name].experiment}",
        f"model.path={sweep.model}",
        f"data.paths=[{','.join(map(str, used))}]",
        f"data.weights=[{','.join(map(str, used.values()))}]",
        f"run.dir={sweep.folder(name) / folder}",
        *RECIPES[sweep.name].train,
    ]


def _store(sweep: Sweep, name: str) -> list[str]:
    """Return the overrides of the run that stores the teacher of a variant."""
    inputs = _inputs(sweep, name, "teacher")
    samples = _STEPS * compose(inputs).data.global_batch_size
    return [
        *inputs,
        "stage.run=[teacher_logits]",
        f"stage.teacher_logits.samples={samples}",
    ]


def steps(sweep: Sweep) -> list[Step]:
    """Return the training and the measurements of every variant."""
    made: list[Step] = []
    for name in (*sweep.variants, ORIGINAL):
        trained = name != ORIGINAL
        if trained:
            made.extend(_trainings(sweep, name))
        needs = (_step("train", name),) if trained else ()
        for kind, words in _measurements(sweep, name).items():
            made.append(Step(name=_step(kind, name), words=partial(list, words), needs=needs))
    return made


def _trainings(sweep: Sweep, name: str) -> list[Step]:
    """Return the training of a variant, after the run that stores its teacher, if it reads one."""
    words = [*TRAIN, *overrides(sweep, name)]
    if name not in _STORED:
        needs = (_step("train", _EXPORTED[name]),) if name in _EXPORTED else ()
        return [Step(name=_step("train", name), words=partial(list, words), needs=needs)]
    store = Step(name=_step("store", name), words=partial(list, [*TRAIN, *_store(sweep, name)]))
    train = Step(name=_step("train", name), words=partial(list, words), needs=(store.name,))
    return [store, train]


def _step(kind: str, name: str) -> str:
    return f"{kind}_{name}"


def _measurements(sweep: Sweep, name: str) -> dict[str, list[str]]:
    """Return the command of each measurement of a model."""
    folder, model = sweep.folder(name), sweep.export(name)
    policy = _POLICIES.get(name)
    words = [] if policy is None else ["--policy", policy[0], "--policy-option", policy[1]]
    engine = ["--device", sweep.device, "--cache-bytes", _CACHE, *words]
    made = {
        "perplexity": [
            *(*EVALUATE, "perplexity", str(model), "--text", str(sweep.held_out), *engine),
            *("--output", str(folder / "perplexity.json")),
        ],
        "needles": [
            *(*NEEDLES, str(folder / "needles")),
            *("--contexts", ",".join(map(str, sweep.contexts))),
            *(f"model.path={model}", f"model.device={sweep.device}"),
            *(f"task.haystack={sweep.haystack}", "task.count=100", f"model.cache_bytes={_CACHE}"),
            *(() if policy is None else (f"policy={policy[0]}", f"policy.{policy[1]}")),
        ],
    }
    if sweep.benchmarks is not None:
        tasks = ",".join(limited(task, sweep.limit) for task in RECIPES[sweep.name].tasks)
        made["tasks"] = [
            *(*EVALUATE, "harness", str(model), "--tasks", tasks),
            *("--data", str(sweep.benchmarks), "--limit", str(sweep.limit), *engine),
            *("--output", str(folder / "tasks"), "--log-samples"),
        ]
    return made


def rows(sweep: Sweep) -> list[dict[str, Any]]:
    """Return the numbers of every model that is measured, all or in part."""
    found = {name: _measured(sweep, name) for name in (ORIGINAL, *sweep.variants)}
    return [_row(sweep, name, kinds) for name, kinds in found.items() if kinds]


def _measured(sweep: Sweep, name: str) -> list[str]:
    """Return the measurements of a model that are finished."""
    state = sweep.root / "state"
    kinds = _measurements(sweep, name)
    return [kind for kind in kinds if (state / f"{_step(kind, name)}.done").is_file()]


def _row(sweep: Sweep, name: str, kinds: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"variant": name}
    if name != ORIGINAL:
        words = json.loads(
            (sweep.root / "state" / f"{_step('train', name)}.done").read_text("utf-8")
        )
        row["overrides"] = words[len(TRAIN) :]
        if name not in _EXPORTED:
            row |= _training(sweep.folder(name) / "train" / "metrics.jsonl")
    if "perplexity" in kinds:
        row |= _perplexity(sweep.folder(name) / "perplexity.json")
    if "needles" in kinds:
        row |= _needles(sweep, sweep.folder(name) / "needles")
    if "tasks" in kinds:
        row |= _scores(sweep, name)
    return row


def _scores(sweep: Sweep, name: str) -> dict[str, Any]:
    """Return the scores of all tasks, with differences to an original that has finished."""
    found = read_results(sweep.folder(name) / "tasks")
    original = None
    if name != ORIGINAL and "tasks" in _measured(sweep, ORIGINAL):
        original = comparable(name, found, read_results(sweep.folder(ORIGINAL) / "tasks"))
    return scores(found, original, RECIPES[sweep.name].tasks)


def _perplexity(path: Path) -> dict[str, Any]:
    measured = json.loads(path.read_text(encoding="utf-8"))["model"]
    names = ("perplexity", "nats", "cr_factor")
    return {
        part: {key: measured[part][key] for key in names} for part in ("window", "continuation")
    }


def _needles(sweep: Sweep, folder: Path) -> dict[str, Any]:
    found = {}
    for context in sweep.contexts:
        (point,) = load([folder / str(context)]).points()
        accuracy = point.accuracy
        found[f"needles_{context}"] = [accuracy.value, accuracy.low, accuracy.high]
    return found


def _training(metrics: Path) -> dict[str, Any]:
    """Return the tokens and the last evaluation of a run."""
    last = [row for row in read_rows(metrics) if "eval/kl" in row][-1]
    return {"tokens": last["tokens"], **{name: last.get(f"eval/{name}") for name in ("kl", "cr")}}


def table(record: dict[str, Any]) -> str:
    """Return the rows of a record as Markdown."""
    keys = dict.fromkeys(key for row in record["rows"] for key in row)
    contexts = [key for key in keys if key.startswith("needles_")]
    header = ["variant", "tokens, M", "KL", "CR", "perplexity", "of continuations"]
    header += [f"needles {int(key.removeprefix('needles_')):,}" for key in contexts]
    cells = [_cells(row, contexts) for row in record["rows"]]
    if "choices" in keys:
        header += ["multiple choice", "difference"]
        cells = [row + _choices(each) for row, each in zip(cells, record["rows"], strict=True)]
    return markdown_table(header, cells)


def _choices(row: dict[str, Any]) -> list[str]:
    """Return the mean score of multiple choice, and its difference to the original."""
    choices = row.get("choices")
    if not choices:
        return ["", ""]
    return [f"{choices['score']:.4f}", interval(choices.get("difference"), "+.3f")]


def _cells(row: dict[str, Any], contexts: list[str]) -> list[str]:
    numbers = (("tokens", ".1f", 1e-6), ("kl", ".4f", 1))
    needles = [f"{x[0]:.2f} [{x[1]:.2f}, {x[2]:.2f}]" if x else "" for x in map(row.get, contexts)]
    return [
        row["variant"],
        *(format(row[key] * scale, form) if key in row else "" for key, form, scale in numbers),
        _cell(row, "continuation", "cr_factor"),  # a prompt may be read before any eviction
        *(_cell(row, part, "perplexity") for part in ("window", "continuation")),
        *needles,
    ]


def _cell(row: dict[str, Any], part: str, name: str) -> str:
    return f"{row[part][name]:.2f}" if part in row else ""


def _write(sweep: Sweep) -> None:
    device = torch.device(sweep.device)
    record = {
        "recipe": sweep.name,
        "base": list(_BASE),
        "device": timing.device_name(device),
        "versions": timing.versions(device),
        **origin(),
        "rows": rows(sweep),
    }
    path = sweep.root / "sweep.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if record["rows"]:
        print(table(record))
    print(path)


def _sweep(args: argparse.Namespace) -> Sweep:
    paths = {"--model": args.model, "--held-out": args.held_out, "--haystack": args.haystack}
    if args.benchmarks is not None:
        paths["--benchmarks"] = args.benchmarks
    for option, path in paths.items():
        if path is None or not path.exists():
            raise EvaluationError(f"{option} {path}: name an existing file or folder")
    if args.plain is None:
        raise EvaluationError("--plain: name the token file of plain text")
    chosen = args.variants or [name for name in VARIANTS if args.sampled or name not in _SAMPLED]
    for name in chosen:
        if name not in VARIANTS:
            raise EvaluationError(f"--variants {name}: choose from {', '.join(VARIANTS)}")
        if name in _SAMPLED and args.sampled is None:
            raise EvaluationError(f"--variants {name}: needs --sampled")
        if name in _EXPORTED and _EXPORTED[name] not in chosen:
            raise EvaluationError(f"--variants {name}: needs {_EXPORTED[name]} too")
    if args.benchmarks is not None and not RECIPES[args.name].tasks:
        raise EvaluationError(f"--benchmarks: {args.name} has no tasks; leave it out")
    return Sweep(
        name=args.name,
        root=args.folder or Path("outputs") / f"sweep_{args.name}",
        model=args.model,
        plain=args.plain,
        sampled=args.sampled,
        held_out=args.held_out,
        haystack=args.haystack,
        benchmarks=args.benchmarks,
        limit=args.limit,
        contexts=tuple(args.contexts),
        variants=tuple(chosen),
        device=resolve_device(args.device),
    )


def _run(args: argparse.Namespace) -> int:
    if args.table is not None:
        return show(args.table, table)
    if args.name is None:
        raise EvaluationError(f"NAME: choose from {', '.join(RECIPES)}")
    sweep = _sweep(args)
    how = {"jobs": args.jobs, "device": sweep.device, "minutes": args.minutes}
    finished = run_steps(sweep.root, steps(sweep), **how)
    _write(sweep)
    return 0 if finished else UNFINISHED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m research recipe-sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", nargs="?", choices=RECIPES, help="recipe")
    add("--folder", type=Path, help="default outputs/sweep_NAME")
    add("--model", type=Path, help="directory of the original")
    add("--plain", type=Path, metavar="PREFIX", help="token file of plain text")
    add("--sampled", type=Path, metavar="PREFIX", help="token file of text that the model wrote")
    add("--held-out", type=Path, help="text for the perplexity, such as WikiText-2's test set")
    add("--haystack", type=Path, help="text that hides needles, such as essays")
    add("--benchmarks", type=Path, help="folder of `dms-eval data`, for the tasks of the recipe")
    add("--limit", type=count, default=1000, help="documents of each task (%(default)s)")
    add("--contexts", type=list_of(count), default=[4096], help="prompt tokens (%(default)s)")
    add("--variants", type=list_of(str), metavar="A,B", help=f"of: {', '.join(VARIANTS)} (all)")
    add("--jobs", type=count, default=1, help="commands at a time (%(default)s)")
    add("--minutes", type=duration, help="stop then; the same command continues")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(%(default)s)")
    add("--table", type=Path, metavar="FILE", help="print a stored record instead")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 2 with one line, or 3 if the time is over."""
    return run_main(lambda: _run(_parser().parse_args(arguments)))
