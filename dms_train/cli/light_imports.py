"""Imports of torch and megatron-core without modules that they import and no command uses.

Torch imports Dynamo to keep it out of optimizers and of some other functions. `megatron.core`
decorates functions with `torch.compile`, which imports Dynamo and Inductor, and looks for wandb and
TensorBoard, which `observe` imports when a run is tracked.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"
_TRACKERS = ("wandb", "torch.utils.tensorboard")


def skip_unused_imports() -> None:
    """Have the first imports of torch and megatron-core in this process skip what is not used.

    Dynamo stays out until something is compiled: functions of megatron-core are compiled by their
    first call. Megatron-core does not find wandb and TensorBoard; others do.
    """
    known = {finder.name for finder in sys.meta_path if isinstance(finder, _Finder)}
    for name, context in _CONTEXTS.items():
        if name not in known and name not in sys.modules:
            sys.meta_path.insert(0, _Finder(name, context))


class _Finder(MetaPathFinder):
    """Finds a module once, where the other finders do, and lets it be executed in a context."""

    def __init__(
        self, name: str, context: Callable[[ModuleType], AbstractContextManager[None]]
    ) -> None:
        self.name, self._context = name, context

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_in_context(module: ModuleType) -> None:
                with self._context(module):
                    execute(module)

            spec.loader.exec_module = execute_in_context  # type: ignore[method-assign]
        return spec


@contextmanager
def _light_megatron(_: ModuleType) -> Iterator[None]:
    import torch

    at_once = torch.compile
    hidden = [name for name in _TRACKERS if name not in sys.modules]
    torch.compile = _compiled_by_first_call(at_once)
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # as if not installed
    try:
        yield
    finally:
        torch.compile = at_once
        for name in hidden:
            del sys.modules[name]


@contextmanager
def _light_disabling(module: ModuleType) -> Iterator[None]:
    yield
    disable = module._disable_dynamo

    def decorator(function: Callable[..., Any] | None = None, recursive: bool = True) -> Any:
        if function is None:
            return functools.partial(decorator, recursive=recursive)
        return _chosen_by_call(disable(function, recursive), function)

    module._disable_dynamo = decorator  # type: ignore[attr-defined]


@contextmanager
def _light_optimizers(module: ModuleType) -> Iterator[None]:
    yield
    graph_breaks = module._use_grad_for_differentiable

    def decorator(step: Callable[..., Any]) -> Callable[..., Any]:
        def plain(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            with module.torch.set_grad_enabled(optimizer.defaults["differentiable"]):
                return step(optimizer, *args, **kwargs)

        return _chosen_by_call(graph_breaks(step), plain)

    module._use_grad_for_differentiable = decorator  # type: ignore[attr-defined]


def _chosen_by_call(full: Callable[..., Any], light: Callable[..., Any]) -> Callable[..., Any]:
    """`full`, or what it does while Dynamo is not loaded and therefore compiles nothing."""

    @functools.wraps(full)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (full if _DYNAMO in sys.modules else light)(*args, **kwargs)

    return call


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


_CONTEXTS: dict[str, Callable[[ModuleType], AbstractContextManager[None]]] = {
    "torch._compile": _light_disabling,
    "torch.optim.optimizer": _light_optimizers,
    "megatron.core": _light_megatron,
}
