"""Errors of attention backends on random inputs, as multiples of the errors of SDPA.

    python -m benchmarks attention accuracy

The reference is `train_attention.reference` in float64 on the same inputs. The baseline is SDPA in
the dtype of the inputs, with the bias of every query and key in memory. Its gradient with respect
to the bias, summed over queries, is the baseline of the logits' gradient. An error is the Euclidean
norm of the difference. Decisions are random, exactly 0 and exactly 1.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention.peers import materialised
from benchmarks.attention.shapes import AttentionInputs, Call, Shape, make_inputs
from benchmarks.attention.train_cases import ours
from benchmarks.benchmark import Args, Benchmark, add_fields
from benchmarks.records import Table
from benchmarks.tables import field, table
from dms_train.kernels.train_attention.reference import dms_attention

NAMES = ("o", "dq", "dk", "dv", "dlogits")
BOUND = 2.0
_SIZES = (16, 33, 64, 72, 80, 96, 128, 200, 256)
_HEADS = ((1, 1), (6, 2), (4, 4), (14, 2), (8, 1), (3, 3), (12, 3), (8, 2))
_DTYPES = (torch.bfloat16, torch.float16)
# Kernels are compiled once for each family, so that 200 cases do not take 200 compilations.
FAMILIES = [
    (d, dtype, _HEADS[(3 * number + offset) % len(_HEADS)])
    for number, d in enumerate((*_SIZES, 64, 128))
    for offset, dtype in enumerate(_DTYPES)
]
_LONGEST, _LONGEST_ON_CPU = 700, 80
# Lower bounds of an error: rounding of an exact result, and cancellation to nearly zero.
_ROUNDING, _CANCELLING = 1 / 8, 1e-4


class Case(NamedTuple):
    """Random inputs; `hard` decisions are only 0 and 1."""

    shape: Shape
    window: int
    dtype: torch.dtype
    hard: bool
    seed: int


def draw_case(seed: int, longest: int) -> Case:
    """Draw the case with this number."""
    draw = random.Random(seed)
    d, dtype, (hq, hk) = FAMILIES[seed % len(FAMILIES)]
    long = draw.randint(longest // 2, longest)
    length = draw.choice((draw.randint(1, 5), draw.randint(2, longest), long, long))
    window = draw.choice((1, draw.randint(1, longest), draw.randint(1, max(1, length // 4))))
    shape = Shape(draw.randint(1, 3), hq, hk, length, d)
    return Case(shape, window, dtype, draw.random() < 0.25, seed)


def case_inputs(case: Case, device: torch.device) -> AttentionInputs:
    """Draw the tensors of a case; infinite logits make alpha exactly 0 and 1."""
    inputs = make_inputs(case.shape, case.window, device, case.dtype, case.seed)
    logits = inputs.logits.detach().clone()
    generator = torch.Generator(device).manual_seed(case.seed + 1)
    kind = torch.rand(logits.shape, generator=generator, device=device)
    share = 0.5 if case.hard else 0.2
    logits[kind < share] = float("-inf")
    logits[kind >= 1 - share] = float("inf")
    return inputs._replace(logits=logits.requires_grad_())


def exact(inputs: AttentionInputs) -> list[Tensor]:
    """Return output and gradients in float64."""
    leaves = [x.detach().double().requires_grad_() for x in inputs[:4]]
    query, key, value, logits = leaves

    def forward() -> Tensor:
        log_keep = F.logsigmoid(-logits)
        return dms_attention(query, key, value, log_keep, inputs.window, inputs.scale)

    return _results(Call(forward, leaves, inputs.d_out.double()))


def sdpa_baseline(inputs: AttentionInputs) -> list[Tensor]:
    """Return output and gradients of SDPA with the bias in memory, heads after positions."""
    d = inputs.query.shape[-1]
    widened = _widened(inputs, -d % 8)  # the fused kernel takes multiples of 8
    call = materialised(widened)
    order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        o, dq, dk, dv, dlogits = _results(call)
    return [*(x.transpose(1, 2)[..., :d] for x in (o, dq, dk, dv)), dlogits]


def _widened(inputs: AttentionInputs, more: int) -> AttentionInputs:
    """Add `more` channels of zeros, which do not change scores or other channels' results."""

    def widen(x: Tensor) -> Tensor:
        return F.pad(x.detach(), (0, more)).requires_grad_(x.requires_grad)

    query, key, value, d_out = (
        widen(x) for x in (inputs.query, inputs.key, inputs.value, inputs.d_out)
    )
    return inputs._replace(query=query, key=key, value=value, d_out=d_out)


def _results(call: Call) -> list[Tensor]:
    out = call.forward()
    return [out.detach(), *call.backward(out)]


def error_ratios(
    results: list[Tensor], peer: list[Tensor], truth: list[Tensor]
) -> dict[str, float]:
    """Return the error of `results` divided by the error of `peer`, by name of the result.

    The lower bound of an error is the error of rounding the true result to its dtype, so that an
    exact peer does not make ratios infinite. For results that cancel to nearly zero, the lower
    bound is 1e-4 of the error of rounding the largest result to 16 bits.
    """
    least = _CANCELLING * torch.finfo(results[0].dtype).eps * max(float(x.norm()) for x in truth)
    ratios = {}
    for name, a, b, t in zip(NAMES, results, peer, truth, strict=True):
        floor = max(_ROUNDING * torch.finfo(a.dtype).eps * float(t.norm()), least)
        ours_error, peer_error = (float((x.double() - t).norm()) for x in (a, b))
        ratios[name] = max(ours_error, floor) / max(peer_error, floor)
        if not a.isfinite().all():
            ratios[name] = float("inf")
    return ratios


def measure(device: torch.device, count: int, backends: tuple[str, ...] = ()) -> dict[str, Any]:
    """Compute `count` random cases with our fused backends.

    Returns:
        `backends`: for each the worst and median ratio by result, the worst case, and each case;
        `within`: whether no ratio is above 2.
    """
    on_gpu = device.type == "cuda"
    names = backends or (("triton",) if on_gpu else ("blockwise",))
    work = functools.partial(_measure_family, device=device, count=count, names=names)
    families = range(min(count, len(FAMILIES)))
    if on_gpu:  # compiling takes nearly all the time
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(len(FAMILIES), mp_context=spawn) as pool:
            by_family = list(pool.map(work, families))
    else:
        by_family = [work(family) for family in families]
    by_backend = {name: [case for part in by_family for case in part[name]] for name in names}
    worst = {name: {r: _worst(cases, r) for r in NAMES} for name, cases in by_backend.items()}
    return {
        "cases": count,
        "bound": BOUND,
        "worst": worst,
        "median": {
            name: {r: _median(cases, r) for r in NAMES} for name, cases in by_backend.items()
        },
        "within": all(w["ratio"] <= BOUND for by in worst.values() for w in by.values()),
        "backends": by_backend,
    }


def _measure_family(
    family: int, device: torch.device, count: int, names: tuple[str, ...]
) -> dict[str, list[dict[str, Any]]]:
    """Return the cases of one family, by backend."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.set_num_threads(1)  # this process is one of many
    longest = _LONGEST if on_gpu else _LONGEST_ON_CPU
    by_backend: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(family, count, len(FAMILIES)):
        case = draw_case(seed, longest)
        inputs = case_inputs(case, device)
        truth, peer = exact(inputs), sdpa_baseline(inputs)
        for name in names:
            errors = error_ratios(_results(ours(inputs, name)), peer, truth)
            by_backend[name].append({"case": _described(case), "ratios": errors})
    return by_backend


def _described(case: Case) -> str:
    dtype = str(case.dtype).removeprefix("torch.")
    hard = ", hard" if case.hard else ""
    return f"{case.shape.label} window {case.window} {dtype}{hard} (seed {case.seed})"


def _worst(cases: list[dict[str, Any]], result: str) -> dict[str, Any]:
    worst = max(cases, key=lambda case: case["ratios"][result])
    return {"ratio": worst["ratios"][result], "case": worst["case"]}


def _median(cases: list[dict[str, Any]], result: str) -> float:
    return sorted(case["ratios"][result] for case in cases)[len(cases) // 2]


COLUMNS = (
    ("backend", field("backend")),
    ("result", field("result")),
    ("median", field("median", ".2f")),
    ("worst", field("ratio", ".2f")),
    ("worst case", field("case")),
)


def tables(record: dict[str, Any]) -> str:
    """Return a table with a row for each backend and result."""
    rows = [
        {"backend": name, "result": result, "median": record["median"][name][result], **worst}
        for name, results in record["worst"].items()
        for result, worst in results.items()
    ]
    return (
        f"{record['cases']} random cases, errors over those of SDPA with the bias in memory; "
        f"at most {record['bound']:g} is accepted\n\n{table(COLUMNS, rows)}"
    )


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--cases", type=int, default=200, help="random shapes (%(default)s)")


def _measure(_: None, args: Args) -> Iterator[dict[str, Any]]:
    yield measure(args.device, args.cases)


BENCHMARK = Benchmark(
    record="accuracy",
    options=options,
    measure=_measure,
    store=add_fields,
    failed=lambda row: not row["within"],
    tables=tables,
    stored=(
        Table(
            "*/accuracy.json",
            "docs/performance/attention.md",
            ("dms_train/kernels/train_attention",),
        ),
    ),
)
