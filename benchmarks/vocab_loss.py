"""Losses of the output layer: time and memory of our and other implementations.

    python -m benchmarks vocab_loss

Every implementation starts from hidden states and output weights and ends with their gradients.
The record has versions, shapes, medians and the 20 % and 80 % quantiles. Without a GPU all sizes
are small.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.benchmark import Args, Benchmark, or_skipped
from benchmarks.records import Table
from benchmarks.tables import Column, field, spread, table
from benchmarks.timing import ceilings, extra_bytes, measure
from dms_train.kernels import dispatch
from dms_train.kernels.losses import vocabulary as vocab_loss
from dms_train.kernels.losses.vocabulary import Divergence
from dms_train.mcore.layers import vocabulary_losses as vocab_losses
from dms_train.mcore.layers.vocabulary_losses import Projection
from dms_train.method import losses

KL = Divergence("teacher_student")


class Case(NamedTuple):
    """Sizes of one output layer."""

    label: str
    tokens: int
    hidden: int
    vocab: int


CASES = (
    Case("Qwen2.5-1.5B, 8192 tokens", 8192, 1536, 151936),
    Case("Llama-3.2-1B, 4 x 4096 tokens", 16384, 2048, 128256),
)
SMALL = (Case("small", 96, 32, 3000),)


class Inputs(NamedTuple):
    """Inputs of the losses; `d_losses` is the gradient of each token's loss."""

    student: Projection
    teacher: Projection
    labels: Tensor
    d_losses: Tensor
    group: dist.ProcessGroup


# Loss and gradients of the student's hidden states and weights.
_Result = tuple[Tensor, Tensor, Tensor]
_Way = Callable[[Inputs], _Result]


def measure_case(case: tuple[Case, str], args: Args) -> Iterator[dict[str, Any]]:
    """Yield times and errors of all implementations of one loss."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sizes, loss = case
        given = inputs_of(sizes, args.device)
        exact = WAYS[loss][EXACT](given)
        rows = [
            {"name": name, **or_skipped(functools.partial(_row, way, given, exact))}
            for name, way in WAYS[loss].items()
        ]
        yield {"case": sizes._asdict(), "loss": loss, "rows": rows}
    finally:
        dist.destroy_process_group()


def inputs_of(case: Case, device: torch.device) -> Inputs:
    """Draw hidden states and weights with logits of ordinary size; the teacher is near."""
    torch.manual_seed(0)
    dtype = torch.bfloat16

    def normal(*shape: int, scale: float) -> Tensor:
        return (scale * torch.randn(*shape, device=device)).to(dtype)

    weight = normal(case.vocab, case.hidden, scale=2 * case.hidden**-0.5)
    hidden = normal(case.tokens, 1, case.hidden, scale=1.0)
    near = hidden + normal(case.tokens, 1, case.hidden, scale=0.1)
    student = Projection(hidden.requires_grad_(), weight.requires_grad_())
    labels = torch.randint(0, case.vocab, (1, case.tokens), device=device)
    d_losses = torch.rand(case.tokens, 1, device=device) / case.tokens
    group = dist.group.WORLD
    assert group is not None
    return Inputs(student, Projection(near, weight.detach().clone()), labels, d_losses, group)


def _row(way: _Way, given: Inputs, exact: _Result) -> dict[str, Any]:
    device = given.labels.device

    def call() -> _Result:
        return way(given)

    row: dict[str, Any] = {"ms": measure(call, device)._asdict()}
    row["extra_bytes"] = extra_bytes(call, device)
    if way not in (PRODUCTS_OF_KL, PRODUCTS_OF_LM):
        row["errors"] = [_error(x, y) for x, y in zip(call(), exact, strict=True)]
    return row


def _error(computed: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the exact tensor."""
    return ((computed.float() - exact.float()).norm() / exact.float().norm()).item()


def _gradients(given: Inputs, loss: Tensor) -> _Result:
    d_hidden, d_weight = torch.autograd.grad(loss, given.student[:2], given.d_losses)
    return loss.detach(), d_hidden, d_weight


def ours_kl(given: Inputs) -> _Result:
    """Compute `distillation_kl`."""
    vocab = given.student.weight.shape[0]
    args = (given.student, given.teacher, KL, vocab, given.group)
    return _gradients(given, vocab_losses.distillation_kl(*args))


def ours_lm(given: Inputs) -> _Result:
    """Compute `next_token_loss`."""
    vocab = given.student.weight.shape[0]
    args = (given.student, given.labels, vocab, given.group)
    return _gradients(given, vocab_losses.next_token_loss(*args))


def with_torch(way: _Way) -> _Way:
    """Return the same loss without fused kernels."""

    def run(given: Inputs) -> _Result:
        with patch.object(dispatch, "vocabulary_losses", lambda _: vocab_loss):
            return way(given)

    return run


def all_at_once(way: _Way) -> _Way:
    """Return the same loss with all positions in one chunk."""

    def run(given: Inputs) -> _Result:
        with patch.object(vocab_losses, "_CHUNK", dict.fromkeys(("cuda", "cpu"), 2**62)):
            return way(given)

    return run


def plain_kl(given: Inputs) -> _Result:
    """Compute `method.losses` on float32 logits."""
    student = (given.student.hidden @ given.student.weight.t()).float()
    teacher = (given.teacher.hidden.detach() @ given.teacher.weight.t()).float()
    return _gradients(given, losses.kl_teacher_student(student, teacher))


def plain_lm(given: Inputs) -> _Result:
    """Compute the cross-entropy of torch on float32 logits."""
    logits = (given.student.hidden @ given.student.weight.t()).float().flatten(0, 1)
    loss = F.cross_entropy(logits, given.labels.flatten(), reduction="none")
    return _gradients(given, loss.view_as(given.d_losses))


def without_logits(given: Inputs, chunk: int = 2048) -> _Result:
    """Compute KL without keeping logits: chunks add to the weight gradient in float32."""
    hidden, weight = (x.detach().flatten(0, -2) for x in given.student[:2])
    kernels = dispatch.vocabulary_losses(hidden.device)
    d_losses = given.d_losses.flatten()[:, None]
    d_hidden, values = torch.empty_like(hidden), torch.empty_like(given.d_losses).flatten()
    d_weight = torch.zeros_like(weight, dtype=torch.float32)
    width = weight.shape[0]
    for first in range(0, hidden.shape[0], chunk):
        c = slice(first, first + chunk)
        q = hidden[c] @ weight.t()
        p = given.teacher.hidden[c, 0].detach() @ given.teacher.weight.t()
        statistics = kernels.divergence_statistics(p, q, width, 1.0)[None]
        values[c], rows = vocab_loss.merge_divergence(statistics)
        kernels.divergence_gradient_(p, q, width, rows, KL)
        d_hidden[c] = (q @ weight * d_losses[c]).to(hidden.dtype)
        scaled = (hidden[c] * d_losses[c]).to(hidden.dtype)
        if hidden.is_cuda:
            torch.addmm(d_weight, q.t(), scaled, out_dtype=torch.float32, out=d_weight)
        else:
            d_weight += q.t().float() @ scaled.float()
    return values.view_as(given.d_losses), d_hidden.view_as(given.student.hidden), d_weight


def products(teacher: bool) -> _Way:
    """Return the matrix products that every implementation needs; the result is not a loss."""

    def run(given: Inputs) -> _Result:
        hidden, weight = (x.detach().flatten(0, -2) for x in given.student[:2])
        logits = hidden @ weight.t()
        if teacher:
            given.teacher.hidden.flatten(0, 1) @ given.teacher.weight.t()
        return logits[0], logits @ weight, logits.t() @ hidden

    return run


PRODUCTS, EXACT = "matrix products alone", "torch, float32 logits"
PRODUCTS_OF_KL, PRODUCTS_OF_LM = products(teacher=True), products(teacher=False)
WAYS: dict[str, dict[str, _Way]] = {
    "KL": {
        PRODUCTS: PRODUCTS_OF_KL,
        EXACT: plain_kl,
        "ours": ours_kl,
        "ours, torch operations": with_torch(ours_kl),
        "ours, one chunk": all_at_once(ours_kl),
        "no logits kept": without_logits,
    },
    "LM": {
        PRODUCTS: PRODUCTS_OF_LM,
        EXACT: plain_lm,
        "ours": ours_lm,
        "ours, torch operations": with_torch(ours_lm),
    },
}


def tables(record: dict[str, Any]) -> str:
    """Return a table for each output layer and loss."""
    return "\n\n".join(map(_table, record["cases"]))


def _table(entry: dict[str, Any]) -> str:
    case, least = entry["case"], entry["rows"][0]["ms"]["median"]
    columns: list[Column] = [
        ("", field("name")),
        ("ms", lambda row: spread(row["ms"], 2)),
        ("over products", lambda row: f"{row['ms']['median'] - least:+.2f}"),
        ("extra GB", field("extra_bytes", ".2f", 1e-9)),
        (
            "error of loss, d hidden, d weight",
            lambda row: ", ".join(f"{error:.1e}" for error in row.get("errors", [])),
        ),
    ]
    title = f"### {entry['loss']}: {case['label']}, {case['hidden']} x {case['vocab']}"
    return f"{title}\n\n{table(columns, entry['rows'])}"


BENCHMARK = Benchmark(
    record="vocab_loss",
    cases=lambda args: [
        (case, loss) for case in (CASES if args.device.type == "cuda" else SMALL) for loss in WAYS
    ],
    measure=measure_case,
    settings=lambda args: {"ceilings": ceilings(args.device)},
    tables=tables,
    stored=(
        Table("*/vocab_loss.json", "docs/concepts/distillation.md", ("dms_train/kernels/losses",)),
    ),
)
