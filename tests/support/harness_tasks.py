"""Tasks of lm-evaluation-harness over exam sheets: a YAML file and JSON lines for each."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from dms_train.data_prep.exam_sheets import problem

CONTINUE, CHOOSE, ROLL = "sheets_continue", "sheets_choose", "sheets_roll"
STOPS, MAX_TOKENS = (".", "\n\n"), 30

_TEMPLATES = {
    CONTINUE: """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{continuation}}"
generation_kwargs:
  until: [".", "\\n\\n"]
  do_sample: false
  max_gen_toks: 30
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
    CHOOSE: """
output_type: multiple_choice
training_split: train
fewshot_split: train
num_fewshot: 2
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    ROLL: """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: bits_per_byte}
""",
}


def write_tasks(folder: Path, rows: int = 6) -> Path:
    """All three tasks; returns the folder for `--include-path`."""
    folder.mkdir(parents=True)
    makers = {CONTINUE: _prompts, CHOOSE: _questions, ROLL: _texts}
    for seed, (name, maker) in enumerate(makers.items()):
        files = {"test": maker(rows, seed)} | (
            {"train": maker(8, seed + 10)} if name == CHOOSE else {}
        )
        paths = {}
        for split, lines in files.items():
            paths[split] = str(folder / f"{name}_{split}.jsonl")
            Path(paths[split]).write_text("".join(json.dumps(line) + "\n" for line in lines))
        kwargs = {"data_files": paths, "cache_dir": str(folder / "cache")}
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {json.dumps(kwargs)}\n"
            f"test_split: test\n{_TEMPLATES[name]}metadata: {{version: 1.0}}\n"
        )
    return folder


def _prompts(count: int, seed: int) -> list[dict[str, Any]]:
    """Sheets of 1 to 4 questions."""
    draw, rows = random.Random(seed), []
    for row in range(count):
        lines = [problem(draw, "held_out").question for _ in range(1 + row % 4)]
        rows.append({"prompt": "\n".join(lines) + "\n", "continuation": lines[0]})
    return rows


def _questions(count: int, seed: int) -> list[dict[str, Any]]:
    """Equations with four answers of one to three tokens."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        asked = problem(draw, "held_out")
        answers = [f" {asked.answer + wrong}" for wrong in (0, 1, -7, 30)]
        rows.append({"question": f"{asked.question}\nx =", "choices": answers, "answer": 0})
    return rows


def _texts(count: int, seed: int) -> list[dict[str, Any]]:
    """Texts of 1 to 9 questions."""
    draw = random.Random(seed)
    return [
        {"text": "\n".join(problem(draw, "held_out").question for _ in range(1 + row % 9))}
        for row in range(count)
    ]
