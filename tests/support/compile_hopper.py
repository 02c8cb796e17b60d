"""Compiles the Gluon kernels for sm_90 without a GPU; run in a process without the interpreter."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from dms_train.kernels.train_attention import launch_plan
from dms_train.kernels.train_attention import triton_hopper_backward as backward
from dms_train.kernels.train_attention import triton_hopper_forward as forward
from dms_train.kernels.train_attention.triton_hopper import forward_registers

SCALARS = dict.fromkeys(
    ("length", "padded", "n_blocks", "window", "section", "n_heads", "group"), "i32"
) | {"scale": "fp32"}


def descriptor(dtype: str, *block: int) -> str:
    kind = gl.float32 if dtype == "fp32" else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(list(block), kind)
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


def build(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, registers: int = 168
) -> Any:
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if types.get(name, "").startswith("*")
    }
    source = GluonASTSource(kernel, signature, fixed, aligned)
    options = {"num_warps": warps, "maxnreg": registers}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def packed_choice(name: str, packed: bool) -> tuple[dict[str, str], dict[str, Any]]:
    return ({name: "*i32"}, {}) if packed else ({}, {name: None})


def attend(d: int, packed: bool, block_n: int) -> Any:
    tiles = launch_plan._HOPPER[d][0]._replace(block_n=block_n)
    half = tiles.block_m // 2
    registers, computing = forward_registers(block_n, d)
    q, k = (descriptor("bf16", 1, 1, rows, d) for rows in (half, tiles.block_n))
    types = {"q_desc": q, "k_desc": k, "v_desc": k, "o_desc": q}
    types |= {"bias_desc": descriptor("fp32", tiles.block_n), "lse": "*fp32"}
    types |= {"blocks": "*i32", "counts": "*i32"} | SCALARS
    sizes = {"D": d, "HALF": half, "BLOCK_N": tiles.block_n, "PACKED": packed}
    more, absent = packed_choice("starts", packed)
    constants = sizes | {"STAGES": tiles.stages, "REGISTERS": computing} | absent
    return build(forward.attend, types | more, constants, tiles.warps, registers)


def attend_backward(d: int, packed: bool) -> Any:
    tiles = launch_plan._HOPPER[d][1]
    q, k = (descriptor("bf16", 1, 1, rows, d) for rows in (tiles.block_m, tiles.block_n))
    rows = descriptor("fp32", tiles.block_m)
    types = {"q_desc": q, "k_desc": k, "v_desc": k, "d_o_desc": q, "lse_desc": rows}
    types |= {"delta_desc": rows, "dq": "*fp32", "dk": "*bf16", "dv": "*bf16", "bias": "*fp32"}
    types |= {"d_log_keep": "*fp32", "counts": "*i32", "per_program": "i32"} | SCALARS
    types |= dict.fromkeys(("stride_b", "stride_h", "stride_s"), "i32")
    sizes = {"D": d, "SIZE": d, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    more, absent = packed_choice("ends", packed)
    constants = sizes | {"LIST_BLOCK": 128, "PACKED": packed, "STAGES": tiles.stages} | absent
    return build(backward.attend_backward, types | more, constants | {"WARPS": tiles.warps}, 8)


def main(d: int, packed: bool) -> None:
    for kernel in (attend(d, packed, 128), attend(d, packed, 64), attend_backward(d, packed)):
        print(kernel.metadata.shared, kernel.asm["ptx"].count("wgmma.mma_async"))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "packed")
