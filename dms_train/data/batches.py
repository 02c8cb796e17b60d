"""Microbatches of one data-parallel rank, cut from numbered samples.

The position in the data is one integer: the number of the first sample of a global batch. With the
same data settings, a number stands for the same tokens in every run. A run therefore resumes from
that integer alone, with any data-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dms_train.data.errors import DataError
from dms_train.method.documents import PackedDocuments
from dms_train.method.top_logits import TopLogits


class Sample(NamedTuple):
    """One training sequence.

    Attributes:
        tokens: int64 [s], inputs.
        labels: int64 [s], the token after each input.
        loss_mask: float32 [s], 1 where the position counts in the loss, else 0.
        document_lengths: Positions of each packed document, int64 [documents]; padding follows the
            last one. None if the sample is one text.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    document_lengths: Tensor | None = None

    def documents(self) -> list[Sample]:
        """Split a packed sample into its documents; a sample of one text stays as it is."""
        if self.document_lengths is None:
            return [self]
        sizes = self.document_lengths.tolist()
        columns = (x[: sum(sizes)].split(sizes) for x in self[:3])
        return [Sample(*parts) for parts in zip(*columns, strict=True)]


class Samples(Protocol):
    """Numbered samples, from 0 to the length minus 1."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, number: int, /) -> Sample:
        """Return the sample with this number."""
        ...


class Batch(NamedTuple):
    """One microbatch.

    Attributes:
        tokens: int64 [b, s], inputs.
        labels: int64 [b, s], the token after each input.
        loss_mask: float32 [b, s], 1 where the position counts in the loss, else 0.
        samples: int64 [b], global sample numbers.
        documents: Packed documents of the samples; None if each sample is one text.
        teacher: Stored distributions of the teacher, [b, s, k] and [b, s]; None without them.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    samples: Tensor
    documents: PackedDocuments | None = None
    teacher: TopLogits | None = None

    @property
    def positions(self) -> int | Tensor:
        """Number of positions that are not padding."""
        return self.tokens.numel() if self.documents is None else self.documents.tokens.sum()

    def first(self, samples: int, length: int) -> Batch:
        """Return the first `length` positions of the first samples; all except padding count."""
        tokens, labels, mask = (x[:samples, :length] for x in self[:3])
        documents, mask = None, torch.ones_like(mask)
        if self.documents is not None:
            # equal values of `first` stand side by side, and padding is a document of its own
            starts = [
                row[: min(length, int(count))]
                for row, count in zip(self.documents.first, self.documents.tokens, strict=True)
            ]
            lengths = [torch.unique_consecutive(row, return_counts=True)[1] for row in starts]
            documents = PackedDocuments.of(lengths[:samples], tokens.shape[1])
            mask = documents.is_token.to(mask.dtype)
        teacher = self.teacher and self.teacher.map(lambda x: x[:samples, :length])
        return Batch(tokens, labels, mask, self.samples[:samples], documents, teacher)

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply a function to every tensor."""
        return Batch(
            tokens=function(self.tokens),
            labels=function(self.labels),
            loss_mask=function(self.loss_mask),
            samples=function(self.samples),
            documents=None if self.documents is None else self.documents.map(function),
            teacher=None if self.teacher is None else self.teacher.map(function),
        )


class Teacher(Protocol):
    """Stored distributions of a teacher, by the numbers of samples."""

    def read(self, numbers: Sequence[int], tokens: Tensor) -> TopLogits:
        """Return the distributions of samples: [b, s, k] and [b, s].

        Args:
            numbers: Numbers of the samples.
            tokens: Their inputs, int64 [b, s].

        Raises:
            DataError: They are not stored, belong to other tokens, or cannot be read.
        """
        ...


class BatchSource:
    """The microbatches of one data-parallel rank.

    A global batch is a run of consecutive samples, cut into groups of `micro_batch_size`.
    Microbatch m of rank r is group m * data_parallel_size + r, so the set of microbatches does not
    depend on the data-parallel size.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        teacher: Teacher | None = None,
    ) -> None:
        """Fix the layout of a global batch, and take the distributions of `teacher` into it.

        Raises:
            ValueError: A size is not a whole number, the global batch does not divide into equal
                microbatches over the ranks, or the rank is out of range.
        """
        sizes = {
            "micro_batch_size": micro_batch_size,
            "global_batch_size": global_batch_size,
            "data_parallel_rank": data_parallel_rank,
            "data_parallel_size": data_parallel_size,
        }
        for name, value in sizes.items():
            if type(value) is not int:
                raise ValueError(f"{name}={value!r}: expected a whole number")
        if min(micro_batch_size, global_batch_size, data_parallel_size) < 1:
            raise ValueError("batch sizes and the data-parallel size must be at least 1")
        if global_batch_size % (micro_batch_size * data_parallel_size):
            raise ValueError(
                f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size "
                f"{micro_batch_size} times data-parallel size {data_parallel_size}"
            )
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(
                f"data-parallel rank {data_parallel_rank} is not below {data_parallel_size}"
            )
        self._dataset, self._teacher = dataset, teacher
        self._micro_batch_size = micro_batch_size
        self._global_batch_size = global_batch_size
        self._rank = data_parallel_rank
        self._size = data_parallel_size
        self._ahead: tuple[int, list[Batch]] | None = None  # first sample and its microbatches

    @property
    def global_batch_size(self) -> int:
        """Samples of a global batch."""
        return self._global_batch_size

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of this rank in one global batch."""
        return self._global_batch_size // (self._micro_batch_size * self._size)

    def read_ahead(self, first_sample: int) -> None:
        """Read the microbatches of the next global batch and keep them.

        An error is not raised here, so that the current step can finish. The next call reads again.
        """
        with suppress(Exception):
            self._ahead = first_sample, self._read(first_sample)

    def microbatches(self, first_sample: int) -> list[Batch]:
        """Return this rank's part of the global batch that starts at a sample.

        Args:
            first_sample: Number of the first sample of the global batch over all ranks.

        Returns:
            `num_microbatches` batches in the order in which to run them.

        Raises:
            DataError: The global batch reaches past the last sample, or a read failed.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == first_sample:
            return ahead[1]
        return self._read(first_sample)

    def _read(self, first_sample: int) -> list[Batch]:
        end = first_sample + self._global_batch_size
        if first_sample < 0 or end > len(self._dataset):
            raise DataError(
                f"samples {first_sample} to {end - 1} were requested, the data set was built with "
                f"{len(self._dataset)}; build it for all steps of the run"
            )
        return [self._microbatch(first_sample, m) for m in range(self.num_microbatches)]

    def _microbatch(self, first_sample: int, m: int) -> Batch:
        start = first_sample + (m * self._size + self._rank) * self._micro_batch_size
        numbers = range(start, start + self._micro_batch_size)
        rows = [self._dataset[number] for number in numbers]
        lengths = [row.document_lengths for row in rows if row.document_lengths is not None]
        tokens = torch.stack([row.tokens for row in rows])
        return Batch(
            documents=PackedDocuments.of(lengths, len(rows[0].tokens)) if lengths else None,
            teacher=None if self._teacher is None else self._teacher.read(numbers, tokens),
            tokens=tokens,
            labels=torch.stack([row.labels for row in rows]),
            loss_mask=torch.stack([row.loss_mask for row in rows]),
            samples=torch.tensor(list(numbers), dtype=torch.int64),
        )
