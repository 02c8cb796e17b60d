"""Scale of the embeddings of a model."""

from __future__ import annotations

import torch

from dms_train.hf.architecture import Architecture
from dms_train.hf.typed import typed


@typed
def embedding_scale(architecture: Architecture, dtype: torch.dtype) -> float:
    """Return the factor on embeddings of this dtype, rounded to it; 1.0 for most families."""
    if not architecture.described.scaled_embeddings:
        return 1.0
    return float(torch.tensor(architecture.hidden_size**0.5, dtype=dtype))
