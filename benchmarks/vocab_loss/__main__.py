"""Losses behind the output layer: time and memory of ours and of other implementations.

    python -m benchmarks.vocab_loss [--output benchmarks/results]

Every implementation starts from hidden states and output weights and ends with their gradients.
Prints tables and writes `vocab_loss.json` into the folder of the device, with versions, shapes,
medians and the 20 % and 80 % quantiles. Without a GPU all sizes are small.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.records import RESULTS, origin
from benchmarks.timing import ceilings, device_name, extra_bytes, measure, versions
from dms_train.cli.errors import run_main
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
    """Everything the losses read; `d_losses` is the gradient of each token's loss."""

    student: Projection
    teacher: Projection
    labels: Tensor
    d_losses: Tensor
    group: dist.ProcessGroup


# Loss and gradients of the student's hidden states and weights.
_Result = tuple[Tensor, Tensor, Tensor]
_Way = Callable[[Inputs], _Result]


def main(arguments: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return run_main(lambda: _run(device, args.output))


def _run(device: torch.device, output: Path) -> int:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return _compare(device, output)
    finally:
        dist.destroy_process_group()


def _compare(device: torch.device, output: Path) -> int:
    record: dict[str, Any] = {
        "device": device_name(device),
        "versions": versions(device),
        "command": "python -m benchmarks.vocab_loss",
        **origin(),
        "ceilings": ceilings(device),
        "cases": [],
    }
    print(f"{record['device']}, {record['versions']}")
    folder = output / re.sub(r"\W+", "_", record["device"].lower())
    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES if device.type == "cuda" else SMALL:
        for loss, ways in WAYS.items():
            entry = _measure(case, loss, ways, device)
            record["cases"].append(entry)
            print("\n" + table(entry))
            (folder / "vocab_loss.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nwritten: {folder / 'vocab_loss.json'}")
    return 0


def inputs_of(case: Case, device: torch.device) -> Inputs:
    """Random hidden states and weights with logits of ordinary size; the teacher is near."""
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


def _measure(case: Case, loss: str, ways: dict[str, _Way], device: torch.device) -> dict[str, Any]:
    given = inputs_of(case, device)
    exact = ways["torch, float32 logits"](given)
    rows = []
    for name, way in ways.items():

        def call(way: _Way = way) -> _Result:
            return way(given)

        row: dict[str, Any] = {"name": name, "ms": measure(call, device)._asdict()}
        row["extra_bytes"] = extra_bytes(call, device)
        found = call()
        if name != PRODUCTS:
            row["errors"] = [_error(x, y) for x, y in zip(found, exact, strict=True)]
        rows.append(row)
    return {"case": case._asdict(), "loss": loss, "rows": rows}


def _error(found: Tensor, exact: Tensor) -> float:
    """Relative to the whole tensor's size."""
    return ((found.float() - exact.float()).norm() / exact.float().norm()).item()


def _gradients(given: Inputs, loss: Tensor) -> _Result:
    d_hidden, d_weight = torch.autograd.grad(loss, given.student[:2], given.d_losses)
    return loss.detach(), d_hidden, d_weight


def ours_kl(given: Inputs) -> _Result:
    """`distillation_kl`."""
    vocab = given.student.weight.shape[0]
    args = (given.student, given.teacher, KL, vocab, given.group)
    return _gradients(given, vocab_losses.distillation_kl(*args))


def ours_lm(given: Inputs) -> _Result:
    """`next_token_loss`."""
    vocab = given.student.weight.shape[0]
    args = (given.student, given.labels, vocab, given.group)
    return _gradients(given, vocab_losses.next_token_loss(*args))


@contextmanager
def _replaced(name: str, value: Any, owner: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def with_torch(way: _Way) -> _Way:
    """The same without fused kernels."""

    def run(given: Inputs) -> _Result:
        with _replaced("backend", lambda _: vocab_loss, vocab_loss):
            return way(given)

    return run


def all_at_once(way: _Way) -> _Way:
    """The same with all positions in one chunk."""

    def run(given: Inputs) -> _Result:
        with _replaced("_CHUNK", dict.fromkeys(("cuda", "cpu"), 2**62), vocab_losses):
            return way(given)

    return run


def plain_kl(given: Inputs) -> _Result:
    """`method.losses` on float32 logits."""
    student = (given.student.hidden @ given.student.weight.t()).float()
    teacher = (given.teacher.hidden.detach() @ given.teacher.weight.t()).float()
    return _gradients(given, losses.kl_teacher_student(student, teacher))


def plain_lm(given: Inputs) -> _Result:
    """torch's cross-entropy on float32 logits."""
    logits = (given.student.hidden @ given.student.weight.t()).float().flatten(0, 1)
    loss = F.cross_entropy(logits, given.labels.flatten(), reduction="none")
    return _gradients(given, loss.view_as(given.d_losses))


def without_logits(given: Inputs, chunk: int = 2048) -> _Result:
    """KL whose weight gradient is added up chunk by chunk in float32: no logits are kept at all."""
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
    """The matrix products that every implementation needs; its result is not a loss."""

    def run(given: Inputs) -> _Result:
        hidden, weight = (x.detach().flatten(0, -2) for x in given.student[:2])
        logits = hidden @ weight.t()
        if teacher:
            given.teacher.hidden.flatten(0, 1) @ given.teacher.weight.t()
        return logits[0], logits @ weight, logits.t() @ hidden

    return run


PRODUCTS = "matrix products alone"
WAYS: dict[str, dict[str, _Way]] = {
    "KL": {
        PRODUCTS: products(teacher=True),
        "torch, float32 logits": plain_kl,
        "ours": ours_kl,
        "ours, torch operations": with_torch(ours_kl),
        "ours, one chunk": all_at_once(ours_kl),
        "no logits kept": without_logits,
    },
    "LM": {
        PRODUCTS: products(teacher=False),
        "torch, float32 logits": plain_lm,
        "ours": ours_lm,
        "ours, torch operations": with_torch(ours_lm),
    },
}


def table(entry: dict[str, Any]) -> str:
    """One case and loss as Markdown; `over products` is the time added to the matrix products."""
    case = entry["case"]
    floor = entry["rows"][0]["ms"]["median"]
    lines = [
        f"### {entry['loss']}: {case['label']}, {case['hidden']} x {case['vocab']}",
        "",
        "| | ms | over products | extra GB | error of loss, d hidden, d weight |",
        "|---|---|---|---|---|",
    ]
    for row in entry["rows"]:
        ms, extra = row["ms"], row["extra_bytes"]
        memory = "" if extra is None else f"{extra / 1e9:.2f}"
        errors = ", ".join(f"{error:.1e}" for error in row.get("errors", []))
        lines.append(
            f"| {row['name']} | {ms['median']:.2f} [{ms['low']:.2f}, {ms['high']:.2f}] "
            f"| {ms['median'] - floor:+.2f} | {memory} | {errors} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
