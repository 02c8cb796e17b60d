from __future__ import annotations

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
print(*sorted({{"torch._dynamo", "torch._inductor", "wandb"}} & set(sys.modules)))
import wandb, megatron.core.jit, torch
assert wandb.__version__
assert torch.compile.__module__ == "torch"
"""


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_loads_neither_compilers_nor_wandb_with_megatron(command: str) -> None:
    assert launch.checked(launch.python("-c", CODE.format(command=command))).strip() == ""


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
