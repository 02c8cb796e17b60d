"""Problems with known answers: documents of the task `exam_sheets`, answered greedily."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from dms_train.evaluation.bootstrap import Estimate, ratio
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.measure import Cost, answer_cost
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.scorers.base import AnswerChecker
from dms_train.evaluation.scorers.sheet import SheetScorer
from dms_train.evaluation.tasks.base import Document
from dms_train.evaluation.tasks.exam_sheets import ExamSheets
from dms_train.evaluation.tasks.prompts import encode, load_tokenizer, plain_text
from dms_train.hf.architecture import Architecture
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams

_TASK = ExamSheets()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """Problems, and how a model answers them.

    Attributes:
        documents: Exam sheets; each holds one or more problems.
        scorer: Scorer of the answers.
        max_tokens: Maximum number of tokens to generate for a document.
        max_num_seqs: Number of documents that are answered at the same time.
    """

    documents: list[Document]
    scorer: SheetScorer
    max_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Result of one model on a problem set.

    Attributes:
        share: Share of the problems that are answered right.
        cost: Cost of the model's cache.
    """

    share: Estimate
    cost: Cost


def read_problems(path: Path, max_problems: int) -> list[Document]:
    """Return the first exam sheets of a file.

    Args:
        path: File with one object `{"prompt": text, "answers": [text, ...], "stop": text}` a row.
        max_problems: Maximum number of problems on the returned sheets.

    Raises:
        FileNotFoundError: The file does not exist.
        EvaluationError: A row is damaged, or the first sheet alone has more problems.
    """
    documents = _TASK.documents(TaskOptions(path=str(path)), lambda messages: 0)
    running_counts = accumulate(len(document.gold) for document in documents)
    sheets = [
        d for d, count in zip(documents, running_counts, strict=True) if count <= max_problems
    ]
    if not sheets:
        raise EvaluationError(f"{path}: no sheet of at most max_problems={max_problems} problems")
    return sheets


def check_prompts(documents: list[Document], directory: Path, architecture: Architecture) -> None:
    """Fail if the model in `directory` cannot read the prompts.

    Raises:
        EvaluationError: The model has no tokenizer, or a prompt is too long for it.
    """
    tokenizer = load_tokenizer(directory)
    longest = max(
        len(encode(tokenizer, prompt_text(document), directory)) for document in documents
    )
    if longest >= architecture.max_position_embeddings:
        raise EvaluationError(
            f"a prompt of {longest} tokens: the model takes "
            f"{architecture.max_position_embeddings}; shorten the problems"
        )


def prompt_text(document: Document) -> str:
    """Return the text that a model continues."""
    return plain_text(_TASK.messages(document))


def greedy_params(document: Document, max_tokens: int) -> SamplingParams:
    """Return the parameters of a greedy answer that ends at the document's stop text."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=_TASK.stop(document))


def evaluate_accuracy(
    directory: Path, problems: ProblemSet, engine_options: dict[str, Any]
) -> Accuracy:
    """Answer problems greedily with one model.

    Args:
        directory: Directory of the model.
        problems: The problems.
        engine_options: Fields of `EngineOptions`.
    """
    documents = problems.documents
    llm = LLM(directory, max_num_seqs=problems.max_num_seqs, **engine_options)
    params = [greedy_params(document, problems.max_tokens) for document in documents]
    outputs = llm.generate([prompt_text(document) for document in documents], params)
    texts = [output.outputs[0].text for output in outputs]
    return Accuracy(
        share=ratio(
            [float(count) for count in count_correct(documents, texts, problems.scorer)],
            [float(len(document.gold)) for document in documents],
        ),
        cost=answer_cost(llm, outputs),
    )


def count_correct(
    documents: list[Document], texts: list[str], scorer: SheetScorer | None = None
) -> list[int]:
    """Return the number of right answers in the text of each document."""
    scorer = scorer or SheetScorer()
    with AnswerChecker() as checker:
        scores = [
            scorer.scores(document, [text], checker)[0]
            for document, text in zip(documents, texts, strict=True)
        ]
    return [sum(score.correct) for score in scores]
