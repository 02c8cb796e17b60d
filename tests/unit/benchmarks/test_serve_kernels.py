"""The table of a decode step's kernels: times add up, and bytes are those of the weights."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.serve import kernels
from benchmarks.serve.case import Case
from benchmarks.serve.kernels import Kernel
from benchmarks.serve.models import architecture, random_model
from dms_train.inference.engine import InferenceEngine
from dms_train.inference.errors import InferenceError
from dms_train.inference.models.decoder import Decoder
from dms_train.inference.options import EngineOptions

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


def test_the_table_has_a_row_for_each_part_and_for_all(tmp_path, capsys) -> None:
    parts = {
        "attention": {"kernels": 2, "us": 10.0, "bytes": 4e6},
        "sampling": {"kernels": 1, "us": 5.0, "bytes": 0.0},
    }
    stored = tmp_path / "kernels.json"
    stored.write_text(json.dumps({"parts": parts, "copy_bytes_s": 4e12}))
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "kernels", "--table", str(stored)])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| attention | 2 | 10.0 | 1.0 | 10.00 |",
        "| sampling | 1 | 5.0 | - | - |",
        "| all | 3 | 15.0 | 1.0 | 15.00 |",
    ]


@pytest.mark.parametrize("longest", [60, 42])
def test_all_sequences_decode_or_are_too_long_to_do_so_together(longest: int) -> None:
    model = random_model("small", 1.0, torch.device("cpu"), torch.float32)
    options = EngineOptions(
        max_num_seqs=3, max_model_len=longest, prefill_chunk=16, max_num_batched_tokens=16
    )
    engine, case = InferenceEngine(model, options), Case(3, 40)
    if longest == 42:
        with pytest.raises(InferenceError, match="--sequences 3 --context 40"):
            kernels._fill(engine, case)
        return
    assert 40 < kernels._fill(engine, case) < longest
    assert engine.decoding == 3


@pytest.mark.parametrize("words", [["--sequences", "0"], ["--context", "33000"]])
def test_sizes_that_do_not_fit_are_refused(words, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "kernels", *words])
    assert ended.value.code == 2
    assert " ".join(words) in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_so_in_one_line(tmp_path, capsys) -> None:
    assert main(["serve", "kernels", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
