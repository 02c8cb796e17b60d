"""lm-evaluation-harness' client of completions gives the numbers of the run in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="pip install -c constraints.txt -e '.[eval]'")
pytest.importorskip("tenacity", reason="the harness' client needs tenacity")

from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from dms_train.data_prep.exam_tokenizer import write_exam_tokenizer
from dms_train.evaluation.harness.model import EngineLM
from dms_train.inference.options import EngineOptions
from tests.support import served_model
from tests.support.harness_tasks import CHOOSE, CONTINUE, MAX_TOKENS, ROLL, write_tasks
from tests.support.served_model import Running
from tests.unit.evaluation.conftest import SPEC, write_model

TASKS = (CONTINUE, CHOOSE, ROLL)


@pytest.fixture(scope="module")
def sheets(tmp_path_factory) -> Path:
    """A DMS export with the tokenizer of the exam sheets."""
    root = tmp_path_factory.mktemp("sheets")
    write_exam_tokenizer(root / "tokenizer")
    (root / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": 0}')
    write_model(root / "model", SPEC, 0, root / "tokenizer")
    return root / "model"


@pytest.fixture(scope="module")
def served(sheets) -> Iterator[Running]:
    with served_model.serving(sheets, engine={"max_num_seqs": 8, "prefill_chunk": 32}) as running:
        yield running


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> Callable[[Any], dict[str, list[Any]]]:
    """A model of the harness -> its responses to each task."""
    tasks = write_tasks(tmp_path_factory.mktemp("harness") / "tasks")

    def _evaluated(lm: Any) -> dict[str, list[Any]]:
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        found = simple_evaluate(
            model=lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0
        )
        return {
            task: [
                response[0]
                for sample in sorted(found["samples"][task], key=lambda row: row["doc_id"])
                for response in sample["resps"]
            ]
            for task in TASKS
        }

    return _evaluated


@pytest.fixture(scope="module")
def ours(sheets, evaluated) -> dict[str, list[Any]]:
    return evaluated(EngineLM(sheets, EngineOptions(max_num_seqs=8)))


@pytest.mark.parametrize(
    "how", [{"batch_size": 3}, {"batch_size": 1, "num_concurrent": 4}], ids=["batch", "concurrent"]
)
def test_answers_over_http_are_those_in_one_process(sheets, served, evaluated, ours, how):
    client = LocalCompletionsAPI(
        model=served_model.NAME,
        base_url=f"{served.url}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=str(sheets),
        max_length=served_model.LONGEST,
        max_retries=1,
        **how,
    )
    found = evaluated(client)
    assert found[CONTINUE] == ours[CONTINUE]
    assert min(map(len, ours[CONTINUE])) < MAX_TOKENS, "no stop text was met"
    values, greedy = zip(*found[CHOOSE], strict=True)
    own_values, own_greedy = zip(*ours[CHOOSE], strict=True)
    assert values == pytest.approx(own_values, abs=1e-4)
    assert greedy == own_greedy
    assert found[ROLL] == pytest.approx(ours[ROLL], abs=1e-4, rel=1e-6)
    served.wait_until_idle()
    assert served.engine.kv.cr_factor > 1.3
