"""Options of the model that a run starts from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from dms_train.hf.architecture import Architecture
from dms_train.limits import AtLeast, Positive

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """A Hugging Face directory, GGUF file or hub id, or an architecture to train from scratch.

    Attributes:
        path: Directory, GGUF file or hub id of the model that is retrofitted (and of its teacher).
        revision: Hub revision; ignored for directories.
        local_files_only: Never access the hub; a hub id must then be in the local cache.
        architecture: Architecture for `pretrain`; exactly one of `path` and this is set.
        max_position_embeddings: Longest context; None takes the longest context of the model.
            Nothing else of RoPE changes.
        tokenizer: Directory with the tokenizer of a model that is trained from scratch; exports
            carry its files. With `path`, the tokenizer comes from the model.
        init_std: Standard deviation of random initial weights.
    """

    path: str | None = None
    revision: str | None = None
    local_files_only: bool = True
    architecture: Architecture | None = None
    max_position_embeddings: Annotated[int | None, AtLeast(1)] = None
    tokenizer: str | None = None
    init_std: Annotated[float, Positive()] = 0.02

    def with_context(self, architecture: Architecture) -> Architecture:
        """Return the architecture with `max_position_embeddings` if it is set."""
        if self.max_position_embeddings is None:
            return architecture
        return replace(architecture, max_position_embeddings=self.max_position_embeddings)
