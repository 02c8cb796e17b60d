"""Without a GPU Triton's interpreter runs the kernels; triton reads the choice when imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
