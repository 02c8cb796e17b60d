"""Exam sheets: solved problems, and the cost of the cache while answers are generated."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dms_train.data_prep.exam_sheets import held_out_problems
from dms_train.evaluation.bootstrap import ratio
from dms_train.evaluation.problems import count_correct, greedy_params
from dms_train.evaluation.tasks.base import Document
from dms_train.inference.llm import LLM
from research.policies.cases import Case

_END = "\n\n"  # end of a sheet


@dataclass(frozen=True, kw_only=True)
class ExamTask:
    """Sheets of problems that no training text holds.

    Attributes:
        model: The dense model.
        sheets: Number of sheets.
        problems: Problems on a sheet.
        max_tokens: Largest number of tokens of an answer.
        seed: Seed of the sheets.
    """

    model: Path
    sheets: int = 40
    problems: int = 2
    max_tokens: int = 240
    seed: int = 1

    name = "exam"

    def settings(self) -> dict[str, Any]:
        """Return the values that a result depends on, besides the case."""
        return {"sheets": self.sheets, "problems": self.problems, "max_tokens": self.max_tokens}

    def measure(self, case: Case) -> Mapping[str, Any]:
        """Measure accuracy with its interval, and means over the sheets."""
        problems = held_out_problems(self.sheets, self.problems, self.seed)
        sheets = [
            Document(
                id=str(number),
                question=sheet.prompt,
                gold=tuple(map(str, sheet.answers)),
                details={"stop": _END},
            )
            for number, sheet in enumerate(problems)
        ]
        total = max(len(s.question) for s in sheets) + self.max_tokens  # a character is a token
        llm = LLM(
            case.model or self.model,
            dtype="float32",
            max_num_seqs=len(sheets),
            slab_pages=8,
            **case.engine(total),
        )
        since = time.process_time()
        # some policies draw random numbers
        params = [replace(greedy_params(s, self.max_tokens), seed=n) for n, s in enumerate(sheets)]
        outputs = llm.generate([sheet.question for sheet in sheets], params)
        seconds = time.process_time() - since
        hits = list(map(float, count_correct(sheets, [o.outputs[0].text for o in outputs])))
        accuracy = ratio(hits, [float(self.problems)] * len(hits))
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        assert llm.kv is not None
        return {
            "quality": [accuracy.value, accuracy.low, accuracy.high],
            "reads": sum(o.kv.kv_reads for o in outputs) / (tokens - len(outputs)),
            "peak_tokens": sum(o.kv.peak_live_tokens for o in outputs) / len(outputs),
            "bytes": llm.kv.peak_allocated_bytes / len(outputs),
            "ms": 1e3 * seconds / tokens,
            "tokens": tokens / len(outputs),
        }
