"""Two results of the harness beside each other, and published scores."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.harness.comparison import (
    compare,
    published_scores,
    require_same_conditions,
    table,
)

COUNT = 400
NAMES = {"all", "inner", "piqa", "arc"}


def results(values: list[float]) -> dict[str, Any]:
    """Results of a task whose metric `acc` is a mean and whose `perplexity` is not."""
    samples = [
        {"doc_id": n, "filter": "none", "acc": value, "perplexity": -2.0}
        for n, value in enumerate(values)
    ]
    random.Random(0).shuffle(samples)
    return {
        "results": {
            "all": {"alias": "all", "acc,none": statistics.mean(values), "acc_stderr,none": 0.1},
            "piqa": {
                **{"alias": "piqa", "acc,none": statistics.mean(values), "acc_stderr,none": "N/A"},
                **{"perplexity,none": math.exp(2), "acc_norm,none": 0.5},
            },
        },
        "n-shot": {"piqa": 5},
        "n-samples": {"piqa": {"original": 1838, "effective": len(values)}},
        "group_subtasks": {"all": ["piqa"], "piqa": []},
        "samples": {"piqa": samples},
        "dms": {"settings": {"limit": 4}, "definitions": {}, "tasks": {"piqa": {}}},
    }


def test_differences_are_paired_by_document():
    draw = random.Random(1)
    first = [float(draw.random() < 0.5) for _ in range(COUNT)]
    second = [value if draw.random() < 0.95 else 1 - value for value in first]
    scores = {
        (each.task, each.metric): each
        for each in compare(results(second), results(first), "SmolLM2-135M-Instruct", NAMES)
    }
    assert set(scores) == {
        *(("all", "acc"), ("piqa", "acc"), ("piqa", "perplexity"), ("piqa", "acc_norm"))
    }
    found = scores["piqa", "acc"].difference
    changes = [b - a for a, b in zip(first, second, strict=True)]
    error = statistics.stdev(changes) / math.sqrt(COUNT)
    assert found.value == pytest.approx(statistics.mean(changes))
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    unpaired = math.hypot(statistics.stdev(first), statistics.stdev(second)) / math.sqrt(COUNT)
    assert found.high - found.low < 0.5 * 2 * 1.96 * unpaired
    assert scores["all", "acc"].documents == scores["piqa", "acc"].documents == COUNT
    assert scores["all", "acc"].difference == found, "a group of one task"
    assert scores["piqa", "perplexity"].difference is None
    published = [each["value"] for each in scores["piqa", "acc_norm"].published]
    assert published == [0.663, 0.6692]
    assert not scores["piqa", "acc"].published


def test_a_group_is_compared_over_the_documents_of_all_of_its_tasks():
    """The second task is in a group of the group, and documents of both have the same numbers."""
    both = []
    for values in ([1.0, 0.0, 1.0], [1.0, 1.0, 0.0]):
        found = results(values)
        found["samples"]["arc"] = results([*values, 1.0])["samples"]["piqa"]
        found["group_subtasks"] = {"all": ["piqa", "inner"], "inner": ["arc"]}
        found["n-samples"]["arc"] = {"original": 9, "effective": 4}
        found["results"]["all"]["acc,none"] = (2 * sum(values) + 1.0) / 7
        both.append(found)
    both[1]["samples"]["arc"][0]["acc"] = 1 - both[1]["samples"]["arc"][0]["acc"]
    changed = both[1]["samples"]["arc"][0]["acc"]
    both[1]["results"]["all"]["acc,none"] += (2 * changed - 1) / 7
    score = next(each for each in compare(both[1], both[0], None, NAMES) if each.task == "all")
    assert score.documents == 7
    assert score.difference.value == pytest.approx((2 * changed - 1) / 7)
    both[1]["results"]["all"]["acc,none"] = 0.123  # a mean that weights the tasks otherwise
    score = next(each for each in compare(both[1], both[0], None, NAMES) if each.task == "all")
    assert score.difference is None


def test_a_table_has_the_columns_that_are_known():
    alone = table(compare(results([1.0, 0.0]), None, None, NAMES))
    assert alone.splitlines()[0] == "| task | metric | shots | documents | model |"
    assert "| piqa | acc | 5 | 2 | 0.5000 |" in alone
    both = table(compare(results([1.0, 0.0]), results([1.0, 1.0]), "SmolLM2-135M-Instruct", NAMES))
    assert "| difference | published |" in both.splitlines()[0]
    assert "0.663 (lighteval, 0-shot); 0.6692 (lm-eval, 0-shot)" in both


def test_published_scores_have_a_source():
    for scores in published_scores().values():
        for each in scores:
            assert 0 < each["value"] < 1
            assert all(each[name] for name in ("task", "metric", "settings", "source"))


@pytest.mark.parametrize(
    ("conditions", "tasks", "message"),
    [
        ({"settings": {"limit": 5}}, ["piqa"], r"its limit \(settings\) was 4, here it is 5"),
        ({"definitions": {"piqa": {}}}, ["piqa"], r"its piqa \(definitions\) was None"),
        ({"settings": {"limit": 4}}, ["piqa", "arc"], "its results lack arc"),
        ({"settings": {"limit": 4}}, ["all"], "its results lack all"),
    ],
)
def test_other_conditions_are_refused(conditions, tasks, message):
    require_same_conditions(results([1.0]), {"settings": {"limit": 4}}, ["piqa"])
    with pytest.raises(EvaluationError, match=message):
        require_same_conditions(results([1.0]), conditions, tasks)
