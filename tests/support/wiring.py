"""A run from a configuration, built as a session builds it, to read options where they act."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from dms_train.app.components import trainer_components
from dms_train.app.engine import build_engine
from dms_train.app.preparation import Prepared, prepare
from dms_train.app.samples import batch_source, datasets
from dms_train.app.watch import RunWatch
from dms_train.config.build import build, valid_paths
from dms_train.config.resolve import resolved
from dms_train.config.schema import RunConfig
from dms_train.data.batches import Batch
from dms_train.data.tokens import TokenSamples
from dms_train.data_prep.prepare import main as prepare_data
from dms_train.mcore.engine import McoreEngine
from dms_train.mcore.groups import ParallelView
from dms_train.training import loop
from dms_train.training.loop import TrainerComponents
from tests.support import configs, launch, refusals
from tests.support.training_loop import FakeParts

SEQUENCE, GLOBAL_BATCH = 32, 4
SAME = object()


class Wire(NamedTuple):
    """How to see that an option acts.

    Attributes:
        value: What the configuration says; not the default.
        read: Finds it where it acts.
        expected: What `read` returns then, or a function of what was built; SAME for the value.
        others: Options that the value needs, by dotted key.
    """

    value: Any
    read: Callable[[Any], Any]
    expected: Any = SAME
    others: Mapping[str, Any] = MappingProxyType({})

    def given(self, assets: Any, key: str | None = None) -> dict[str, Any]:
        """Changes of the configuration without the option, or with it."""
        changes = {**self.others} if key is None else {**self.others, key: self.value}
        return copy.deepcopy({k: v(assets) if callable(v) else v for k, v in changes.items()})

    def expectation(self, built: Any) -> Any:
        if self.expected is SAME:
            return self.value(built.assets) if callable(self.value) else self.value
        return self.expected(built) if callable(self.expected) else self.expected


class Assets(NamedTuple):
    """Two models of the same tokenizer, and two prefixes of documents."""

    model: Path
    other: Path
    data: str
    more: str


def make_assets(folder: Path) -> Assets:
    for name, seed in (("data", "1"), ("more", "2")):
        words = ["exam-sheets", "--out", str(folder / name), "--sheets", "60", "--seed", seed]
        assert prepare_data(words) == 0
    for index, name in enumerate(("model", "other")):
        refusals.write_model(folder / name, folder / "data" / "tokenizer", seed=index)
    data, more = (str(folder / name / "train") for name in ("data", "more"))
    return Assets(folder / "model", folder / "other", data, more)


class Built:
    """Everything of one process that a run consists of; each part is made when it is read."""

    def __init__(self, assets: Assets, folder: Path, view: ParallelView, **changes: Any) -> None:
        self.assets, self.folder, self.view = assets, folder, view
        base = {
            "model__path": str(assets.model),
            "data__paths": [assets.data],
            "data__seq_length": SEQUENCE,
            "data__global_batch_size": GLOBAL_BATCH,
            "data__cache_dir": str(folder / "cache"),
            "method__window": 4,
            "run__dir": str(folder / "run"),
            "run__eval_samples": 2,
            "run__save_interval": 0,
            "observe__wandb": "disabled",
            "observe__progress": False,
            "stage__run": ["zero_neuron", "retrofit", "hold", "export"],
            "stage__zero_neuron__steps": 2,
            "stage__retrofit__target_cr": 3,
            "stage__retrofit__steps_per_cr": 2,
            "stage__hold__steps": 2,
        }
        self.config: RunConfig = resolved(build(configs.mapping(**{**base, **changes})))

    @cached_property
    def prepared(self) -> Prepared:
        return prepare(self.config)

    @cached_property
    def engine(self) -> McoreEngine:
        return build_engine(self.prepared, self.view)

    @cached_property
    def components(self) -> TrainerComponents:
        watch = cast(RunWatch, FakeParts())
        return trainer_components(self.prepared, self.view, self.engine, watch, {})

    @cached_property
    def samples(self) -> tuple[TokenSamples | None, TokenSamples | None]:
        return datasets(self.prepared, self.view)

    @cached_property
    def batches(self) -> list[Batch]:
        """The microbatches of the first step."""
        return batch_source(self.config, self.view, self.samples[0]).microbatches(0)

    @cached_property
    def recorded(self) -> FakeParts:
        """Record the calls that the stages of a run make to engine, exporter and watch."""
        fakes = FakeParts()
        own = dict.fromkeys(("engine", "source", "exporter", "validator", "watch"), fakes)
        saver = replace(self.components.saver, engine=fakes)
        state = replace(self.prepared.start.state)
        loop.run(self.prepared.stages, state, replace(self.components, **own, saver=saver))
        return fakes

    def close(self) -> None:
        if "components" in self.__dict__:
            self.components.reporter.close()


def leaves(cls: type, path: str = "") -> Iterable[str]:
    """Dotted key of every option below a dataclass, blocks not counted."""
    keys = list(valid_paths(cls, path))
    return [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]


def option(name: str) -> str:
    """The key of an entry; one key may have several, told apart after a blank."""
    return name.partition(" ")[0]


def uncovered(
    options: Iterable[str], wires: Collection[str], elsewhere: dict[str, str]
) -> list[str]:
    """Options that no test reads back, and entries without an option."""
    known, covered = set(options), {option(name) for name in (*wires, *elsewhere)}
    return [f"no test: {key}" for key in sorted(known - covered)] + [
        f"no option: {key}" for key in sorted(covered - known)
    ]


def missing_tests(elsewhere: dict[str, str]) -> list[str]:
    """Tests that are named for an option but do not exist or do not mention it."""
    wrong = []
    for key, test in elsewhere.items():
        file, _, name = test.partition("::")
        path = launch.ROOT / "tests" / file
        text = path.read_text() if path.is_file() else ""
        if f"def {name}(" not in text or option(key).rpartition(".")[2] not in text:
            wrong.append(f"{key}: {test}")
    return wrong
