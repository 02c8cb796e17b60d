"""Implementation of `dispatch.Kernels` in Triton."""

from __future__ import annotations

from dms_train.kernels.decode.triton_accumulate import accumulate
from dms_train.kernels.decode.triton_append import append
from dms_train.kernels.decode.triton_attention import attend, attention_workspace
from dms_train.kernels.decode.triton_bounds import select_pages
from dms_train.kernels.decode.triton_choose import choose
from dms_train.kernels.decode.triton_pages import (
    allocate_pages,
    copy_shared_pages,
    release_pages,
)
from dms_train.kernels.decode.triton_report import report_status
from dms_train.kernels.layers.triton_embed import embed
from dms_train.kernels.layers.triton_gate import geglu, swiglu
from dms_train.kernels.layers.triton_linear import (
    add_linear,
    linear,
    linear_workspace,
    normed_input,
    swiglu_linear,
)
from dms_train.kernels.layers.triton_norm import add_norm
from dms_train.kernels.layers.triton_rope import rotate
from dms_train.kernels.layers.triton_sample import sample, sample_workspace
from dms_train.kernels.prefill.sparse import extend_prompt
from dms_train.kernels.prefill.triton_fp8 import read_fp8_pages, write_fp8_pages
from dms_train.kernels.prefill.triton_state import changed_pages, commit_prefill, plan_prompt

__all__ = [
    "accumulate",
    "add_linear",
    "add_norm",
    "allocate_pages",
    "append",
    "attend",
    "attention_workspace",
    "changed_pages",
    "choose",
    "commit_prefill",
    "copy_shared_pages",
    "embed",
    "extend_prompt",
    "geglu",
    "linear",
    "linear_workspace",
    "normed_input",
    "plan_prompt",
    "read_fp8_pages",
    "release_pages",
    "report_status",
    "rotate",
    "sample",
    "sample_workspace",
    "select_pages",
    "swiglu",
    "swiglu_linear",
    "write_fp8_pages",
]
