"""Operations of Triton's interpreter that NumPy computes in one call.

The interpreter derives types, shapes and conversions of every operation anew. Here it computes the
first result of each pair of types, and what followed from the types is kept for all others.
`tests/unit/kernels/test_interpreter.py` compares the results with torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}


def _divide(left: Any, right: Any) -> Any:
    return (left - np.fmod(left, right)) // right


_LOGICAL = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
_OPERATIONS = {
    "__add__": np.add,
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
    **_COMPARISONS,
    **_LOGICAL,
    "__floordiv__": _divide,
    "__mod__": np.fmod,
}
# Types that these operations take; all others take int32, int64 and float32.
_TYPES = {
    np.bitwise_and: {tl.int1},
    np.bitwise_or: {tl.int1},
    _divide: {tl.int32, tl.int64},
    np.fmod: {tl.int32, tl.int64},
}


def in_one_call(owner: Any, name: str, member: Any, call: Any) -> Any:
    """Return the short way of an operation that has one, and `call` of all others.

    Args:
        owner: Class or module of the operation.
        name: Name of the operation there.
        member: What Triton has under that name.
        call: The interpreter's way.
    """
    if owner is tl.tensor and name in _OPERATIONS:
        return _computed_directly(_OPERATIONS[name], call)
    if owner is tl.tensor and name == "__getitem__":
        return _indexed_directly(call)
    if owner is tl.tensor and name == "to":
        return _converted_directly(call)
    if name == "load" and member is tl.load:
        return _loaded_directly(call)
    return call


class _Operation(NamedTuple):
    """NumPy's form of an operation of two types.

    Attributes:
        function: Computes the result from the two arrays.
        left: NumPy's type to which the left operand is converted, or None.
        right: NumPy's type to which the right operand is converted, or None.
        dtype: Triton's type of the converted left operand.
        number: The right operand, if it is a number.
        result: NumPy's type of the result.
        values: Attributes of a tensor that follow from the type of the result.
    """

    function: Any
    left: np.dtype[Any] | None
    right: np.dtype[Any] | None
    dtype: Any
    number: Any
    result: np.dtype[Any]
    values: dict[str, Any]


def _compute(operation: _Operation, left: Any, right: Any) -> Any:
    """Return the result, or None if NumPy gives it another type than before."""
    function, left_type, right_type, dtype, other, expected, values = operation
    handle = left.handle
    data = handle.data
    if left_type is None:
        dtype = handle.dtype
    else:
        data = data.astype(left_type)
    if other is None:
        other = right.handle.data
        if right_type is not None:
            other = other.astype(right_type)
    data = function(data, other)
    return _tensor(data, dtype, values) if data.dtype is expected else None


def _tensor(data: Any, dtype: Any, values: dict[str, Any]) -> Any:
    handle = object.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    made = object.__new__(tl.tensor)
    made.__dict__.update(values)
    made.handle = handle
    return made


def _values(tensor: Any) -> dict[str, Any]:
    """Return what a tensor stores about its type."""
    return {k: v for k, v in tensor.__dict__.items() if k != "handle"}


def _computed_directly(function: Any, call: Any) -> Any:
    """Return the operation as one call of NumPy, which broadcasts as Triton does.

    The interpreter computes the first result of two types. It computes every result of types that
    NumPy does not have, and of NaN as a number.
    """
    known: dict[tuple[Any, ...], _Operation | None] = {}

    def operate(left: Any, right: Any) -> Any:
        kind = type(right)
        if kind is tl.constexpr:
            right = right.value
            kind = type(right)
        if kind is tl.tensor:
            key: tuple[Any, ...] = left.type.name, right.type.name
        elif kind is int or (kind is float and right == right):
            key = left.type.name, kind, right
        else:
            return call(left, right)
        operation = known.get(key)
        if operation is not None:
            computed = _compute(operation, left, right)
            return call(left, right) if computed is None else computed
        result = call(left, right)
        if key not in known:
            known[key] = _operation(function, left, right, result)
        return result

    return operate


def _operation(function: Any, left: Any, right: Any, result: Any) -> _Operation | None:
    """Describe how a result was computed; None if the interpreter must compute the next one too."""
    values, found = _values(result), result.handle.data.dtype
    if left.dtype.is_ptr():
        if function is not np.add or getattr(right, "dtype", None) not in (tl.int32, tl.int64):
            return None
        width = np.uint64(max(1, left.dtype.element_ty.primitive_bitwidth // 8))

        def moved(pointers: Any, offsets: Any) -> Any:
            return pointers + width * offsets

        return _Operation(moved, None, np.dtype(np.uint64), None, None, found, values)
    semantic = interpreter.interpreter_semantic
    other = semantic.to_tensor(right) if function in _COMPARISONS.values() else right
    pair = semantic.binary_op_type_checking_impl(left, other)
    dtype = pair[0].dtype
    given = {x.dtype for x in (left, other) if isinstance(x, tl.tensor)} | {pair[1].dtype, dtype}
    if not given <= _TYPES.get(function, {tl.int32, tl.int64, tl.float32}):
        return None
    wanted = interpreter._get_np_dtype(dtype)
    types = [None if getattr(x, "dtype", dtype) == dtype else wanted for x in (left, other)]
    number = None if isinstance(right, tl.tensor) else pair[1].handle.data
    return _Operation(function, *types, dtype, number, found, values)


def _indexed_directly(call: Any) -> Any:
    """Return the indexing of a block that only adds axes, as one call of NumPy."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    whole = slice(None)

    def index(block: Any, slices: Any) -> Any:
        if type(slices) is not tuple or not all(s is None or s == whole for s in slices):
            return call(block, slices)
        key = block.type.name, *[s is None for s in slices]
        if key not in known:
            found = call(block, slices)
            if block.type.is_block():
                known[key] = _values(found)
            return found
        return _tensor(block.handle.data[slices], block.handle.dtype, known[key])

    return index


def _converted_directly(call: Any) -> Any:
    """Return the conversion between integers and float32 as one call of NumPy."""
    known: dict[tuple[Any, ...], tuple[Any, Any, dict[str, Any]]] = {}
    types = {tl.int1, tl.int32, tl.int64, tl.float32}

    def to(block: Any, dtype: Any, *options: Any, **named: Any) -> Any:
        kind = dtype.value if type(dtype) is tl.constexpr else dtype
        if options or named or type(kind) is not tl.dtype:
            return call(block, dtype, *options, **named)
        if block.dtype.name == kind.name:
            return block
        key = block.type.name, kind.name
        if key not in known:
            found = call(block, dtype)
            if {block.dtype, kind} <= types and kind != tl.int1:
                known[key] = found.handle.data.dtype, found.handle.dtype, _values(found)
            return found
        wanted, kind, values = known[key]
        return _tensor(block.handle.data.astype(wanted), kind, values)

    return to


def _loaded_directly(call: Any) -> Any:
    """Return the load of a block with a mask of its shape without new masks and defaults."""
    known: dict[tuple[Any, ...], tuple[Any, Any, dict[str, Any]]] = {}
    read = interpreter._interpreter.load
    hints = {"cache_modifier", "eviction_policy"}

    def load(pointer: Any, mask: Any = None, other: Any = None, *more: Any, **named: Any) -> Any:
        number = other is None or type(other) in (int, float)
        if more or type(mask) is not tl.tensor or not number or not named.keys() <= hints:
            return call(pointer, mask, other, *more, **named)
        key = pointer.type.name, mask.type.name, type(other), str(other)
        if key in known:
            default, dtype, values = known[key]
            if pointer.handle.data.shape == mask.handle.data.shape == default.shape:
                data = read(pointer.handle.data, mask.handle.data, default, default.dtype)
                return _tensor(data, dtype, values)
        found = call(pointer, mask, other, **named)
        if pointer.type.is_block() and found.dtype == pointer.dtype.element_ty:
            default = np.zeros(found.handle.data.shape, found.handle.data.dtype)
            if other:
                semantic = interpreter.interpreter_semantic
                default[...] = semantic.cast(semantic.to_tensor(other), found.dtype).handle.data
            known[key] = default, found.handle.dtype, _values(found)
        return found

    return load
