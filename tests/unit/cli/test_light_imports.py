from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dms_train.cli import light_imports
from tests.support import launch

COMMANDS = {
    "dms-train": "errors.run_main(lambda: __import__('dms_train.app.session') and None)",
    "dms-data": "prepare.main(['show', 'nothing', '--tokenizer', 'none'])\n"
    "import dms_train.data.tokens",
}
CODE = """
import sys
from dms_train.cli import errors
from dms_train.data_prep import prepare
{command}
assert "megatron.core" in sys.modules
print(*sorted({{"torch._dynamo", "torch._inductor", "wandb", "tensorboard"}} & set(sys.modules)))
import wandb, megatron.core.jit, torch
assert wandb.__version__
assert torch.compile.__module__ == "torch"
"""
STEPS = """
import sys
from dms_train.cli.light_imports import skip_unused_imports
skip_unused_imports()
import torch

def run(**options):
    weight = torch.nn.Parameter(torch.arange(3.0))
    optimizer = torch.optim.AdamW([weight], lr=0.1, **options)
    for _ in range(2):
        weight.grad = 2 * weight.detach()
        optimizer.step(lambda: asked.append(torch.is_grad_enabled()))
    return weight

asked = []
before = run(), run(foreach=True), list(asked)
print(*sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
import torch._dynamo
asked.clear()
after = run(), run(foreach=True), list(asked)
assert all(torch.equal(*pair) for pair in zip(before[:2], after[:2])), (before, after)
assert before[2] == after[2], (before, after)
"""
ENGINE = """
import sys
import torch
from dms_train.hf.directory import read_architecture
from dms_train.inference.models.decoder import Decoder
from dms_train.method.spec import PRESETS
with torch.device("meta"):
    decoder = Decoder(read_architecture("dms_train/assets/exam_teacher"), PRESETS["dms"])
assert all(parameter.requires_grad for parameter in decoder.parameters())
print(*sorted({"torch._dynamo", "sympy", "transformers"} & set(sys.modules)))
"""
DATA = """
import sys
from dms_train.data_prep import prepare
assert prepare.main(["exam-sheets", "--out", sys.argv[1], "--sheets", "150",
                     "--document-tokens", "192"]) == 0
print("loaded:", *sorted({"torch", "megatron.core", "hydra"} & set(sys.modules)))
"""


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_loads_neither_compilers_nor_wandb_with_megatron(command: str) -> None:
    assert launch.checked(launch.python("-c", CODE.format(command=command))).strip() == ""


def test_optimizers_load_no_compiler_and_update_as_with_it() -> None:
    assert launch.checked(launch.python("-c", STEPS)).strip() == ""


def test_the_engine_builds_a_model_without_compilers() -> None:
    assert launch.checked(launch.python("-c", ENGINE)).strip() == ""


def test_data_is_written_without_torch(tmp_path: Path) -> None:
    command = launch.python("-c", DATA, str(tmp_path))
    assert launch.checked(command).splitlines()[-1].strip() == "loaded:"


def test_a_decorated_function_is_compiled_by_its_first_call() -> None:
    graphs = []

    def record(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = light_imports._compiled_by_first_call(
        lambda function: torch.compile(function, backend=record, fullgraph=True)
    )

    @compiled
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @compiled
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        return doubled(x) + 1

    x = torch.arange(3.0)
    assert not graphs
    for _ in range(2):
        assert plus_one(x).tolist() == [1.0, 3.0, 5.0]
    assert len(graphs) == 1  # of both functions
    assert doubled(x).tolist() == [0.0, 2.0, 4.0]
    assert len(graphs) == 2
    assert doubled.__name__ == "doubled"
