"""All ranks skip a step that is bad on one of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine
from dms_train.mcore.options import ParallelOptions
from dms_train.method.plan import StepPlan
from tests.support import tiny
from tests.support.ranks import values_of_ranks
from tests.support.resume_runs import LAYOUTS, build

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
PROCESSES = 2
NAMES = ("dp2", "tp2", "pp2")
WHERE = ("gradient", "batch", "loss")


def bad_step(engine: McoreEngine, where: str | None) -> dict[str, Any]:
    """A step that is not finite, on rank 1 only except for its loss; this rank's result.

    An overflowing sum of losses is bad although every gradient is finite.
    """
    view = engine.view
    batches = [tiny.batch(2 * group) for group in range(view.dp_rank, 4, view.dp_size)]
    inner = engine._gradients
    if where == "batch" and view.rank == 1:
        mask = batches[0].loss_mask * math.nan
        batches[0] = batches[0]._replace(loss_mask=mask)

    def not_finite(plan: StepPlan, given: Any) -> Any:
        totals = inner(plan, given)
        if where == "gradient" and view.rank == 1:
            for model in engine._models:
                for parameter in model.parameters():
                    parameter.main_grad.fill_(math.nan)
        if where == "loss":
            totals.values[0] = math.inf
        return totals

    engine._gradients = not_finite  # type: ignore[method-assign]
    before = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    result = engine.train_step(StepPlan(eviction="soft", channel_scale=0.0, target_cr=4.0), batches)
    engine._gradients = inner  # type: ignore[method-assign]
    after = dict(engine.hf_tensors())
    changed = [name for name, tensor in before.items() if not tensor.equal(after[name])]
    return {
        "skipped": result.skipped,
        "changed": len(changed),
        "finite": [math.isfinite(number) for number in (result.loss, result.grad_norm)],
    }


def same_weights(one: McoreEngine, other: McoreEngine) -> bool:
    """On rank 0; the others have nothing to compare."""
    found, expected = (dict(engine.hf_tensors()) for engine in (one, other))
    return all(found[name].equal(tensor) for name, tensor in expected.items())


def work() -> dict[str, dict[str, Any]]:
    """Results of this rank by layout."""
    found = {}
    for name in NAMES:
        view = groups.start(ParallelOptions(**LAYOUTS[name]), seed=1)
        engine, undisturbed = (build(name, "fp32", view, 1) for _ in range(2))
        results: dict[str, Any] = {str(where): bad_step(engine, where) for where in (*WHERE, None)}
        bad_step(undisturbed, None)
        results["same"] = same_weights(engine, undisturbed)
        found[name] = results
        groups.stop(keep_process_group=True)
    groups.stop()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return values_of_ranks(work, PROCESSES)


@pytest.mark.parametrize("layout", NAMES)
def test_all_ranks_agree(ranks: list[dict[str, dict[str, Any]]], layout: str) -> None:
    results = [rank[layout] for rank in ranks]
    for where in WHERE:
        assert [rank[where]["skipped"] for rank in results] == [True] * 2, where
        assert results[0][where]["changed"] == 0
        assert results[0][where]["finite"] == results[1][where]["finite"]
    assert results[0]["loss"]["finite"] == [False, True]
    assert [rank["None"]["skipped"] for rank in results] == [False] * 2
    assert results[0]["None"]["changed"] > 0


@pytest.mark.parametrize("layout", NAMES)
def test_the_step_after_them_is_that_of_a_run_without_them(
    ranks: list[dict[str, dict[str, Any]]], layout: str
) -> None:
    assert ranks[0][layout]["same"]
