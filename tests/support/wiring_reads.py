"""Options of a run where they act: each function reads one of them back from what was built."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dms_train.app import session
from dms_train.app.start_point import find_start
from dms_train.hf.rope import RopeScaling
from dms_train.hf.weight_reader import WeightReader
from dms_train.mcore import compat
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.layers.adapters import channel_adapters
from dms_train.mcore.model.configuration import transformer_config
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.observe.state_files import StateFiles
from dms_train.training.state import TrainState
from tests.support import refusals, yarn
from tests.support.wiring import Assets, Built

SOFT = StepPlan(step=3, channel_scale=0.0, eviction="soft", target_cr=4.0, loss="lm")
EMBEDDING = "model.embed_tokens.weight"


def stages(built: Built) -> dict[str, tuple[LearningRate, list[StepPlan]]]:
    """Return the learning rate of each stage and the plan of every step, as the engine got them."""
    found: list[tuple[LearningRate, list[StepPlan]]] = []
    for kind, *given in built.recorded.events:
        if kind == "begin":
            found.append((given[0], []))
        elif kind == "train":
            found[-1][1].append(given[0])
    names = [name for name in built.config.stage.run if name not in ("export", "run_tasks")]
    return dict(zip(names, found, strict=True))


def plans(stage: str) -> Callable[[Built], list[StepPlan]]:
    return lambda built: stages(built)[stage][1]


def losses(stage: str) -> Callable[[Built], set[str]]:
    return lambda built: {plan.loss for plan in plans(stage)(built)}


def rate(stage: str) -> Callable[[Built], LearningRate]:
    return lambda built: stages(built)[stage][0]


def max_lr(stage: str) -> Callable[[Built], float]:
    return lambda built: rate(stage)(built).max_lr


def weights(built: Built) -> dict[str, Tensor]:
    return dict(built.engine.hf_tensors())


def embedding(built: Built) -> float:
    return float(weights(built)[EMBEDDING].sum())


def other_embedding(built: Built) -> float:
    return float(load_file(built.assets.other / "model.safetensors")[EMBEDDING].sum())


def rows(name: str, axis: int = 0) -> Callable[[Built], int]:
    return lambda built: weights(built)[f"model.{name}"].shape[axis]


def spec(name: str) -> Callable[[Built], Any]:
    """A constant of the layer that decides in every attention."""
    return lambda built: getattr(built.engine._method.layer.spec, name)


def training(name: str) -> Callable[[Built], Any]:
    """A constant of training, which every layer and the loss are given."""
    return lambda built: getattr(built.engine._method.options, name)


def loss(name: str) -> Callable[[Built], Any]:
    """A parameter of the token losses, which the last pipeline stage is given."""
    return lambda built: getattr(built.engine._method.loss_options, name)


def megatron(name: str) -> Callable[[Built], Any]:
    """Return an option of megatron's configuration, which its layers and schedules read."""

    def read(built: Built) -> Any:
        a = built.config.model.architecture or refusals.architecture()
        return getattr(transformer_config(a, built.config.parallel), name)

    return read


def trained(built: Built) -> set[str]:
    """Names of the modules with a weight that trains."""
    parameters = built.engine._models[0].named_parameters()
    return {name.split(".")[-2] for name, weight in parameters if weight.requires_grad}


def lora_up(built: Built) -> dict[str, tuple[int, ...]]:
    """Shape of the second matrix of each target's adapter in the first layer."""
    attention = built.engine._models[0].decoder.layers[0].self_attention
    return {
        name.split("_")[-2]: tuple(weight.shape)
        for name, weight in attention.named_parameters()
        if name.endswith("_up")
    }


def lora_scale(built: Built) -> float:
    """Factor on the product of the matrices of an adapter."""
    projection = next(channel_adapters(built.engine._models))
    with torch.no_grad():
        projection.lora_q_down.fill_(1.0)
        projection.lora_q_up.fill_(1.0)
    rank = len(projection.lora_q_down)
    before, after = projection.weight, projection.merged_tensors()["weight"]
    return round(float((after - before)[1, 0]) / rank, 4)


def mlp(built: Built) -> Any:
    return built.engine._models[0].decoder.layers[0].mlp


def frequencies(built: Built) -> Tensor:
    return built.engine._models[0].rotary_pos_emb.inv_freq


def slowest(built: Built) -> float:
    """Positions in which the slowest pair of channels turns by one radian."""
    return 1 / float(frequencies(built)[-1])


def slowest_of_yarn(rule: RopeScaling) -> float:
    """`slowest` of a head of 8 channels and base 10000."""
    return 1 / yarn.frequencies(rule, 10000.0, 4)[-1]


def llama3_frequency(plain: float, factor: float) -> float:
    """The rule of Llama 3.1 for a wavelength between 8192 / 4 and 8192."""
    smooth = (8192 * plain / (2 * math.pi) - 1.0) / (4.0 - 1.0)
    assert 0 < smooth < 1
    return (1 - smooth) * plain / factor + smooth * plain


def adam(name: str) -> Callable[[Built], Any]:
    def read(built: Built) -> Any:
        built.engine.begin_stage(rate("hold")(built))
        (part,) = compat.optimizer_parts(built.engine._optimizer)
        groups = part.optimizer.param_groups
        return max(group[name] for group in groups)

    return read


def exported(built: Built) -> Path:
    state = TrainState(eviction_enabled=True, target_cr=3.0)
    return built.components.exporter.export("final", state.to_dict()) / "hf"


def export_state(name: str) -> Callable[[Built], Any]:
    return lambda built: json.loads((exported(built) / "config.json").read_text())[name]


def tokens(built: Built) -> list[int]:
    return built.batches[0].tokens[0].tolist()


def second_corpus(built: Built) -> list[int]:
    """The text where the first sample begins, in the other token file."""
    row = built.samples[0]._dataset
    return row[0]["tokens"].tolist() if row.dataset_path == built.assets.more else []


def documents(built: Built) -> int:
    """Distinct documents of which the first training samples are made."""
    return len(built.samples[0]._dataset.indices)


def noise(built: Built) -> float:
    """Mean relaxed decision of a step; with other noise it is another number."""
    return built.engine.forward_backward(SOFT, built.batches).alpha


def expected_noise(built: Built) -> float:
    """The same of an engine that is given the seed, and weights of its own reading."""
    own = TrainEngineOptions(
        parallel=built.config.parallel, optim=built.config.optim, seed=built.config.run.seed
    )
    engine = McoreEngine(
        refusals.architecture(),
        built.config.method,
        built.view,
        own,
        WeightReader(built.assets.model),
    )
    return engine.forward_backward(SOFT, built.batches).alpha


def saves(built: Built) -> list[str]:
    return [name for name, _ in built.recorded.of("save")]


def kept(built: Built) -> int:
    """Checkpoints that are left of those that are not kept for ever."""
    folder = built.folder / "run" / "checkpoints"
    built.recorded  # noqa: B018 - runs the stages
    built.components.saver._removals.wait(60)
    found = [json.loads(f.read_text()) for f in folder.glob("step_????????/run_state.json")]
    return sum(not state["permanent"] for state in found)


def loaded(assets: Assets) -> str:
    return str(assets.other)


def graph_refusal(built: Built) -> str:
    """The engine makes a graph, or says that this needs a GPU."""
    try:
        return "graph" if built.engine._graph is not None else "no graph"
    except ValueError as error:
        return str(error).partition(":")[0]


def layers(built: Built) -> str:
    try:
        return built.engine.describe_layers().partition(" ")[0]
    except ValueError as error:
        return str(error).partition(":")[0]


def rope_refusal(built: Built) -> str:
    with pytest.raises(ValueError, match="RoPE") as refused:
        built.prepared  # noqa: B018 - checks it
    return str(refused.value).partition(" = ")[2].partition(";")[0]


def found_model(built: Built) -> str:
    """Folder name of a model of the hub's cache, or where it was looked for."""
    try:
        directory = find_start(built.config).model_dir
    except FileNotFoundError as error:
        return str(error).partition("nor in ")[2].partition(" (")[0]
    assert directory is not None
    return directory.name


def exported_dense(built: Built) -> Path:
    return built.components.exporter.export("final", TrainState().to_dict()) / "hf"


def exported_positions(b: Built) -> int:
    return json.loads((exported_dense(b) / "config.json").read_text())["max_position_embeddings"]


def blend(built: Built) -> list[float]:
    return [float(weight) for weight in built.samples[0]._dataset.weights]


def patience(built: Built) -> float:
    """Seconds without a heartbeat after which a rank counts as stalled."""
    watched = session._heartbeats(built.config, built.view, StateFiles(built.folder))
    return watched.patience


def sinks(built: Built) -> list[str]:
    return [type(sink).__name__ for sink in built.components.reporter.sinks]
