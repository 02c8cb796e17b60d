"""The experiments on known models: every layout fits, and the documentation lists them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from dms_train.cli.config_source import compose
from dms_train.config.schema import RunConfig
from dms_train.planning.check import check
from dms_train.planning.gpus import GPUS
from dms_train.planning.layouts import memory_problems
from dms_train.planning.memory import estimate
from tests.support import configs

DOCS = Path(__file__).resolve().parents[3] / "docs" / "reference" / "experiments.md"
NAMES = configs.model_experiments()
RUNS = [(name, *layout) for name in NAMES for layout in configs.layouts(name)]
# An 80 GB GPU, with a quarter of it left for activations and buffers.
FIXED_GIB = 56


@functools.cache
def composed(name: str, *overrides: str) -> RunConfig:
    return compose([f"experiment={name}", "model.path=x", "data.paths=[y]", *overrides])


def fixed_gib(config: RunConfig, name: str, gpus: int) -> float:
    return estimate(config, configs.KNOWN[name], gpus).fixed / 2**30


@pytest.mark.parametrize(("name", "gpus", "layout"), RUNS)
def test_a_stated_layout_divides_the_model_and_fits(name, gpus, layout):
    config = composed(name, f"parallel={layout}")
    check(config, world_size=gpus, architecture=configs.KNOWN[name])
    assert config.parallel.params_dtype == "bf16"
    assert fixed_gib(config, name, gpus) < FIXED_GIB
    assert memory_problems(config, configs.KNOWN[name], gpus, GPUS["h100"]) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_first_layout_is_the_one_without_an_override(name):
    assert composed(name) == composed(name, f"parallel={configs.layouts(name)[0][1]}")


@pytest.mark.parametrize("name", NAMES)
def test_recipe_of_the_paper(name):
    config = composed(name)
    assert config.stage.run == ("zero_neuron", "retrofit", "export")
    assert (config.stage.zero_neuron.steps, config.stage.retrofit.steps_per_cr) == (2000, 100)
    assert config.stage.export.every_integer_cr
    large = "32b" in name
    assert config.data.global_batch_size == (256 if large else 1024)
    assert config.data.seq_length == (4096 if name in ("llama32_1b", "llama2_7b") else 8192)
    assert config.method.window == (16 if name in ("llama32_1b", "llama2_7b") else 256)
    optim = config.optim
    assert (optim.adam_beta1, optim.adam_beta2, optim.adam_eps) == (0.9, 0.95, 1e-5)
    assert (optim.weight_decay, optim.clip_grad, optim.lr_warmup_steps) == (0.1, 1.0, 0)
    assert optim.lr == (1.5e-5 if large else 3e-5)


@pytest.mark.parametrize("name", NAMES)
def test_another_ratio_is_one_override_and_another_folder(name):
    config = composed(name, "stage.retrofit.target_cr=3")
    assert composed(name).stage.retrofit.target_cr != 3
    assert config.stage.retrofit.target_cr == 3
    assert config.run.dir == f"outputs/{name}/cr3"


def row(name: str) -> str:
    config = composed(name)
    layouts = []
    for gpus, layout in sorted(configs.layouts(name)):
        used = composed(name, f"parallel={layout}")
        layouts.append(f"{gpus}: `{layout}` ({fixed_gib(used, name, gpus):.0f} GiB)")
    cells = [
        f"`{name}`",
        f"{config.stage.retrofit.target_cr:g}",
        f"{config.method.window}",
        f"{config.data.seq_length:,}",
        f"{config.data.global_batch_size:,}",
        f"{config.optim.lr:.1e}",
        config.stage.retrofit.loss,
        ", ".join(layouts),
    ]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", NAMES)
def test_the_docs_have_the_row(name):
    assert row(name) in DOCS.read_text().splitlines()


@pytest.mark.parametrize("name", ["smollm2_135m", "qwen25_coder_0_5b"])
def test_the_docs_have_the_settings_of_small_models(name):
    """Window, context, batch and learning rate; one of the files builds on the other."""
    config = composed(name)
    (line,) = (x for x in DOCS.read_text().splitlines() if x.startswith(f"| `{name}` |"))
    window, context, batch, rate = (cell.strip() for cell in line.split("|")[4:8])
    assert int(window) == config.method.window
    assert int(context.replace(",", "")) == config.data.seq_length
    assert int(batch) == config.data.global_batch_size
    assert float(rate.partition(",")[0]) == config.optim.lr
