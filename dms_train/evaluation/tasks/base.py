"""Interface of tasks: documents, their prompts, how to sample, and the scorer of the answers."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.tasks.data_files import DataSource, read_rows

FIXTURES = Path(__file__).parents[2] / "assets" / "tasks"
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One problem.

    Attributes:
        id: Name of the document, unique in its task.
        question: Text of the problem in the wording of the prompt.
        gold: Right answers, in the order of the questions; most problems have one.
        details: Further values for the prompt or the scorer; plain JSON.
    """

    id: str
    question: str
    gold: tuple[str, ...]
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """A prompt before the format of a model is put around it.

    Attributes:
        user: Question.
        system: System prompt; empty for the format's own.
        answer_prefix: Start of the answer, written after the header of the assistant.
        plain: True if the text is the whole prompt, without any format.
    """

    user: str
    system: str = ""
    answer_prefix: str = ""
    plain: bool = False


TokenCounter = Callable[[Messages], int]


class Aggregate(StrEnum):
    """Rule that turns the chains of a document into one score.

    Attributes:
        VOTE: The answer that most chains give; the first to be given wins a tie.
        ANY: Right if any chain is right (pass@all).
        MEAN: Mean score of the chains.
    """

    VOTE = "vote"
    ANY = "any"
    MEAN = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSampling:
    """Sampling that a task is published with.

    Attributes:
        temperature: 0 is greedy.
        top_p: Share of the probability that is sampled from.
        max_tokens: Maximum number of tokens of an answer; None leaves it to the length of the run.
    """

    temperature: float = 0.6
    top_p: float = 0.95
    max_tokens: int | None = None


class Task(ABC):
    """Benchmark with a `name`: a module of this package, an entry point or `register_task`.

    Attributes:
        name: Name on the command line.
        title: Name in tables.
        scorer: Name of a scorer in `evaluation.scorers`.
        aggregate: Rule for several chains.
        sampling: Published sampling settings.
        where: Source of the documents for a user, in a few words.
        source: File of the task on the hub; None for a task that is generated or made by the user.
        scores_truncated: True if a text that reached `max_tokens` is scored. Reasoning that is cut
            off is wrong; a short answer of fixed length is not.
        published: Number of rows of a file without `source`; None accepts any number.
        publishable: True if a report may show what a model wrote about a document.
        fixtures: Folder of NAME.jsonl with the few documents of `task.fixture=true`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    scorer: ClassVar[str]
    where: ClassVar[str]
    aggregate: ClassVar[Aggregate] = Aggregate.VOTE
    sampling: ClassVar[TaskSampling] = TaskSampling()
    source: ClassVar[DataSource | None] = None
    scores_truncated: ClassVar[bool] = False
    publishable: ClassVar[bool] = True
    published: ClassVar[int | None] = None
    fixtures: ClassVar[Path] = FIXTURES

    @abstractmethod
    def document(self, row: Row, options: TaskOptions) -> Document:
        """Return the document of a row.

        Raises:
            KeyError: A column is missing.
            ValueError: A value cannot be used.
        """

    @abstractmethod
    def messages(self, document: Document) -> Messages:
        """Return the prompt of a document."""

    def selects(self, row: Row) -> bool:
        """Return whether a row of the file belongs to the task."""
        return True

    def stop(self, document: Document) -> tuple[str, ...]:
        """Return texts that end the answer besides the model's own end."""
        return ()

    def generate(self, options: TaskOptions, tokens: TokenCounter) -> Iterable[Row] | None:
        """Return the rows of a task that needs no file; None for one that does.

        Args:
            options: Number of documents, seed and length.
            tokens: Length of a prompt in tokens of the model.
        """
        return None

    def documents(self, options: TaskOptions, tokens: TokenCounter) -> list[Document]:
        """Return the first `options.limit` documents.

        Raises:
            EvaluationError: The data is absent, damaged, or not the published set.
            FileNotFoundError: `options.path` names no file.
        """
        rows, where = self._rows(options, tokens)
        documents: dict[str, Document] = {}
        for number, row in enumerate(rows, 1):
            if len(documents) == options.limit:
                break
            try:
                if not self.selects(row):
                    continue
                document = self.document({"number": number, **row}, options)
            except KeyError as error:
                raise EvaluationError(f"{where}:{number}: no column {error}") from None
            except (ValueError, TypeError, AttributeError) as error:
                raise EvaluationError(f"{where}:{number}: {error}") from None
            if not isinstance(document.question, str):
                raise EvaluationError(f"{where}:{number}: the problem is not text")
            if document.id in documents:
                raise EvaluationError(f"{where}:{number}: document {document.id} occurs twice")
            documents[document.id] = document
        if not documents:
            raise EvaluationError(f"{where}: no documents")
        return list(documents.values())

    def _rows(self, options: TaskOptions, tokens: TokenCounter) -> tuple[list[Row], str]:
        """Return all rows, and their name in error messages."""
        if options.fixture:
            path = self.fixtures / f"{self.name}.jsonl"
            return list(read_rows(path)), str(path)
        if options.path is None and not options.hub:
            generated = self.generate(options, tokens)
            if generated is None:
                hub = " or task.hub=true" if self.source is not None else ""
                raise EvaluationError(f"task {self.name}: needs task.path=FILE{hub}; {self.where}")
            return list(generated), f"task {self.name}"
        path = self._path(options)
        rows = list(read_rows(path, sha256=options.sha256))
        published = self.source.rows if self.source is not None else self.published
        if published not in (None, len(rows)) and not options.subset:
            raise EvaluationError(
                f"{path}: {len(rows)} rows, {self.title} has {published}; task.subset=true takes "
                "them as a part of it"
            )
        return list(rows), str(path)

    def _path(self, options: TaskOptions) -> Path:
        if options.path is not None:
            return Path(options.path)
        if self.source is None:
            raise EvaluationError(f"task {self.name}: not on the hub; {self.where}")
        return self.source.from_hub(download=options.download)


def fingerprint(documents: Iterable[Document]) -> str:
    """Return the SHA-256 of the content of documents, so that runs on other data are told apart."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps(asdict(document), sort_keys=True).encode())
    return digest.hexdigest()
