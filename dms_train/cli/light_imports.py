"""megatron-core without what it imports and no command uses: half of the time of a start.

`megatron.core` decorates functions with `torch.compile`, which imports Dynamo and Inductor, and
looks for wandb, which `observe` imports when a run is tracked.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_MEGATRON = "megatron.core"


def import_megatron_lightly() -> None:
    """Let the first import of megatron-core in this process be a light one.

    Its functions are compiled by their first call, and it does not find wandb; others do.
    """
    known = any(isinstance(finder, _LightMegatron) for finder in sys.meta_path)
    if not known and _MEGATRON not in sys.modules:
        sys.meta_path.insert(0, _LightMegatron())


class _LightMegatron(MetaPathFinder):
    """Finds megatron-core once, where the other finders do."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MEGATRON:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_lightly(module: ModuleType) -> None:
                with _light():
                    execute(module)

            spec.loader.exec_module = execute_lightly  # type: ignore[method-assign]
        return spec


@contextmanager
def _light() -> Iterator[None]:
    import torch

    at_once, wandb_is_imported = torch.compile, "wandb" in sys.modules
    torch.compile = _compiled_by_first_call(at_once)
    if not wandb_is_imported:
        sys.modules["wandb"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        yield
    finally:
        torch.compile = at_once
        if not wandb_is_imported:
            del sys.modules["wandb"]


def _compiled_by_first_call(at_once: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` for a decorator without arguments."""
    import torch

    def compile_later(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: list[Callable[..., Any]] = []

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # inside of another one
                return function(*args, **kwargs)
            if not compiled:
                compiled.append(at_once(function))
            return compiled[0](*args, **kwargs)

        return call

    return compile_later
