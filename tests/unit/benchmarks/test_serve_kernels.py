"""The table of a decode step's kernels: times add up, and bytes are those of the weights."""

from __future__ import annotations

import pytest
import torch

from benchmarks.serve import kernels
from benchmarks.serve.kernels import Kernel
from benchmarks.serve.models import architecture
from dms_train.inference.errors import InferenceError
from dms_train.inference.models.decoder import Decoder

LAYER = ("_linear_kernel", "_append_kernel", "_decode_kernel", *["_linear_kernel"] * 3)
STEP = ("_embed_kernel", *LAYER * 2, "_linear_kernel", "_sample_kernel", "_report_kernel")


def ran(names: tuple[str, ...], begin: float) -> list[Kernel]:
    """Kernels that end 1, 2, 3, ... microseconds behind each other, each begun early."""
    found, end = [], begin
    for number, name in enumerate(names, 1):
        end += number
        found.append(Kernel(name, begin if number == 1 else end - number - 2.0, end))
    return found


def test_the_times_of_parts_add_up_to_the_step() -> None:
    parts = kernels.by_part(ran(STEP, 100.0))
    assert parts == {
        "embedding": 1,
        "queries, keys, values": 2 + 8,
        "append": 3 + 9,
        "attention": 4 + 10,
        "output projection": 5 + 11,
        "gate and up": 6 + 12,
        "down": 7 + 13,
        "logits": 14,
        "sampling": 15,
        "report to the host": 16,
    }


def test_only_whole_steps_count() -> None:
    whole = ran(STEP, 1000.0)
    between = ran(("_sample_kernel", "_merge_kernel"), 4000.0)
    others = [*ran(STEP[5:], 0.0), *between, *ran(STEP[:4], 5000.0)]
    found = kernels.steps_of([*reversed(whole), *others])
    assert found == [whole]


def test_a_kernel_of_something_else_is_refused() -> None:
    with pytest.raises(InferenceError, match="_merge_kernel"):
        kernels.by_part(ran(("_embed_kernel", "_merge_kernel"), 0.0))


@pytest.mark.parametrize("shape", ["small", "lab"])
def test_the_bytes_are_those_of_the_weights_and_of_live_tokens(shape: str) -> None:
    a = architecture(shape)
    with torch.device("meta"):
        decoder = Decoder(a, None)
    layers = sum(w.numel() for layer in decoder.layers for w in layer.parameters() if w.dim() == 2)
    found = kernels.bytes_of(a, live=100, sequences=3)
    held = found.pop("attention")
    assert held == 3 * 100 * a.num_layers * a.num_query_groups * a.kv_channels * 2 * 2
    assert sum(found.values()) == 2 * (layers + decoder.lm_head.weight.numel())


def test_the_table_has_a_row_for_each_part_and_for_all() -> None:
    parts = {
        "attention": {"kernels": 2, "us": 10.0, "bytes": 4e6},
        "sampling": {"kernels": 1, "us": 5.0, "bytes": 0.0},
    }
    rows = kernels.table({"parts": parts, "copy_bytes_s": 4e12}).splitlines()[2:]
    assert rows == [
        "| attention | 2 | 10.0 | 1.0 | 10.00 |",
        "| sampling | 1 | 5.0 | - | - |",
        "| all | 3 | 15.0 | 1.0 | 15.00 |",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_so_in_one_line(tmp_path, capsys) -> None:
    assert kernels.main(["--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
