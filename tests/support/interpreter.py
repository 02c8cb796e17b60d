"""Triton's interpreter without work that has no effect, and with the rounding of a GPU.

It looks through the modules of the language for functions to replace at every launch and at every
call of a kernel's functions, but their names do not change. It computes whether a sum or a product
of integers overflows, and asserts it in debug mode only. It describes the shape and the type of
every value anew, though a kernel has few of them, and makes a tensor of a number at each use. It
derives the common shape and type of two operands each time. Without that it takes a tenth of the
time. `interpreted_operations.py` has the operations that NumPy computes in one call.

The functions of the language stay replaced after the first launch: a process that interprets
kernels cannot compile any.

Where rounding to FP8 reaches the next power of two, it loses the carry, so that 1.99 becomes 1
(https://github.com/triton-lang/triton/pull/11897, not merged); torch rounds there instead.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.support.interpreted_operations import in_one_call

_OPTIONS = ("allow_lhs_ptr", "allow_rhs_ptr", "arithmetic_check", "div_or_mod")


@functools.cache
def leave_out_idle_work() -> None:
    """For all kernels of this process; nothing changes where triton is built otherwise."""
    _index_by_item()
    _find_functions_once()
    _replace_functions_once()
    _read_signatures_once()
    _leave_arguments_in_place()
    _call_functions_directly()
    _keep_types()
    _trust_sizes()
    _convert_different_types_only()
    _find_common_shapes_once()
    _keep_numbers()
    _compare_types_by_identity_first()
    _unwrap_plain_values_first()
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not options.debug:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def round_fp8_to_nearest() -> None:
    """For all kernels of this process: float32 to e4m3 as on a GPU, ties to even, at most 448."""
    convert = interpreter._convert_float

    def rounded(x: Any, before: Any, after: Any, rounding: Any) -> Any:
        if (before, after) != (tl.float32, tl.float8e4nv):
            return convert(x, before, after, rounding)
        limited = torch.from_numpy(np.ascontiguousarray(x)).clamp(-448, 448)
        return limited.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = rounded


def _index_by_item() -> None:
    """Let scalars be an index; Triton 3.6 takes an array of one element, which numpy refuses."""
    patch = getattr(interpreter, "_patch_lang_tensor", None)
    if not _has_parameters(patch, "tensor", "scope"):
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _has_parameters(function: Any, *names: str) -> bool:
    return function is not None and [*inspect.signature(function).parameters] == [*names]


def _find_functions_once() -> None:
    search = getattr(interpreter, "_patch_builtin", None)
    if not _has_parameters(search, "pkg", "builder", "scope"):
        return
    places = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    names = {
        place: [name for name, value in inspect.getmembers(place) if tl.core.is_builtin(value)]
        for place in places
    }

    def replace_known(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in names:
            search(pkg, builder, scope)
            return
        for name in names[pkg]:
            member = getattr(pkg, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    interpreter._patch_builtin = replace_known


def _replace_functions_once() -> None:
    """The language stays as the first launch of a kernel that names a module has replaced it."""
    replace = getattr(interpreter, "_patch_lang", None)
    scope_type = getattr(interpreter, "_LangPatchScope", None)
    if not _has_parameters(replace, "fn") or scope_type is None:
        return
    seen: set[Any] = set()
    replaced: set[ModuleType] = set()
    kept = scope_type()
    kept.restore = lambda: None

    def replace_new(fn: Any) -> Any:
        if fn not in seen:
            named = {value for value in fn.__globals__.values() if value is tl or value is tl.core}
            if not named <= replaced:
                replace(fn)
                replaced.update(named)
            seen.add(fn)
        return kept

    interpreter._patch_lang = replace_new


def _read_signatures_once() -> None:
    """A launch reads the names of a kernel's arguments twice, from the same function."""
    original = inspect.getfullargspec

    class Inspect(ModuleType):
        getfullargspec = staticmethod(functools.cache(original))

        def __getattr__(self, name: str) -> Any:
            return getattr(inspect, name)

    if getattr(interpreter, "inspect", None) is inspect:
        interpreter.inspect = Inspect("inspect")


def _leave_arguments_in_place() -> None:
    """Skip the copies of arguments to the CPU, where they already are; describe each type once."""
    executor = interpreter.GridExecutor
    to_cpu, back = executor._init_args_hst, executor._restore_args_dev
    if _has_parameters(to_cpu, "self", "args_dev", "kwargs") and _has_parameters(
        back, "self", "args_dev", "args_hst", "kwargs", "kwargs_hst"
    ):
        executor._init_args_hst = lambda self, args_dev, kwargs: (args_dev, kwargs)
        executor._restore_args_dev = lambda self, *_: None
    if _has_parameters(getattr(tl, "str_to_ty", None), "name", "c"):
        tl.str_to_ty = functools.cache(tl.str_to_ty)


def _call_functions_directly() -> None:
    """Without a wrapper of its own, which checks that the argument is there that is passed here."""
    if not _has_parameters(interpreter._patch_attr, "obj", "name", "member", "builder", "scope"):
        return
    checks = tl.core.program_id.__code__  # the code of every function that `builtin` wraps

    def replace(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is checks else member
        semantic = interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        call = in_one_call(obj, name, member, call)
        scope.set_attr(obj, name, call)

    interpreter._patch_attr = replace


def _keep_types() -> None:
    """One object for each type of a block, and what a tensor says of its type computed once."""
    blocks: dict[tuple[Any, ...], Any] = {}
    of_numpy: dict[str, np.dtype[Any]] = {}
    describe, describe_block = tl.tensor.__init__, tl.block_type.__init__
    find = interpreter._get_np_dtype

    def block(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        key = (element_ty.name, *sizes)
        if key not in blocks:
            described = object.__new__(cls)
            describe_block(described, element_ty, shape)
            blocks[key] = described
        return blocks[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("_tensor_values")
        if known is None:
            describe(self, handle, type)
            type._tensor_values = {k: v for k, v in self.__dict__.items() if k != "handle"}
        else:
            self.__dict__.update(known)
            self.handle = handle

    def numpy_type(tt_dtype: Any) -> np.dtype[Any]:
        if tt_dtype.name not in of_numpy:
            of_numpy[tt_dtype.name] = find(tt_dtype)
        return of_numpy[tt_dtype.name]

    tl.block_type.__new__ = block
    tl.block_type.__init__ = lambda self, element_ty, shape: None
    tl.tensor.__init__ = tensor
    interpreter._get_np_dtype = numpy_type


def _trust_sizes() -> None:
    """The interpreter's own arrays have the size of their type."""
    if hasattr(interpreter.TensorHandle, "__post_init__"):
        interpreter.TensorHandle.__post_init__ = lambda self: None


def _convert_different_types_only() -> None:
    """Operands of one type are taken as they are, except those of a division.

    Pointers and offsets are checked once for each pair of types, and are never converted.
    """
    convert = TritonSemantic.binary_op_type_checking_impl
    checked: set[tuple[Any, ...]] = set()

    def convert_different(
        self: Any, lhs: Any, rhs: Any, *options: bool, **named: bool
    ) -> tuple[Any, Any]:
        if not isinstance(lhs, tl.tensor) or not isinstance(rhs, tl.tensor):
            return convert(self, lhs, rhs, *options, **named)
        left, right = lhs.dtype, rhs.dtype
        if left.is_ptr() or right.is_ptr():
            key = (lhs.type.name, rhs.type.name, options, *named.items())
            if key in checked:
                return self.broadcast_impl_value(lhs, rhs)
            pair = convert(self, lhs, rhs, *options, **named)
            checked.add(key)
            return pair
        if left is right and not named.get("div_or_mod", len(options) == 4):
            return (lhs, rhs) if lhs.type is rhs.type else self.broadcast_impl_value(lhs, rhs)
        return convert(self, lhs, rhs, *options, **named)

    if _has_parameters(convert, "self", "lhs", "rhs", *_OPTIONS):
        TritonSemantic.binary_op_type_checking_impl = convert_different


def _find_common_shapes_once() -> None:
    """The common shape of two operands follows from their types."""
    broadcast = TritonSemantic.broadcast_impl_value
    wanted: dict[tuple[str, str], tuple[Any, Any]] = {}

    def expand(value: Any, wanted: Any) -> Any:
        if wanted is None:
            return value
        kind, shape = wanted
        data = np.empty(shape, value.handle.data.dtype)
        data[...] = value.handle.data
        return tl.tensor(interpreter.TensorHandle(data, value.handle.dtype.scalar), kind)

    def broadcast_known(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        key = lhs.type.name, rhs.type.name
        if key in wanted:
            left, right = wanted[key]
            return expand(lhs, left), expand(rhs, right)
        pair = broadcast(self, lhs, rhs)
        left, right = (
            None if found is given else (found.type, found.handle.data.shape)
            for found, given in zip(pair, (lhs, rhs), strict=True)
        )
        wanted[key] = left, right
        return pair

    if _has_parameters(broadcast, "self", "lhs", "rhs"):
        TritonSemantic.broadcast_impl_value = broadcast_known


def _keep_numbers() -> None:
    """One tensor for a number beside tensors of one type, as long as these are not converted."""
    convert = TritonSemantic.binary_op_type_checking_impl
    if not _has_parameters(convert, "self", "lhs", "rhs", "options", "named"):
        return
    tensors: dict[tuple[Any, ...], Any] = {}
    numbers = (int, float, bool)

    def convert_once(
        self: Any, lhs: Any, rhs: Any, *options: bool, **named: bool
    ) -> tuple[Any, Any]:
        left = type(lhs) in numbers
        if left == (type(rhs) in numbers):
            return convert(self, lhs, rhs, *options, **named)
        number, value = (lhs, rhs) if left else (rhs, lhs)
        if not isinstance(value, tl.tensor) or value.dtype.is_ptr():
            return convert(self, lhs, rhs, *options, **named)
        # as text, 0.0 differs from -0.0
        key = (value.type.name, type(number), number or str(number), left, options, *named.items())
        if key in tensors:
            return (tensors[key], value) if left else (value, tensors[key])
        pair = convert(self, lhs, rhs, *options, **named)
        if pair[left] is value:
            tensors[key] = pair[not left]
        return pair

    TritonSemantic.binary_op_type_checking_impl = convert_once


def _compare_types_by_identity_first() -> None:
    equal = tl.dtype.__eq__
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _unwrap_plain_values_first() -> None:
    """Return tensors and numbers of Python, which are most values, without further checks."""
    unwrap = tl.core._unwrap_if_constexpr
    plain = {tl.tensor, tl.dtype, int, float, bool, str, slice, type(None)}

    def unwrap_others(o: Any) -> Any:
        kind = type(o)
        if kind in plain:
            return o
        return o.value if kind is tl.constexpr else unwrap(o)

    tl.core._unwrap_if_constexpr = unwrap_others
