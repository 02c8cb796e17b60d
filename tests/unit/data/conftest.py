"""Small real token files for the tests of the data workspace."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from dms_train.data.index_file import bin_path, idx_path
from dms_train.data.manifest import Manifest, Source, file_sha256, write_manifest

VOCAB_SIZE = 61
EOD_ID = 0


@pytest.fixture
def make_shard(tmp_path: Path) -> Callable[..., str]:
    """A function that writes a shard of random documents and returns its prefix."""

    def make(
        name: str = "corpus", documents: int = 40, seed: int = 0, tokenizer: str = "a" * 64
    ) -> str:
        prefix = str(tmp_path / name)
        rng = np.random.default_rng(seed)
        builder = IndexedDatasetBuilder(str(bin_path(prefix)), DType.optimal_dtype(VOCAB_SIZE))
        tokens = 0
        for _ in range(documents):
            length = int(rng.integers(5, 60))
            document = [*rng.integers(1, VOCAB_SIZE, length).tolist(), EOD_ID]
            builder.add_document(document, [len(document)])
            tokens += len(document)
        builder.finalize(str(idx_path(prefix)))
        write_manifest(prefix, _describe(prefix, documents, tokens, tokenizer))
        return prefix

    return make


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the real inputs; skips where it is absent."""
    default = Path(__file__).parents[4] / "shared" / "data"
    folder = Path(os.environ.get("DMS_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip("set DMS_TEST_DATA to the folder with the real input files")
    return folder


def _describe(prefix: str, documents: int, tokens: int, tokenizer: str) -> Manifest:
    return Manifest(
        tokenizer_sha256=tokenizer,
        vocab_size=VOCAB_SIZE,
        eod_id=EOD_ID,
        max_token_id=VOCAB_SIZE - 1,
        documents=documents,
        tokens=tokens,
        bin_bytes=bin_path(prefix).stat().st_size,
        idx_bytes=idx_path(prefix).stat().st_size,
        idx_sha256=file_sha256(idx_path(prefix)),
        bin_sha256=file_sha256(bin_path(prefix)),
        dtype="uint16",
        sources=(Source(name="random", sha256="b" * 64, rows=documents),),
        created_with={"numpy": np.__version__},
    )
