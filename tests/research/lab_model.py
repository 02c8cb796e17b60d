"""A random model that reads the lab's words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.word_tokenizer import write_word_tokenizer
from dms_train.export.writer import write_export
from dms_train.method.base import MethodSpec
from research.data.words import WORDS
from tests.unit.inference import conftest as inference


def write_lab_model(directory: Path, spec: MethodSpec | None, target_cr: float = 2.0) -> None:
    """Write a model directory; with a method it evicts about half of all tokens."""
    architecture = replace(inference.tiny_architecture("llama"), vocab_size=len(WORDS))
    write_export(
        directory,
        architecture=architecture,
        spec=spec,
        cr_factor=None,
        target_cr=target_cr,
        dtype=torch.float32,
        export_format="dms",
        weights=inference.varied_weights(architecture, 0).items(),
        source_dir=None,
        selftest=None,
        provenance={},
    )
    write_word_tokenizer(directory, WORDS, overwrite=True)
